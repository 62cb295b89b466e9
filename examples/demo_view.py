"""How the demo's story is shown: live on a terminal, in plain lines elsewhere, and as a picture."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from demo_story import FIRST, NEWCOMER, Follower, Story

LAST_LINES = 8


class View(Protocol):
    def refresh(self, story: Story) -> None:
        """Show the story so far."""


class PlainView(AbstractContextManager["PlainView"]):
    """Prints each line of the story once."""

    def __init__(self) -> None:
        self.printed = 0

    def refresh(self, story: Story) -> None:
        for line in story.lines[self.printed :]:
            print(line, flush=True)
        self.printed = len(story.lines)

    def __exit__(self, *_: object) -> None:
        pass


class LiveView(AbstractContextManager["LiveView"]):
    """One screen that is drawn again as the story goes on."""

    def __init__(self) -> None:
        from rich.live import Live

        self.live = Live(refresh_per_second=5)

    def __enter__(self) -> LiveView:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def refresh(self, story: Story) -> None:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        events = Text("\n".join(story.lines[-LAST_LINES:]))
        self.live.update(
            Panel(
                Group(self._progress(story), self._peers(story), events), title=f"p2pavg: run {story.run_id}"
            )
        )

    def _progress(self, story: Story) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        rows = [("the swarm", story.followers.get(FIRST), story.epoch)]
        if story.alone:
            rows.append(("one process, alone", story.alone, story.alone.epoch))
        for words, follower, epoch in rows:
            loss = f"validation loss {follower.validations[-1]['loss']:.3f}" if _validated(follower) else ""
            bar = ProgressBar(total=story.epochs, completed=epoch, width=36)
            table.add_row(words, bar, f"epoch {epoch}/{story.epochs}", loss)
        return table

    def _peers(self, story: Story) -> Any:
        from rich.table import Table

        table = Table(expand=True)
        columns = (
            "peer",
            "state",
            "epoch",
            "peers",
            "samples",
            "samples/s",
            "calculating s",
            "communicating s",
        )
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number < 2 else "right")
        colours = {"training": "green", "killed": "red", "done": "cyan", "starting": "yellow"}
        for follower in story.followers.values():
            state = f"[{colours[follower.state]}]{follower.state}"
            if not follower.epochs:
                table.add_row(follower.name, state)
                continue
            last = follower.epochs[-1]
            table.add_row(
                follower.name,
                state,
                str(last["epoch"]),
                str(last["peers"]),
                str(follower.samples),
                f"{last['local_samples'] / max(last['seconds_total'], 1e-9):.0f}",
                f"{last['seconds_calculation']:.2f}",
                f"{last['seconds_communication']:.2f}",
            )
        return table


def _validated(follower: Follower | None) -> bool:
    return follower is not None and bool(follower.validations)


def best_view() -> LiveView | PlainView:
    """A live view on a terminal, plain lines elsewhere."""
    return LiveView() if sys.stdout.isatty() else PlainView()


def draw(story: Story, path: Path) -> None:
    """Both loss curves over epochs, and the peers that averaged over time."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No picture without matplotlib: pip install 'matplotlib>=3.8'")
        return
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    losses, peers = figure.subplots(1, 2)
    curves = (
        (story.followers[FIRST], "swarm: three peers, one killed, one joined", "-"),
        (story.alone, "one process", "--"),
    )
    for follower, label, style in curves:
        if follower is not None:
            points = [(event["epoch"], event["loss"]) for event in follower.validations]
            losses.plot(*zip(*points, strict=True), style, label=label)
    losses.set(
        xlabel="epoch",
        ylabel="validation loss, nats per byte",
        title="The swarm learns what one process learns",
    )
    losses.legend()
    events = story.followers[FIRST].epochs
    times = [event["time"] - story.started for event in events]
    peers.step(times, [event["peers"] for event in events], where="pre", label="peers in the average")
    peers.axvline(
        story.kill_time - story.started, color="tab:red", linestyle=":", label="one killed (SIGKILL)"
    )
    joined = (
        [event["time"] for event in story.followers[NEWCOMER].epochs[:1]]
        if NEWCOMER in story.followers
        else []
    )
    for moment in joined:
        peers.axvline(
            moment - story.started, color="tab:green", linestyle=":", label="newcomer's first epoch"
        )
    peers.set(xlabel="seconds", ylabel="peers", title="Peers over time", ylim=(0, 3.4), yticks=range(4))
    peers.legend(loc="lower left")
    figure.savefig(path, dpi=120)
