"""Deadlines: median + k * MAD of what was measured, and a prior before there are measurements. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from p2pavg.rounds.protocol.ballot import PeerId

# Priors and floors, seconds. A floor is the least that a deadline can get, however regular the measurements:
# a scheduler's hiccup on a busy machine is not a failure.
SILENCE_PRIOR = 1.0  # without a heartbeat
SILENCE_FLOOR = 0.75
SILENCE_CEILING = 5.0
LOOP_LIMIT = 3.0  # heartbeats come, but the event loop behind them does not turn
ANSWER_PRIOR = 1.0  # for the answer to a proposal or a question, beyond the round trip
ANSWER_FLOOR = 0.6
WORD_LIMIT = 2.0  # without any word of a leader for which this peer waits
STEP_PRIOR = 1.0  # one step of somebody's training
STEP_FLOOR = 0.25
LOCKSTEP_FLOOR = 2.0  # in lockstep rounds, for a peer that comes a little late
MOST_STEPS = 2.0  # times the median: a step may take so long, however regular the steps were
APPLY_PRIOR = 2.0  # for decoding and stepping after a commit
APPLY_FLOOR = 0.25
STALL_PRIOR = 3.0  # between two chunks of one member
STALL_FLOOR = 1.0
PATIENCE_FLOOR = 0.5  # the least patience with a straggler whose steps are expected to take so long
LINKS_TOLD = 0.25  # between two words to everybody of which links a peer lacks, however many come and go
SETTLE = 0.3  # before one lineage gives way to another of the same epoch
JUDGE_FLOOR = 0.1  # between the first report of a stall and the verdict
RETRY_FLOOR = 0.05  # between two questions that were refused
MOST_DOUBLINGS = 4  # of RETRY_FLOOR, while the same peers are asked again
# Of a group of more members than this, many can fail one by one, and an attempt tells all of the others. So
# the third attempt of an epoch and each later one comes so many seconds per member after the attempt before
# it, and twice as many each time: what befell others meanwhile costs no attempt of its own.
QUICK_GROUP = 16
REGROUP_S = 0.0002
ADRIFT_S = 5.0  # after this machine's address has changed: so long a peer alone decides nothing
PAUSE = 0.5  # a longer delay means that this process was stopped: that time counts for no deadline
# Committed averages, each kept encoded, that a peer may have yet to apply before it has to heal.
MOST_BEHIND = 3
K = 6.0  # median absolute deviations above the median
LEAST_RATE = 8192.0  # bytes per second: slower data does not count as moving, whatever was promised
PROMISED_SHARE = 0.02  # of a link's usual rate: slower data does not count as moving
KEPT = 31  # measurements
# A path whose queue fills shows longer and longer round trips. Whoever is behind such a path gets no more
# patience for that than so many times the shortest round trip of the link, and so many seconds.
RTT_GROWTH, RTT_SLACK = 2.0, 0.3
MOST_SCALE = 16.0  # the most that `Deadlines.scale` grows to


class Timer(StrEnum):
    """A deadline, armed and disarmed by name. A timer without a handler only has the machine look again."""

    ADRIFT = "adrift"
    APART = "apart"
    ASK = "ask"
    DONE = "done"
    GRACE = "grace"
    HEAL = "heal"
    HELD = "held"
    STRETCH = "stretch"
    INQUIRE = "inquire"
    JUDGE = "judge"
    KEEPALIVE = "keepalive"
    LAPSE = "lapse"
    LEAVE = "leave"
    LINKS = "links"
    ORPHANED = "orphaned"
    OTHERS = "others"
    PATIENCE = "patience"
    PROMISE = "promise"
    QUERY = "query"
    REPORT = "report"
    RETRY = "retry"
    SETTLE = "settle"
    TOTALS = "totals"
    UNHEARD = "unheard"
    VAIN = "vain"
    WORD = "word"


@dataclass(slots=True)
class Measured:
    """The last measurements of one quantity."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _middle: float | None = None  # the median, kept until the next measurement
    _limit: float | None = None

    def add(self, value: float) -> None:
        self.values.append(value)
        self._middle = self._limit = None

    def limit(self, prior: float, floor: float) -> float:
        """median + K * MAD, at least `floor`; `prior` before three measurements."""
        if len(self.values) < 3:
            return max(prior, floor)
        if self._limit is None:
            middle = self.middle(prior)
            self._limit = middle + K * median([abs(value - middle) for value in self.values])
        return max(floor, self._limit)

    def middle(self, prior: float) -> float:
        """The median; `prior` before the first measurement."""
        if self._middle is None:
            if not self.values:
                return prior
            self._middle = median(self.values)
        return self._middle


