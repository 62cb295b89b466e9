"""What all parts of the rounds machine share: where this peer stands, its view, its timers, its outbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pavg.part import Part
from p2pavg.rounds.machine.actions import Action, Blame, Resume, Send, Stop, Trace, WaitAt
from p2pavg.rounds.machine.camps import Camp, Facts, Gap, View, ends, gaps
from p2pavg.rounds.machine.deadlines import Deadlines, Timer
from p2pavg.rounds.machine.election import rendezvous
from p2pavg.rounds.machine.pace import Pace
from p2pavg.rounds.protocol.ballot import Ballot, Held, Lineage, Note, PeerId
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.lineage import History
from p2pavg.rounds.protocol.messages import Aborted, Committed, Message, Progress
from p2pavg.rounds.protocol.roles import Generation, PlanMember, Role

Plan = Callable[[Sequence[PlanMember]], tuple[Part, ...]]
OUTCOMES_KEPT = 64
MOST_APART = 64


@dataclass(frozen=True, slots=True)
class Config:
    """What a machine is built with."""

    me: PeerId
    run: bytes
    target: int  # samples per epoch, over all peers
    plan: Plan  # members in rank order -> the parts
    epoch: int
    lineage: Lineage
    history: tuple[Generation, ...] = ()
    role: Role = Role.TRAINER
    client_only: bool = False
    patience_s: float | None = None  # how long stragglers are waited for; None: from measurements
    weighted: bool = False  # contributions have weights of their own; else each weighs as much as its samples
    life: int = 0  # tells this life from earlier ones of the same peer, and grows from one to the next


class Core:
    """The shared state. `now` is this peer's lived time: while its process is stopped, none passes."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.me = config.me
        self.now = 0.0
        self.resumed_at = 0.0  # when this process last came back from a pause
        self.view = View()
        self.deadlines = Deadlines()
        self.history = History()
        self.history.generations.extend(config.history)
        # Where we stand: after our last commit; `pending` until the training thread has applied it.
        self.epoch = config.epoch
        self.lineage = config.lineage
        self.pending = False
        self.applied_epoch = config.epoch
        # While a state and the results since are downloaded: where we go; later, how far we are.
        self.joining: tuple[int, Lineage] | None = None
        self.apart: frozenset[PeerId] = frozenset()  # trainers to which we get no link, though they live
        self.unheard: set[PeerId] = set()  # peers that may have gone on while we loaded a state
        self.role = config.role  # a joiner becomes a trainer when it has its state
        self.target = config.target
        self.leaving = False
        self.epoch_began_at = 0.0
        # The training thread.
        self.samples = 0
        self.rate = 0.0
        self.weight: float | None = None
        self.note: Note = b""  # for the coming step
        self.pace = Pace()
        self.upload_bps = self.download_bps = 0.0  # not measured yet
        self.link_bps: Mapping[PeerId, float] = {}  # from others, where measured
        self.wait = 0  # the number of the wait at a boundary that lasts; 0: it computes
        self.boundary_at = 0.0
        self._waits = 0
        self.waits_at: int | None = None  # what the training thread was told
        self.told_to_stop = False
        self.offered: dict[int, int] = {}  # of its samples here: how many each transfer had
        # This epoch.
        self.promised: Ballot | None = None
        # The first and the last of each standing: we may come back.
        self.promises: dict[tuple[int, Lineage], tuple[Ballot, Ballot]] = {}
        self.promise_void = False  # whoever we promised last gave its question up
        self.bound: Ballot | None = None  # its leader was told last that we are DONE, and did not give it up
        self.gone: set[PeerId] = set()  # whose links broke since: they may come back as another process
        self.expected = 0  # samples that the others have when ours are there, by shares of the last average
        self.must_go = False  # a round of this epoch has begun once: it goes on, target reached or not
        self.excluded: dict[PeerId, Cause] = {}
        self.suspects: set[PeerId] = set()
        self.last_words: dict[PeerId, tuple[Held, ...]] = {}  # of peers that left
        self.sticky: PeerId | None = config.history[-1].leader if config.history else None
        self._choice_of: tuple[object, ...] = ()
        self._choice: PeerId | None = None
        self.serial = config.life  # of the last ballot that we opened
        self.attempts = 0
        self.proposed_at = 0.0  # the first attempt
        self.outcomes: dict[Ballot, Committed | Aborted] = {}
        self.actions: list[Action] = []
        self.inbox: deque[Message] = deque()  # messages to ourselves
        self.timers: dict[Timer, float] = {}

    # Out.

    def act(self, action: Action) -> None:
        self.actions.append(action)

    def trace(self, kind: str, **fields: Any) -> None:
        self.actions.append(Trace(kind, {"epoch": self.epoch, **fields}))

    def send(self, peer: PeerId, message: Message) -> None:
        """To a peer with a link, or to ourselves by the shortest way."""
        if peer == self.me:
            self.inbox.append(message)
        elif peer in self.view:
            self.actions.append(Send(peer, message))

    def progress(self) -> Progress:
        epoch, lineage = self.standing
        return Progress(
            epoch=epoch,
            lineage=lineage,
            samples=self.samples,
            rate=self.rate,
            boundary=self.boundary,
            pending=self.pending,
            joining=self.joining is not None or self.role is not Role.TRAINER,
            total=self.history.total,
            camp=1 + len(self.view.standing(self.epoch, self.lineage)),
            step_s=self.pace.seconds,
            step_samples=self.pace.samples,
            leader=self.leader(),
            up_bps=self.upload_bps,
            down_bps=self.download_bps,
            apart=tuple(sorted(self.apart)[:MOST_APART]),
        )

    def broadcast_progress(self) -> None:
        message = self.progress()
        for facts in self.view:
            self.send(facts.peer, message)

    def next_ballot(self, floor: int) -> Ballot:
        """One that nobody has seen, above what we promised and above the attempts up to `floor`."""
        taken = self.promised.attempt if self.promised is not None else -1
        self.serial += 1
        return Ballot(self.epoch, max(taken, floor) + 1, self.me, self.serial, self.lineage)

    def promise(self, ballot: Ballot) -> None:
        """From now on no lower one."""
        self.promised, self.promise_void = ballot, False
        self.gone.discard(ballot.leader)
        first, _ = self.promises.pop(ballot.standing, (ballot, ballot))
        self.promises[ballot.standing] = first, ballot
        if len(self.promises) > OUTCOMES_KEPT:
            del self.promises[next(iter(self.promises))]

    # Timers.

    def arm(self, name: Timer, at: float) -> None:
        self.timers[name] = at

    def disarm(self, *names: Timer) -> None:
        for name in names:
            self.timers.pop(name, None)

    # The training thread.

    @property
    def boundary(self) -> bool:
        """Whether it waits at a boundary."""
        return self.wait > 0

    def begin_wait(self) -> None:
        """It waits, with a contribution that does not change."""
        self._waits += 1
        self.wait, self.boundary_at = self._waits, self.now

    def resume(self) -> None:
        """Let the training thread go on, if it waits."""
        if self.boundary or self.told_to_stop:
            self.wait = 0
            self.told_to_stop = False
            self.act(Resume())

    def stop(self) -> None:
        if not self.told_to_stop and not self.boundary:
            self.told_to_stop = True
            self.act(Stop())

    def wait_at(self, others: int | None) -> None:
        if others != self.waits_at:
            self.waits_at = others
            self.act(WaitAt(others))

    # Who is who.

    @property
    def out(self) -> bool:
        """The epoch goes on without us."""
        return self.me in self.excluded

    def exclude(self, peer: PeerId, cause: Cause, words: str = "") -> None:
        """The peer failed an attempt: it stays out of this epoch."""
        if peer not in self.excluded:
            self.excluded[peer] = cause
            why = words or cause.words
            self.act(Blame(peer, why))
            self.trace("excluded", peer=peer, why=why)

    def stands_here(self, facts: Facts) -> bool:
        return facts.epoch == self.epoch and facts.lineage == self.lineage

    def can_lead(self, peer: PeerId) -> bool:
        if peer in self.suspects or peer in self.excluded:
            return False
        if peer == self.me:
            return self.joining is None and not self.leaving and self.role is Role.TRAINER
        facts = self.view.get(peer)
        if facts is None or facts.silent or facts.joining or facts.role is not Role.TRAINER:
            return False
        return self.stands_here(facts) or facts.epoch > self.epoch

    def leader(self) -> PeerId | None:
        """Whom we follow: the last leader as long as it can, else the rendezvous choice of those that can."""
        sticks = self.sticky is not None and self.can_lead(self.sticky)
        lacking = ends(self.gaps())
        if sticks and self.sticky not in lacking:
            return self.sticky
        # Asked for after every event, and mostly as before.
        able = self.can_lead(self.me)
        out = frozenset(self.suspects), (*self.excluded,), frozenset(lacking)
        of = (self.view.version, self.epoch, self.lineage, able, sticks and self.sticky, *out)
        if of != self._choice_of:
            self._choice_of, self._choice = of, self._choose(able, sticks, lacking)
        return self._choice

    def _choose(self, able: bool, sticks: bool, lacking: Collection[PeerId]) -> PeerId | None:
        """able: we could lead ourselves. sticks: the last leader can, though it is one of `lacking`."""
        reachable: list[PeerId] = []
        hidden: list[PeerId] = []  # others have no link to them: they lead only when nobody else is there
        for facts in self.view.standing(self.epoch, self.lineage):
            if facts.peer not in self.suspects and facts.peer not in self.excluded:
                (hidden if facts.client_only or facts.peer in lacking else reachable).append(facts.peer)
        if able:
            (hidden if self.config.client_only or self.me in lacking else reachable).append(self.me)
        if sticks and not reachable:
            return self.sticky
        return rendezvous(self.config.run, self.epoch, tuple(reachable or hidden))

    def gaps(self) -> list[Gap]:
        """Pairs of peers that get no link to each other."""
        if not self.apart and not self.view.claims:
            return []
        return gaps(self.view, self.me, self.apart, self.now)

    @property
    def standing(self) -> tuple[int, Lineage]:
        """The (epoch, lineage) that our next average belongs to."""
        return self.joining or (self.epoch, self.lineage)

    def camp(self) -> Camp:
        """Ours, counting ourselves only. Without a state we stand nowhere."""
        if self.role is not Role.TRAINER:
            return Camp(-1, self.lineage, 0, 0)
        return Camp(self.epoch, self.lineage, 1, self.history.total)

    def remember(self, outcome: Committed | Aborted) -> None:
        self.outcomes[outcome.ballot] = outcome
        while len(self.outcomes) > OUTCOMES_KEPT:
            del self.outcomes[next(iter(self.outcomes))]

    def new_epoch(self, epoch: int, lineage: Lineage, leader: PeerId | None) -> None:
        """Stand somewhere else: everything about the old epoch is over."""
        self.deadlines.scale = 1.0
        self.epoch, self.lineage = epoch, lineage
        self.epoch_began_at = self.now
        self.restart_epoch()
        self.offered.clear()
        _, self.promised = self.promises.get((epoch, lineage), (None, None))
        self.promise_void = False
        self.bound = None
        self.last_words = {
            peer: words
            for peer, words in self.last_words.items()
            if any(held.ballot.epoch >= epoch for held in words)
        }
        if leader is not None:
            self.sticky = leader

    def restart_epoch(self) -> None:
        """Forget who failed: after a commit, a heal, or a round that failed for good."""
        self.expected = 0
        self.must_go = False
        self.attempts = 0
        self.excluded.clear()
        self.suspects.clear()
