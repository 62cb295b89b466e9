"""Whose data does not move, and who is to blame for a stalled transfer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from p2pavg.rounds.machine.events import RankProgress
from p2pavg.rounds.machine.rules.deadlines import Deadlines
from p2pavg.rounds.protocol.ballot import PeerId


class TransferWatch:
    """One transfer as one member sees it: when each rank's data last moved."""

    def __init__(self, now: float, peers: Sequence[PeerId], me: PeerId, deadlines: Deadlines) -> None:
        self._peers = peers
        self._me = me
        self._deadlines = deadlines
        self._began_at = now
        self._last: tuple[RankProgress, ...] = ()
        self._chunk_at = [now] * len(peers)
        self._moved_at = [now] * len(peers)
        self._bytes_at = [now] * len(peers)
        self._bytes = [0] * len(peers)

    def update(self, now: float, ranks: Sequence[RankProgress]) -> None:
        if len(ranks) != len(self._peers):
            return
        for rank, (peer, seen) in enumerate(zip(self._peers, ranks, strict=True)):
            before = self._last[rank] if self._last else RankProgress(0, 0, 0, 0)
            chunks = seen.contributions + seen.results - before.contributions - before.results
            if chunks > 0:
                if before.contributions + before.results > 0:
                    self._deadlines.measured_chunk_gap(peer, (now - self._chunk_at[rank]) / chunks)
                self._chunk_at[rank] = self._moved_at[rank] = now
            # Inside a chunk, bytes count when they come at a rate worth waiting for.
            elapsed = now - self._bytes_at[rank]
            if seen.bytes_received - self._bytes[rank] >= self._deadlines.least_rate(peer) * max(
                elapsed, 0.05
            ):
                self._moved_at[rank] = now
                self._bytes[rank], self._bytes_at[rank] = seen.bytes_received, now
            elif elapsed > 1.0:
                self._bytes[rank], self._bytes_at[rank] = seen.bytes_received, now
        self._last = tuple(ranks)

    def finished(self, now: float) -> None:
        """All is in: remember how fast each peer's data came."""
        seconds = max(now - self._began_at, 1e-3)
        for peer, seen in zip(self._peers, self._last, strict=False):
            if seen.bytes_received:
                self._deadlines.measured_rate(peer, seen.bytes_received / seconds)

    def lagging(self, now: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ranks that owe contributions, ranks that owe results, and have not moved within their deadline."""
        owing: tuple[list[int], list[int]] = [], []
        for rank, seen in enumerate(self._last):
            peer = self._peers[rank]
            if peer == self._me or now - self._moved_at[rank] < self._deadlines.stall(peer):
                continue
            if seen.contributions < seen.contributions_expected:
                owing[0].append(rank)
            elif seen.results < seen.results_expected:
                owing[1].append(rank)
        return tuple(owing[0]), tuple(owing[1])

    @property
    def incomplete(self) -> bool:
        """Whether contributions to our own parts are still to come."""
        return any(seen.contributions < seen.contributions_expected for seen in self._last)


Report = tuple[Sequence[int], Sequence[int]]  # ranks whose contributions, ranks whose results are missing


def judge(reports: Mapping[int, Report], leader: int, excused: Container[int] = ()) -> int | None:
    """Which rank to leave out, from what each reporting rank lacks; None: nobody can be named.

    A missing contribution is its sender's fault or its receiver's; a missing result only counts when no
    contribution is missing anywhere, because an owner cannot finish a part before the last contribution to it
    is in. excused: owners to whom contributions still come, however slowly. The rank
    with the most edges goes, of equals rather the accused than the accuser; never the leader.
    """
    for kind in (0, 1):
        edges: Counter[int] = Counter()
        accused: Counter[int] = Counter()
        for reporter, report in reports.items():
            for rank in report[kind]:
                if rank == reporter or (kind == 1 and rank in excused):
                    continue
                edges[reporter] += 1
                edges[rank] += 1
                accused[rank] += 1
        edges.pop(leader, None)
        if edges:
            return max(edges, key=lambda rank: (edges[rank], accused[rank], rank))
    return None
