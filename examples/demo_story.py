"""What happens in the demo, told from the logs of its processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

FIRST, VICTIM, NEWCOMER = "ada", "cleo", "dora"


class Failure(Exception):
    """The demo cannot go on; the message says why."""


class Follower:
    """Reads the log of one process as it grows."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.offset = 0
        self.epochs: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.start: dict[str, Any] | None = None
        self.end: dict[str, Any] | None = None
        self.state = "starting"

    def read(self) -> list[dict[str, Any]]:
        """The events that are new since the last call; an unfinished line waits."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            whole = file.read().rpartition(b"\n")[0]
        events = [json.loads(line) for line in whole.splitlines()]
        self.offset += len(whole) + 1 if whole else 0
        for event in events:
            self._note(event)
        return events

    def _note(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "start":
                self.start = event
                self.state = "training"
            case "epoch":
                self.state = "training"
                self.epochs.append(event)
            case "validation":
                self.validations.append(event)
            case "end":
                self.state = "done"
                self.end = event

    @property
    def epoch(self) -> int:
        return self.epochs[-1]["epoch"] if self.epochs else 0

    @property
    def samples(self) -> int:
        """What it brought to the averages so far."""
        return sum(event.get("local_samples", 0) for event in self.epochs)


class Story:
    """All that happened, in order, and what it shows."""

    def __init__(self, run_id: str, epochs: int) -> None:
        self.run_id = run_id
        self.epochs = epochs
        self.started = time.time()
        self.followers: dict[str, Follower] = {}
        self.alone: Follower | None = None
        self.lines: list[str] = []
        self.killed_in: int | None = None
        self.kill_time = 0.0

    def follow(self, follower: Follower) -> None:
        self.followers[follower.name] = follower

    def say(self, words: str) -> None:
        self.lines.append(f"{time.time() - self.started:6.1f} s  {words}")

    def killed(self, name: str) -> None:
        self.followers[name].state = "killed"
        self.killed_in, self.kill_time = self.epoch + 1, time.time()
        self.say(f"{name} is killed with SIGKILL in epoch {self.killed_in}")

    @property
    def alive(self) -> list[str]:
        """Peers that were started and not killed."""
        return [name for name, follower in self.followers.items() if follower.state != "killed"]

    @property
    def epoch(self) -> int:
        return max((follower.epoch for follower in self.followers.values()), default=0)

    def read(self) -> None:
        """Take in what the processes have logged since the last call."""
        for name in self.alive:
            follower = self.followers[name]
            brought = follower.samples
            for event in follower.read():
                self._tell(follower, event, brought)
                brought += event.get("local_samples", 0)
        for event in self.alone.read() if self.alone else []:
            if event["event"] == "validation":
                self.say(f"alone, epoch {event['epoch']}: validation loss {event['loss']:.3f}")

    def _tell(self, follower: Follower, event: dict[str, Any], brought: int) -> None:
        name, epoch = follower.name, event.get("epoch", 0)
        match event["event"]:
            case "start":
                state = f" and has downloaded the state of epoch {epoch}" if epoch else ""
                self.say(f"{name} is in the run, at {event['address']}{state}")
            case "validation":
                self.say(f"epoch {epoch}: validation loss {event['loss']:.3f}{measured(follower)}")
            case "epoch" if name == FIRST and event["attempts"] > 1:
                attempts = f"{event['attempts']} attempts"
                self.say(f"epoch {epoch} took {attempts}, {people(event['peers'])} averaged")
            case "epoch" if name == NEWCOMER and event["local_samples"] and not brought:
                self.say(f"{name} contributes its first {event['local_samples']} samples, to epoch {epoch}")
            case "end":
                self.say(f"{name} is done, with parameters {event['digest']}")

    def plan(self, reports: Path) -> list[list[tuple[int, int]]]:
        """What went into each epoch's average, [(seed, samples), ...], by one peer's RoundReports.

        With it one process can train on the same batches. Epochs that this peer missed are left empty.
        """
        starts = [follower.start for follower in self.followers.values() if follower.start is not None]
        seeds = {start["peer"]: start["seed"] for start in starts}
        plan: list[list[tuple[int, int]]] = [[] for _ in range(self.epochs)]
        for line in reports.read_text().splitlines():
            report = json.loads(line)
            if report["epoch"] < self.epochs:
                members = [(seeds[member["peer"]], member["samples"]) for member in report["members"]]
                plan[report["epoch"]] = [(seed, samples) for seed, samples in members if samples]
        return plan

    def summary(self, spread: float | None) -> dict[str, Any]:
        """The facts, and whether all that the demo promises was shown. spread: max - min over seeds."""
        ends = {name: self.followers[name].end for name in self.alive}
        late = [name for name, end in ends.items() if end is None]
        if late or NEWCOMER not in ends or self.alone is None or self.alone.end is None:
            raise Failure(f"{', '.join(late) or 'somebody'} did not reach the end")
        swarm, alone = ends[FIRST], self.alone.end
        assert swarm is not None
        digests = {name: end["digest"] for name, end in ends.items() if end is not None}
        difference = abs(swarm["loss"] - alone["loss"])
        brought = {name: follower.samples for name, follower in self.followers.items()}
        doubts = []
        if len(set(digests.values())) != 1:
            doubts.append("the peers' parameters differ")
        if spread is not None and difference > spread:
            doubts.append(f"the losses differ by {difference:.4f}, five seeds only by {spread:.4f}")
        if self.killed_in is None:
            doubts.append("nobody was killed")
        if not brought[NEWCOMER]:
            doubts.append("the newcomer contributed nothing")
        return {
            "epochs": self.epochs,
            "swarm_loss": swarm["loss"],
            "alone_loss": alone["loss"],
            "difference": difference,
            "seed_spread": spread,
            "killed_in_epoch": self.killed_in,
            "samples": brought,
            "digests": digests,
            "doubts": doubts,
        }

    def closing(self, summary: dict[str, Any]) -> list[str]:
        """The result in words."""
        lines = [
            "",
            f"validation loss of the swarm      {summary['swarm_loss']:.4f}",
            f"validation loss of one process    {summary['alone_loss']:.4f}",
            f"difference                        {summary['difference']:.4f}",
        ]
        if summary["seed_spread"] is not None:
            lines.append(f"max - min of five seeds, alone    {summary['seed_spread']:.4f}")
        if summary["doubts"]:
            return [*lines, "", f"Not shown: {'; '.join(summary['doubts'])}."]
        sentence = (
            "Shown: three processes that found each other through the DHT trained one model, lost one to "
            f"SIGKILL in epoch {summary['killed_in_epoch']}, took in a newcomer that brought "
            f"{summary['samples'][NEWCOMER]} samples, ended with parameters equal to the bit, and learned in "
            f"{self.epochs} epochs what one process learns from the same batches."
        )
        return [*lines, "", sentence]


def people(count: int) -> str:
    return f"{count} peer{'' if count == 1 else 's'}"


def measured(follower: Follower) -> str:
    """The last epoch's figures in words, empty before the first."""
    if not follower.epochs:
        return ""
    last = follower.epochs[-1]
    return (
        f", {people(last['peers'])}, {last['samples_per_second']:.0f} samples/s, "
        f"{last['seconds_calculation']:.2f} s calculating, "
        f"{last['seconds_communication']:.2f} s communicating"
    )
