"""What is counted as lost or doubled in a chaos run's events."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.bench.chaos import check
from p2pavg.bench.chaos.check import cpu_share, summarise

WON = {epoch: f"won{epoch}" for epoch in range(4)}


def applied(who: str, epoch: int, lineage: str, counted: int, discarded: int = 0) -> dict[str, Any]:
    """Five samples in every average."""
    return {
        "who": who,
        "t": "epoch",
        "at": float(epoch),
        "epoch": epoch,
        "lineage": lineage,
        "local_samples": 5,
        "counted": counted,
        "pending": 0,
        "discarded": discarded,
        "result": lineage,
        "parameters": lineage,
        "wrong": "",
        "samples": 10,
        "members": {"a": 5, "b": 5},
        "attempts": 1,
        "seconds_in_step": 0.01,
    }


def healed(discarded: int) -> list[dict[str, Any]]:
    """Peer b applies epochs 1 and 2 on a side that gives way, heals to epoch 3, and applies that first."""
    events: list[dict[str, Any]] = [{"who": who, "t": "joined", "at": 0.0, "epoch": 0} for who in "ab"]
    events += [applied("b", 0, WON[0], 5), applied("b", 1, "gone1", 10), applied("b", 2, "gone2", 15)]
    events.append(applied("b", 3, WON[3], 20, discarded))
    events += [applied("a", epoch, WON[epoch], 5 * (epoch + 1)) for epoch in range(4)]
    ended = {"t": "finished", "at": 5.0, "counted": 20, "pending": 0, "discarded": 0}
    return [*events, *({**ended, "who": who, "history": WON} for who in "ba")]


@pytest.mark.parametrize(("discarded", "lost", "doubled"), [(10, 0, 0), (7, 3, 0), (12, 0, 2)])
def test_a_peer_that_healed_named_what_it_lost(discarded: int, lost: int, doubled: int) -> None:
    """What it gave to the side that gave way is lost unless named, also when its own reports come first."""
    result = summarise(sorted(healed(discarded), key=lambda e: e["at"]), epochs=4, capacity=1.0)
    assert (result["samples_lost"], result["samples_doubled"]) == (lost, doubled)
    assert result["finished_by_all"]
    assert result["divergences"] == 0


@pytest.mark.parametrize("last", ["a", "b"])
def test_two_that_end_apart_have_lost_nothing(last: str) -> None:
    """A cut in the last epoch leaves two histories, each with its samples, whoever finishes last."""
    events: list[dict[str, Any]] = [{"who": who, "t": "joined", "at": 0.0, "epoch": 0} for who in "ab"]
    events += [applied(who, epoch, WON[epoch], 5 * (epoch + 1)) for epoch in range(3) for who in "ab"]
    events += [applied("a", 3, "a3", 20), applied("b", 3, "b3", 20)]
    ended = {"t": "finished", "counted": 20, "pending": 0, "discarded": 0}
    for who in "ab":
        history = {**WON, 3: f"{who}3"}
        events.append({**ended, "who": who, "at": 6.0 if who == last else 5.0, "history": history})
    result = summarise(sorted(events, key=lambda e: e["at"]), epochs=4, capacity=1.0)
    assert (result["samples_lost"], result["samples_doubled"]) == (0, 0)
    assert result["finished_by_all"]


@pytest.mark.parametrize(("took_part", "lost"), [(True, 0), (False, 5)])
def test_what_others_averaged_of_a_peer_is_not_lost(took_part: bool, lost: int) -> None:
    """Others committed an average that a peer was in; it thought that void, averaged the same samples alone,
    and healed to what came later.
    """
    events: list[dict[str, Any]] = [{"who": who, "t": "joined", "at": 0.0, "epoch": 0} for who in "ab"]
    events += [{"who": who, "t": "up", "at": 0.0, "peer": who, "address": ""} for who in "ab"]
    events += [applied("b", 0, WON[0], 5), applied("b", 1, "gone1", 10), applied("b", 2, WON[2], 15)]
    events += [applied("a", epoch, WON[epoch], 5 * (epoch + 1)) for epoch in range(3)]
    if not took_part:
        events[-2]["members"] = {"a": 5}
    ended = {"t": "finished", "at": 5.0, "counted": 15, "pending": 0, "discarded": 0}
    events += [{**ended, "who": who, "history": WON} for who in "ba"]
    result = summarise(sorted(events, key=lambda e: e["at"]), epochs=3, capacity=1.0)
    assert (result["samples_lost"], result["samples_doubled"]) == (lost, 0)


@pytest.mark.parametrize(("took_part", "lost"), [(True, 0), (False, 5)])
def test_what_others_averaged_of_a_peer_is_not_lost_at_the_very_end(took_part: bool, lost: int) -> None:
    """The same in the last epochs: the peer healed to the end, and has applied none of them itself."""
    events: list[dict[str, Any]] = [{"who": who, "t": "joined", "at": 0.0, "epoch": 0} for who in "ab"]
    events += [{"who": who, "t": "up", "at": 0.0, "peer": who, "address": ""} for who in "ab"]
    events += [applied("b", 0, WON[0], 5), applied("b", 1, "gone1", 10), applied("b", 2, "gone2", 15)]
    events += [applied("a", epoch, WON[epoch], 5 * (epoch + 1)) for epoch in range(3)]
    events[-1]["members"] = {"a": 10}
    if not took_part:
        events[-2]["members"] = {"a": 5}
    ended = {"t": "finished", "at": 5.0, "counted": 15, "pending": 0, "discarded": 0}
    events += [{**ended, "who": "b", "discarded": 5, "history": WON}, {**ended, "who": "a", "history": WON}]
    result = summarise(sorted(events, key=lambda e: e["at"]), epochs=3, capacity=1.0)
    assert (result["samples_lost"], result["samples_doubled"]) == (lost, 0)


def test_the_share_of_a_core_is_the_median_of_processes() -> None:
    """Each counts from its first sample to its last; one that was sampled once tells nothing."""
    usage = [
        {"who": who, "t": "usage", "at": at, "cpu_s": cpu}
        for who, at, cpu in [
            ("a", 10.0, 1.0),
            ("a", 20.0, 1.5),
            ("b", 10.0, 0.0),
            ("b", 30.0, 4.0),
            ("c", 9, 9.0),
        ]
    ]
    assert cpu_share(usage) == pytest.approx((0.05 + 0.2) / 2)
    assert cpu_share([]) is None


def test_how_long_a_killed_process_took_to_be_gone_is_told() -> None:
    """From the kill, or its own word that it dies, until it ended: others cannot know earlier."""
    events: list[dict[str, Any]] = [
        {"who": "p1", "t": "dies", "at": 1.0, "phase": "begun"},
        {"who": "", "t": "fault", "at": 1.4, "fault": "leader-begun", "victim": "p1", "until": 1.4},
        {"who": "", "t": "fault", "at": 2.0, "fault": "kill", "victim": "p2", "until": 2.0},
        {"who": "p2", "t": "ended", "at": 2.1, "code": -9},
        {"who": "p1", "t": "ended", "at": 2.5, "code": -9},
        {"who": "p3", "t": "ended", "at": 9.0, "code": 0},
    ]
    assert check._deaths(events) == pytest.approx([0.1, 1.5])
