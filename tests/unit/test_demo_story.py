from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo_story(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import demo_story

    return demo_story


@pytest.fixture
def demo_view(demo_story):
    import demo_view

    return demo_view


class Peer:
    """Writes a log as a process of the demo does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = 0.0

    def write(self, event: str, **values: object) -> None:
        self.time += 1.0
        with open(self.path, "a") as file:
            file.write(json.dumps({"event": event, "time": self.time, **values}) + "\n")

    def epoch(self, number: int, peers: int, mine: int = 8, attempts: int = 1) -> None:
        seconds = {"seconds_calculation": 0.5, "seconds_communication": 0.1, "seconds_total": 0.6}
        counts = {"peers": peers, "samples": 8 * peers, "local_samples": mine, "attempts": attempts}
        self.write("epoch", epoch=number, loss=2.0, samples_per_second=40.0, **seconds, **counts)

    def end(self, loss: float, digest: str) -> None:
        self.write("end", epoch=4, loss=loss, digest=digest)


def tell(demo_story, tmp_path, *, newcomer_mine: int = 8, newcomer_digest: str = "same", alone: float = 2.0):
    """The whole demo in four epochs."""
    story = demo_story.Story("demo", 4)
    peers = {}
    for name in ("ada", "bob", "cleo"):
        peers[name] = Peer(tmp_path / name)
        story.follow(demo_story.Follower(name, tmp_path / name))
        peers[name].write("start", address="127.0.0.1:1", epoch=0, peer=name * 2, seed=len(peers))
    for peer in peers.values():
        peer.epoch(1, 3)
    story.read()
    story.killed("cleo")
    peers["cleo"].epoch(2, 3)  # what a dead peer may still have written does not count
    peers["dora"] = Peer(tmp_path / "dora")
    story.follow(demo_story.Follower("dora", tmp_path / "dora"))
    peers["dora"].write("start", address="127.0.0.1:2", epoch=2, peer="doradora", seed=4)
    peers["ada"].epoch(2, 2, attempts=2)
    peers["ada"].write("validation", epoch=2, loss=2.5)
    for name in ("ada", "dora"):
        peers[name].epoch(3, 3, mine=newcomer_mine if name == "dora" else 8)
    for name, digest in (("ada", "same"), ("bob", "same"), ("dora", newcomer_digest)):
        peers[name].end(2.0, digest)
    story.alone = demo_story.Follower("alone", tmp_path / "alone")
    Peer(tmp_path / "alone").end(alone, "other")
    story.read()
    return story


def test_all_is_shown(demo_story, tmp_path):
    """A run in which everything happened has no doubts and one closing sentence that says so."""
    story = tell(demo_story, tmp_path)
    summary = story.summary(0.1)
    assert summary["doubts"] == []
    assert summary["samples"] == {"ada": 24, "bob": 8, "cleo": 8, "dora": 8}
    assert summary["killed_in_epoch"] == 2
    assert story.closing(summary)[-1].startswith("Shown: three processes")


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"newcomer_mine": 0}, "the newcomer contributed nothing"),
        ({"newcomer_digest": "different"}, "the peers' parameters differ"),
        ({"alone": 2.2}, "the losses differ by 0.2000, five seeds only by 0.1000"),
    ],
)
def test_what_was_not_shown_is_named(demo_story, tmp_path, change, doubt):
    """Each promise that a run did not keep is named instead of the closing sentence."""
    story = tell(demo_story, tmp_path, **change)
    summary = story.summary(0.1)
    assert summary["doubts"] == [doubt]
    assert story.closing(summary)[-1] == f"Not shown: {doubt}."


def test_plan_follows_the_reports(demo_story, tmp_path):
    """The reference's batches are those of the averages: by seed and number, without empty members."""
    story = tell(demo_story, tmp_path)
    reports = [
        {"epoch": 0, "members": [{"peer": "adaada", "samples": 8}, {"peer": "cleocleo", "samples": 16}]},
        {"epoch": 2, "members": [{"peer": "adaada", "samples": 24}, {"peer": "doradora", "samples": 0}]},
    ]
    path = tmp_path / "reports.jsonl"
    path.write_text("".join(json.dumps(report) + "\n" for report in reports))
    assert story.plan(path) == [[(1, 8), (3, 16)], [], [(1, 24)], []]


def test_a_peer_that_did_not_finish_fails_the_demo(demo_story, tmp_path):
    """Without everybody's end there is no result."""
    story = tell(demo_story, tmp_path)
    story.followers["bob"].end = None
    with pytest.raises(demo_story.Failure, match="bob did not reach the end"):
        story.summary(0.1)


def test_story_names_kill_retry_download_and_contribution(demo_story, tmp_path):
    """The lines tell who died, that the round was retried, and what the newcomer did."""
    lines = "\n".join(tell(demo_story, tmp_path).lines)
    assert "cleo is killed with SIGKILL in epoch 2" in lines
    assert "epoch 2 took 2 attempts, 2 peers averaged" in lines
    assert "dora is in the run, at 127.0.0.1:2 and has downloaded the state of epoch 2" in lines
    assert "dora contributes its first 8 samples, to epoch 3" in lines


def test_half_a_line_waits_for_its_rest(demo_story, tmp_path):
    """A log that is being written is read line by line, each once."""
    path = tmp_path / "log"
    follower = demo_story.Follower("ada", path)
    path.write_text('{"event": "start", "address": "a"}\n{"event": "vali')
    assert [event["event"] for event in follower.read()] == ["start"]
    assert follower.read() == []
    with open(path, "a") as file:
        file.write('dation", "epoch": 1, "loss": 2.0}\n')
    assert [event["event"] for event in follower.read()] == ["validation"]


def test_plain_lines_are_printed_once(demo_story, demo_view, tmp_path, capsys):
    """Without a terminal each line of the story appears once."""
    story = tell(demo_story, tmp_path)
    with demo_view.PlainView() as view:
        view.refresh(story)
        view.refresh(story)
    assert capsys.readouterr().out.splitlines() == story.lines


def test_live_view_shows_loss_peers_and_seconds(demo_story, demo_view, tmp_path, monkeypatch):
    """The terminal view shows epoch, validation loss, samples/s, peers and both kinds of seconds."""
    from rich.console import Console

    story = tell(demo_story, tmp_path)
    view = demo_view.LiveView()
    view.refresh(story)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view.live.renderable)
    text = console.export_text()
    for word in ("epoch 3/4", "validation loss 2.500", "killed", "0.50", "0.10", "13", "calculating s"):
        assert word in text


def test_picture_is_drawn(demo_story, demo_view, tmp_path):
    """The picture with both loss curves and the peers over time is written."""
    demo_view.draw(tell(demo_story, tmp_path), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_decides_the_view(demo_view, monkeypatch):
    """Plain lines when the output is no terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert isinstance(demo_view.best_view(), demo_view.PlainView)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(demo_view.best_view(), demo_view.LiveView)
