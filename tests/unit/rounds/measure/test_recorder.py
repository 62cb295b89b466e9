"""What a report says of an epoch."""

from __future__ import annotations

import pytest

from p2pavg.report import RoundReport
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.measure import recorder as recorder_module
from p2pavg.rounds.measure.link_meter import Moved, Wire
from p2pavg.rounds.measure.recorder import Recorder
from p2pavg.rounds.protocol.ballot import Ballot
from p2pavg.rounds.protocol.roles import Seat

ME, OTHER, DEAD, GONE = (letter * 20 for letter in (b"m", b"o", b"d", b"g"))


class NoLinks:
    """In the place of a LinkMeter."""

    def report(self, *_: object) -> Moved:
        return Moved((), Wire(), Wire())


def commit(epoch: int, *members: bytes) -> act.Commit:
    return act.Commit(
        transfer=epoch,
        ballot=Ballot(epoch, 0, ME, epoch, b"l"),
        members=tuple(Seat(member, True) for member in members),
        weights=(1.0,) * len(members),
        samples=(4,) * len(members),
        digests=(),
        before=b"l",
        lineage=b"l",
        late=False,
        following=False,
        attempts=1,
        failed=(),
        note=b"",
    )


def test_samples_that_went_with_a_dead_peer_are_named_once() -> None:
    """In the report of the epoch in which it died, unless the average holds it, or it said that it left."""
    made: list[RoundReport] = []
    recorder = Recorder("run", ME, "none", NoLinks(), made.append)  # type: ignore[arg-type]

    def down(peer: bytes, why: str, epoch: int, samples: int) -> None:
        fields = {"peer": peer, "why": why, "epoch": epoch, "samples": samples}
        recorder.trace(act.TraceKind.DOWN, fields, 0.0)

    def finished(epoch: int, *members: bytes) -> dict[str, int]:
        report = recorder.finished(commit(epoch, *members), 0.0, {}, 1, (), {}, None)
        return dict(report.samples_lost)

    down(DEAD, "connection reset", 3, 12)
    down(OTHER, "connection reset", 3, 8)
    down(GONE, "connection reset", 3, 5)
    down(GONE, act.LEFT, 3, 5)
    assert finished(3, ME, OTHER) == {DEAD.hex(): 12}
    assert finished(4, ME) == {}
    assert RoundReport.from_dict(made[0].to_dict()).samples_lost == {DEAD.hex(): 12}


def test_what_a_script_waits_for_before_it_trains_is_of_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty seconds for the others, and one of training, are an epoch of one; later waits are of theirs."""
    now = 100.0
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: now)
    recorder = Recorder("run", ME, "none", NoLinks(), lambda report: None)  # type: ignore[arg-type]
    told = []
    for epoch in (0, 1):
        now += 20.0
        recorder.waited(20.0)
        now += 1.0
        recorder.arrived(now)
        told.append(recorder.finished(commit(epoch, ME, OTHER), 0.0, {}, 1, (), {}, None))
    assert [report.seconds_total for report in told] == [1.0, 21.0]
    assert [report.seconds_waiting for report in told] == [0.0, 20.0]