class Deadlines:
    """All deadlines, from what this peer measured. `scale` doubles when an attempt fails by nobody's
    fault.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._rtt: dict[PeerId, float] = {}
        self._least_rtt: dict[PeerId, float] = {}  # since the link is up
        self._gaps: dict[PeerId, Measured] = {}
        self._answers: dict[PeerId, Measured] = {}
        self._steps: dict[PeerId, Measured] = {}
        self._applies: dict[PeerId, Measured] = {}
        self._chunks: dict[PeerId, Measured] = {}
        self._rates: dict[PeerId, Measured] = {}
        self._epochs = Measured()

    def relax(self, scale: float | None = None) -> None:
        """Wait twice as long from now on, or `scale` times as long as measurements say."""
        self.scale = min(MOST_SCALE, 2 * self.scale) if scale is None else scale

    def forget(self, peer: PeerId) -> None:
        """The peer left: forget what was measured of it."""
        for table in (self._gaps, self._answers, self._steps, self._applies, self._chunks, self._rates):
            table.pop(peer, None)
        self._rtt.pop(peer, None)
        self._least_rtt.pop(peer, None)

    def measured_rtt(self, peer: PeerId, seconds: float) -> None:
        if seconds > 0:
            least = self._least_rtt.get(peer)
            if least is None or seconds < least:
                least = self._least_rtt[peer] = seconds
            most = RTT_GROWTH * least + RTT_SLACK
            self._rtt[peer] = seconds if seconds < most else most

    def measured_gap(self, peer: PeerId, seconds: float) -> None:
        _add(self._gaps, peer, seconds)

    def measured_answer(self, peer: PeerId, seconds: float) -> None:
        _add(self._answers, peer, seconds)

    def measured_step(self, peer: PeerId, seconds: float) -> None:
        if seconds > 0:
            _add(self._steps, peer, seconds)

    def measured_apply(self, peer: PeerId, seconds: float) -> None:
        _add(self._applies, peer, seconds)

    def measured_chunk_gap(self, peer: PeerId, seconds: float) -> None:
        _add(self._chunks, peer, seconds)

    def measured_rate(self, peer: PeerId, bytes_per_second: float) -> None:
        _add(self._rates, peer, bytes_per_second)

    def measured_epoch(self, seconds: float) -> None:
        """An epoch took so long from one commit until the target was reached again, without waiting for
        stragglers.
        """
        self._epochs.add(seconds)

    def rtt(self, peer: PeerId) -> float:
        return self._rtt.get(peer, 0.0)

    def longest_rtt(self) -> float:
        return max(self._rtt.values(), default=0.0)

    def silence(self, peer: PeerId) -> float:
        """After so long without any heartbeat the peer counts as dead, stopped, or cut off."""
        gaps = self._gaps.get(peer, _NOTHING)
        return min(SILENCE_CEILING, gaps.limit(SILENCE_PRIOR, SILENCE_FLOOR) + 2 * self.rtt(peer))

    def answer(self, peer: PeerId) -> float:
        """How long the answer to a proposal or a question may take."""
        answers = self._answers.get(peer, _NOTHING)
        return self.scale * (answers.limit(ANSWER_PRIOR, ANSWER_FLOOR) + 2 * self.rtt(peer))

    def word(self, peer: PeerId) -> float:
        """How long a leader whose heart beats may say nothing."""
        return self.scale * (WORD_LIMIT + 4 * self.rtt(peer))

    def step(self, peer: PeerId) -> float:
        """How long the peer may take to its next step boundary."""
        steps = self._steps.get(peer, _NOTHING)
        usual = max(STEP_FLOOR, MOST_STEPS * steps.middle(0.0))
        return steps.limit(STEP_PRIOR, usual) + 2 * self.rtt(peer)

    def lockstep(self, peer: PeerId) -> float:
        """How long the others of a round in lockstep wait for the peer's step, however short their own
        steps are.
        """
        return max(LOCKSTEP_FLOOR, self.step(peer))

    def apply(self, peer: PeerId) -> float:
        """How long the peer may take from its commit to its next epoch."""
        return self._applies.get(peer, _NOTHING).limit(APPLY_PRIOR, APPLY_FLOOR) + 2 * self.rtt(peer)

    def usual_epoch(self, epoch_so_far: float) -> float:
        """How long an epoch takes, at least PATIENCE_FLOOR: for no longer does a leader wait for a straggler,
        and others take it as their unit.
        """
        return max(PATIENCE_FLOOR, self._epochs.middle(epoch_so_far))

    def stall(self, peer: PeerId, *, others_move: bool = False) -> float:
        """How long the peer's data may show no sign of moving. others_move: so does that of others, so that
        waiting costs little: a busy machine, or losses on the path, may make one link stand for seconds.
        """
        floor = STALL_PRIOR if others_move else STALL_FLOOR
        return self.scale * (self._chunks.get(peer, _NOTHING).limit(STALL_PRIOR, floor) + 2 * self.rtt(peer))

    def least_rate(self, peer: PeerId) -> float:
        """The bytes per second from which on data counts as moving."""
        return max(LEAST_RATE, PROMISED_SHARE * self._rates.get(peer, _NOTHING).middle(0.0))

    def judge(self) -> float:
        """How long the first report of a stall waits for the others' reports before the verdict."""
        return JUDGE_FLOOR + 2 * self.longest_rtt()

    def settle(self) -> float:
        return SETTLE + 4 * self.longest_rtt()

    def retry(self, peer: PeerId) -> float:
        return RETRY_FLOOR + 2 * self.rtt(peer)

    def readmission(self, failures: int) -> float:
        """How long to wait before an indispensable peer that failed so many attempts of this epoch is
        asked again.
        """
        return RETRY_FLOOR * 2.0 ** min(failures - 1, MOST_DOUBLINGS)

    def regroup(self, attempts: int, members: int) -> float:
        """How long after the last of so many attempts of an epoch a leader asks so many members again."""
        if attempts < 2 or members <= QUICK_GROUP:
            return 0.0
        return REGROUP_S * members * 2.0 ** min(attempts - 2, MOST_DOUBLINGS)

    def report_interval(self) -> float:
        """How long to wait between two progress messages: a twentieth of an epoch."""
        return min(0.5, max(0.02, self._epochs.middle(1.0) / 20))


def _add(table: dict[PeerId, Measured], peer: PeerId, value: float) -> None:
    measured = table.get(peer)
    if measured is None:
        measured = table[peer] = Measured()
    measured.add(value)


_NOTHING = Measured()
