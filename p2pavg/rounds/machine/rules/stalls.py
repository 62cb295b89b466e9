"""The members whose data does not move, and the one to blame for a stalled transfer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from p2pavg.plan import STAGES, Plan
from p2pavg.rounds.machine.events import RankProgress
from p2pavg.rounds.machine.rules.deadlines import Deadlines
from p2pavg.rounds.protocol.ballot import PeerId

_NONE = RankProgress(0, 0, 0, 0)
MOVES_S = 0.5  # seconds: data that came so lately moves


class TransferWatch:
    """One transfer as one member sees it: when each rank's data last moved."""

    def __init__(
        self,
        now: float,
        peers: Sequence[PeerId],
        me: PeerId,
        deadlines: Deadlines,
        partial: Container[int] = (),
        above: Container[int] = (),
    ) -> None:
        """partial: ranks that give this peer partial means. above: ranks that return results which this peer
        passes on.
        """
        self._peers = peers
        self._partial = partial
        self._above = above
        self._me = me
        self._deadlines = deadlines
        self._began_at = now
        self._last: tuple[RankProgress, ...] = ()
        self._owing: list[int] = []  # ranks that give this peer something, now or earlier
        self._chunk_at = [now] * len(peers)
        self._moved_at = [now] * len(peers)
        self._bytes_at = [now] * len(peers)
        self._bytes = [0] * len(peers)

    def update(self, now: float, ranks: Sequence[RankProgress]) -> None:
        if len(ranks) != len(self._peers):
            return
        owing = [
            rank for rank, seen in enumerate(ranks) if seen.results_expected or seen.contributions_expected
        ]
        for rank in owing:  # in large groups most ranks give this peer nothing
            peer, seen = self._peers[rank], ranks[rank]
            before = self._last[rank] if self._last else _NONE
            chunks = seen.contributions + seen.results - before.contributions - before.results
            if chunks > 0:
                if before.contributions + before.results > 0:
                    self._deadlines.measured_chunk_gap(peer, (now - self._chunk_at[rank]) / chunks)
                self._chunk_at[rank] = self._moved_at[rank] = now
            # Inside a chunk, bytes count as a sign of motion when their rate is worth waiting for.
            elapsed = now - self._bytes_at[rank]
            more = seen.bytes_received - self._bytes[rank]
            if more > 0 and more >= self._deadlines.least_rate(peer) * max(elapsed, 0.05):
                self._moved_at[rank] = now
                self._bytes[rank], self._bytes_at[rank] = seen.bytes_received, now
            elif elapsed > 1.0:
                self._bytes[rank], self._bytes_at[rank] = seen.bytes_received, now
        self._last, self._owing = tuple(ranks), owing

    def finished(self, now: float) -> None:
        """The whole transfer is in: remember how fast each peer's data came."""
        seconds = max(now - self._began_at, 1e-3)
        for peer, seen in zip(self._peers, self._last, strict=False):
            if seen.bytes_received:
                self._deadlines.measured_rate(peer, seen.bytes_received / seconds)

    def lagging(self, now: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ranks whose contributions, and ranks whose results, are due and have not moved within a
        deadline.
        """
        owing: tuple[list[int], list[int]] = [], []
        still: list[tuple[int, float, bool]] = []  # rank, seconds without a move, contributions lack
        moving = False
        for rank in self._owing:
            seen = self._last[rank]
            lacks = seen.contributions < seen.contributions_expected
            if (lacks or seen.results < seen.results_expected) and self._peers[rank] != self._me:
                still.append((rank, now - self._moved_at[rank], lacks))
                moving = moving or still[-1][1] < MOVES_S
        for rank, seconds, lacks in still:
            if seconds >= self._deadlines.stall(self._peers[rank], others_move=moving):
                owing[0 if lacks else 1].append(rank)
        return tuple(owing[0]), tuple(owing[1])

    @property
    def lacks(self) -> int:
        """The first of what this member still waits for, and makes of it what others need: as in Stalled."""
        found = NOTHING
        for rank in self._owing:
            seen = self._last[rank]
            if seen.contributions < seen.contributions_expected:
                found = min(found, int(rank in self._partial))
            if rank in self._above and seen.results < seen.results_expected:
                found = min(found, STAGES)
        return found


FLAT = Plan(())
NOTHING = STAGES + 1  # what a member lacks that has all that others need
Report = tuple[Sequence[int], Sequence[int]]  # ranks whose contributions, ranks whose results are missing


def judge(
    reports: Mapping[int, Report],
    leader: int,
    excused: Callable[[int, int], bool] = lambda rank, stage: False,
    plan: Plan = FLAT,
) -> int | None:
    """The rank to leave out, judged by what each reporting rank lacks; None: no rank can be named.

    Missing data is the fault of its sender or of its receiver. Missing data counts only when nothing is
    missing
    in an earlier stage of the plan: a deputy cannot send a partial mean before the last contribution to that
    mean is in, nor an owner a result before the last partial mean, nor a deputy pass on what it lacks.
    excused(rank, stage): whether the rank waits itself for data that it needs for what it sends in that
    stage, and that still comes, however slowly; nobody needs data of others for a contribution of its own.
    The rank with the most edges is left out; of equals the accused rather than the accuser; never the leader.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for reporter, (contributions, results) in reports.items():
        for rank in contributions:
            found.setdefault(plan.stage(rank, reporter), []).append((reporter, rank))
        for rank in results:
            found.setdefault(STAGES + plan.passes_on(rank, reporter), []).append((reporter, rank))
    for stage in sorted(found):
        edges: Counter[int] = Counter()
        accused: Counter[int] = Counter()
        for reporter, rank in found[stage]:
            if rank != reporter and (stage == 0 or not excused(rank, stage)):
                edges[reporter] += 1
                edges[rank] += 1
                accused[rank] += 1
        edges.pop(leader, None)
        if edges:
            return max(edges, key=lambda rank: (edges[rank], accused[rank], rank))
    return None
