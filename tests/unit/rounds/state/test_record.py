"""What is remembered of donors: it ranks them, and fades."""

from __future__ import annotations

from p2pavg.rounds.state.trust.record import ABSENT, HALF_S, MOST, WRONG, Record


def test_a_link_that_broke_is_forgotten_soon_and_wrong_bytes_are_not() -> None:
    """An honest donor is as good as any after a minute or so; a liar stays behind the others for minutes."""
    record = Record()
    record.failed(b"a", 0.0, ABSENT)
    record.failed(b"l", 0.0, WRONG)
    assert 0 == record.doubts(b"x", 0.0) < record.doubts(b"a", 0.0) < record.doubts(b"l", 0.0)
    assert record.doubts(b"a", 1.1 * HALF_S) == 0
    assert record.doubts(b"l", 3 * HALF_S) > 0
    assert record.doubts(b"l", 6 * HALF_S) == 0


def test_what_is_remembered_is_bounded() -> None:
    """However often one fails, and however many do."""
    record = Record()
    for _ in range(1000):
        record.failed(b"l", 0.0, WRONG)
    assert record.doubts(b"l", 0.0) == MOST
    for number in range(100):
        record.failed(bytes([number]), number * 10 * HALF_S, ABSENT)
    assert len(record._marks) == 1
