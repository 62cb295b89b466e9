"""The state that all parts of the machine share: where this peer and its linked peers stand, timers, and
outbox.

Other files read the fields of `Core` and the objects in these fields, and change both by verbs alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from p2pavg.rounds.machine.actions import Action, Blame, Resume, Send, Stop, Trace, TraceKind, WaitAt
from p2pavg.rounds.machine.memory.config import MOST_STEP, Config
from p2pavg.rounds.machine.memory.holding import Holding
from p2pavg.rounds.machine.memory.inquest import Inquest
from p2pavg.rounds.machine.memory.own import OwnThread
from p2pavg.rounds.machine.memory.promises import Promises
from p2pavg.rounds.machine.memory.proposal import Proposal
from p2pavg.rounds.machine.memory.standing import EpochState, Standing
from p2pavg.rounds.machine.rules.camps import Camp, Facts, Gap, LinkedPeers, ends, gaps
from p2pavg.rounds.machine.rules.dawdling import Dawdling
from p2pavg.rounds.machine.rules.deadlines import MOST_BEHIND, Deadlines, Timer
from p2pavg.rounds.machine.rules.election import rendezvous
from p2pavg.rounds.machine.rules.offences import Offences
from p2pavg.rounds.protocol.ballot import Ballot, Held, Lineage, PeerId
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.lineage import History
from p2pavg.rounds.protocol.messages import Aborted, Committed, Message, Progress
from p2pavg.rounds.protocol.roles import Role

OUTCOMES_KEPT = 64  # decided ballots that this peer can tell others of
MOST_WORDS = 128  # peers that left, whose last words are kept, beside the voters of the ballot that is held
MOST_APART = 64  # peers without a link that a Progress names


class Core:
    """The shared state. `now` is this peer's lived time: while its process is stopped, none passes."""

    def __init__(self, config: Config, now: float) -> None:
        self.config = config
        self.me = config.me
        self.run = config.run_id.encode()
        self.target = 1 if config.lockstep else config.target
        self.now = now
        self.resumed_at = now  # when this process last came back from a pause
        self.linked = LinkedPeers()
        self.deadlines = Deadlines()
        self.history = History()
        self.history.generations.extend(config.history)
        self.here = Standing(config.epoch, config.lineage, config.role, config.epoch, began_at=now)
        self.own = OwnThread()
        self.epoch_state = EpochState()
        self.promises = Promises(config.me, config.life)
        self.holding: Holding | None = None  # the ballot that this peer is a member of
        self.proposal: Proposal | None = None  # the attempt that this peer leads
        self.inquest: Inquest | None = None  # the questions of this peer about a ballot whose leader is lost
        self.sticky: PeerId | None = config.history[-1].leader if config.history else None
        self.vain: dict[PeerId, set[Ballot]] = {}  # leader -> its failed attempts at this epoch's average
        self.idle_leaders = Offences()  # peers under whose lead nothing got done, or too slowly
        self.dawdling = Dawdling()  # how long this peer waited in the rounds of each leader
        self.let_go_at = now  # when this peer last ceased to be a member of a ballot
        self.apart: frozenset[PeerId] = frozenset()  # living trainers to which this peer gets no link
        self.unheard: set[PeerId] = set()  # peers that may have gone on while a state was loaded here
        # The last ballots of peers that left, as each told.
        self.last_words: dict[PeerId, tuple[Held, ...]] = {}
        self.outcomes: dict[Ballot, Committed | Aborted] = {}
        self._choice_of: tuple[object, ...] = ()
        self._choice: PeerId | None = None
        self.actions: list[Action] = []
        self.inbox: deque[Message] = deque()  # messages of this peer to itself
        self.timers: dict[Timer, float] = {}

    @property
    def plausible_target(self) -> int:
        """The samples of an epoch, by which the claims of other peers are judged."""
        return MOST_STEP if self.config.lockstep else self.target

    # Time.

    def live(self, now: float) -> None:
        """Set this peer's lived time to `now`."""
        self.now = now

    def come_back(self, now: float) -> None:
        """Note that this process was stopped until `now`."""
        self.resumed_at = now

    def arm(self, name: Timer, at: float) -> None:
        """Have the timer fire at `at`; an earlier setting of the same timer does not count any more."""
        self.timers[name] = at

    def disarm(self, *names: Timer) -> None:
        """Have these timers not fire."""
        for name in names:
            self.timers.pop(name, None)

    def disarm_all(self) -> None:
        """Have no timer fire."""
        self.timers.clear()

    # Out.

    def act(self, action: Action) -> None:
        """Have the caller of the machine carry this out, after what came before."""
        self.actions.append(action)

    def take_actions(self) -> list[Action]:
        """The actions since the last call, which the caller is to carry out."""
        actions, self.actions = self.actions, []
        return actions

    def trace(self, kind: TraceKind, **fields: Any) -> None:
        """Tell logs and measurements of a turn of the epoch."""
        self.actions.append(Trace(kind, {"epoch": self.here.epoch, **fields}))

    def send(self, peer: PeerId, message: Message) -> None:
        """Send a message to a peer with a link, or put it into this peer's own inbox."""
        if peer == self.me:
            self.inbox.append(message)
        elif peer in self.linked:
            self.actions.append(Send(peer, message))

    def progress(self) -> Progress:
        """The message in which this peer tells the others where it stands."""
        here, own = self.here, self.own
        epoch, lineage = here.standing
        return Progress(
            epoch=epoch,
            lineage=lineage,
            samples=own.samples,
            rate=own.rate,
            boundary=own.boundary,
            pending=here.pending,
            joining=here.joining is not None or here.role is not Role.TRAINER,
            total=self.history.total,
            camp=1 + len(self.linked.standing(here.epoch, here.lineage)),
            step_s=own.pace.seconds,
            step_samples=own.pace.samples,
            leader=self.leader(),
            up_bps=own.upload_bps,
            down_bps=own.download_bps,
            apart=tuple(sorted(self.lacking())[:MOST_APART]),
            met=tuple(sorted(self.met())[:MOST_APART]),
        )

    def broadcast_progress(self) -> None:
        """Tell everybody where this peer stands."""
        message = self.progress()
        for facts in self.linked:
            self.send(facts.peer, message)

    # Ballots.

    def next_ballot(self) -> Ballot:
        """A ballot of this peer for the average after the last commit, which nobody has seen yet."""
        return self.promises.next((self.here.epoch, self.here.lineage))

    def hold(self, holding: Holding) -> None:
        """This peer is a member of a new ballot."""
        self.holding = holding
        self.promises.hold()
        self.epoch_state.held(self.now)

    def let_go(self) -> None:
        """The ballot that this peer held is decided, or given up."""
        self.holding = None
        self.let_go_at = self.now

    def lead(self, proposal: Proposal | None) -> None:
        """This peer leads an attempt; None: it leads no attempt any more."""
        self.proposal = proposal

    def led(self, ballot: Ballot) -> Proposal | None:
        """The attempt of this ballot, if this peer leads it."""
        proposal = self.proposal
        return proposal if proposal is not None and proposal.ballot == ballot else None

    def ask(self, inquest: Inquest | None) -> None:
        """This peer asks members what they hold of a ballot; None: it asks no more."""
        self.inquest = inquest

    def remember(self, outcome: Committed | Aborted) -> None:
        """Keep what became of a ballot, for peers that ask."""
        self.outcomes[outcome.ballot] = outcome
        while len(self.outcomes) > OUTCOMES_KEPT:
            del self.outcomes[next(iter(self.outcomes))]

    # The training thread.

    def resume(self) -> None:
        """Let the training thread go on, if it waits or was told to stop."""
        if self.own.boundary or self.own.told_to_stop:
            self.own.serve()
            self.act(Resume())

    def stop(self) -> None:
        """Have the training thread wait at its next boundary."""
        if not self.own.told_to_stop and not self.own.boundary:
            self.own.told_to_stop = True
            self.act(Stop())

    def wait_at(self, others: int | None) -> None:
        """Tell the training thread how many samples the others have; None: it need not stop."""
        if others != self.own.waits_at:
            self.own.waits_at = others
            self.act(WaitAt(others))

    def aim(self, target: int) -> None:
        """An epoch has `target` samples from now on, on which depends where the training thread stops."""
        self.target = target
        self.act(WaitAt(self.own.waits_at))

    # Who is who.

    @property
    def out(self) -> bool:
        """The epoch goes on without this peer."""
        return self.me in self.epoch_state.excluded

    def exclude(self, peer: PeerId, cause: Cause, words: str = "", by: PeerId | None = None) -> None:
        """The peer failed an attempt: it stays out of this epoch. by: the leader on whose word it does."""
        if peer not in self.epoch_state.excluded:
            self.epoch_state.excluded[peer] = cause
            if by is not None:
                self.epoch_state.accused[peer] = by
            why = words or cause.words
            self.act(Blame(peer, why))
            self.trace(TraceKind.EXCLUDED, peer=peer, why=why)

    def readmit(self, peer: PeerId) -> None:
        """The peer may be a member of this epoch's round again."""
        del self.epoch_state.excluded[peer]
        self.epoch_state.accused.pop(peer, None)

    def follow(self, leader: PeerId | None) -> None:
        """Take `leader` for the leader as long as that peer can lead; None: nobody in particular."""
        self.sticky = leader

    def suspect(self, peer: PeerId) -> None:
        """The peer should lead, and does not lead."""
        self.epoch_state.suspects.add(peer)

    def failed(self, ballot: Ballot) -> int:
        """An attempt came to nothing. Returns how many attempts of the same leader have for this epoch."""
        attempts = self.vain.setdefault(ballot.leader, set())
        attempts.add(ballot)
        return len(attempts)

    def depose(self, leader: PeerId) -> None:
        """Nothing gets done under this leader: others lead, and no peer stays out by this leader's word
        alone.
        """
        self.suspect(leader)
        self.relieve(leader)
        self.vain.pop(leader, None)
        for peer, by in list(self.epoch_state.accused.items()):
            if by == leader:
                self.readmit(peer)

    def relieve(self, leader: PeerId) -> None:
        """Other peers lead for some epochs, for more epochs each time."""
        self.dawdling.relieve(leader)
        if not self.idle_leaders.is_out(leader, self.here.epoch):
            self.idle_leaders.add(leader, self.here.epoch, free=-2)  # thus out for 4 further epochs at first

    def trust(self, peer: PeerId) -> None:
        """The peer leads, or can lead, after all."""
        self.epoch_state.suspects.discard(peer)

    def part_from(self, peers: frozenset[PeerId]) -> None:
        """These are all the living trainers to which this peer gets no link."""
        self.apart = peers

    def await_word(self, peers: set[PeerId]) -> None:
        """These peers may have gone on meanwhile: this peer proposes nothing before they said where
        they stand.
        """
        self.unheard = peers

    def heard_from(self, peer: PeerId) -> None:
        """The peer said where it stands."""
        self.unheard.discard(peer)

    def keep_words(self, peer: PeerId, words: tuple[Held, ...]) -> None:
        """Keep the last words of a peer that leaves, of ballots that may be asked about here."""
        held, epochs = self.holding, range(self.here.epoch, self.here.epoch + MOST_BEHIND + 1)
        if len(self.last_words) < MOST_WORDS or (held is not None and peer in held.voting):
            self.last_words[peer] = tuple(word for word in words if word.ballot.epoch in epochs)

    def forget_words(self, peer: PeerId) -> None:
        """The peer is back: its last words count no more."""
        self.last_words.pop(peer, None)

    def stands_here(self, facts: Facts) -> bool:
        """Whether the peer stands where this peer's last commit brought it."""
        return facts.epoch == self.here.epoch and facts.lineage == self.here.lineage

    def can_lead(self, peer: PeerId) -> bool:
        here, state = self.here, self.epoch_state
        if peer in state.suspects or peer in state.excluded or self.idle_leaders.is_out(peer, here.epoch):
            return False
        if peer == self.me:
            return here.joining is None and not here.departing and here.role is Role.TRAINER
        facts = self.linked.get(peer)
        if facts is None or facts.silent or facts.joining or facts.role is not Role.TRAINER:
            return False
        if facts.epoch == here.epoch and facts.lineage == here.lineage:
            return True
        return facts.epoch > here.epoch and peer not in self.linked.doubted

    def leader(self) -> PeerId | None:
        """The peer that this one follows: the last leader as long as it can lead, else the rendezvous choice
        of those that can. A leader that lacks a link makes room for one that lacks none, but not while its
        own ballot is the last that was promised here: the round would have two leaders, and neither of them
        all promises.
        """
        sticky, linked = self.sticky, self.linked
        sticks = sticky is not None and self.can_lead(sticky)
        if sticks and not (self.apart or linked.relayed or linked.claims):
            return sticky  # nobody lacks a link
        gaps = self.gaps()
        lacking = frozenset(ends(gaps)) if gaps else frozenset[PeerId]()
        promised = self.promises.last
        asked = promised is not None and promised.leader == sticky
        if sticks and (asked or sticky not in lacking):
            return sticky
        # The question comes after every event, and the answer is mostly as before.
        here, able = self.here, self.can_lead(self.me)
        barred = frozenset(self._barred())
        of = (linked.version, here.epoch, here.lineage, able, sticks and sticky, barred, lacking)
        if of != self._choice_of:
            self._choice_of, self._choice = of, self._choose(able, sticks, lacking)
        return self._choice

    def _choose(self, able: bool, sticks: bool, lacking: Collection[PeerId]) -> PeerId | None:
        """able: this peer can lead. sticks: the last leader can lead, though it is one of `lacking`."""
        # Who stands here lives and trains: as in `can_lead`, but for all at once.
        here, barred = self.here, self._barred()
        reachable: list[PeerId] = []
        hidden: list[PeerId] = []  # peers to which others have no link lead only when nobody else can
        for facts in self.linked.standing(here.epoch, here.lineage):
            peer = facts.peer
            if peer not in barred:
                (hidden if facts.client_only or peer in lacking else reachable).append(peer)
        if able:
            (hidden if self.config.client_only or self.me in lacking else reachable).append(self.me)
        if sticks and not reachable:
            return self.sticky
        return rendezvous(self.run, here.epoch, reachable or hidden)

    def _barred(self) -> set[PeerId]:
        """Peers that may not lead in this epoch."""
        state = self.epoch_state
        return {*state.suspects, *state.excluded, *self.idle_leaders.out(self.here.epoch)}

    def gaps(self) -> list[Gap]:
        """Pairs of peers that get no link to each other."""
        own = self.lacking()
        return gaps(self.linked, self.me, own, self.now) if own or self.linked.claims else []

    def lacking(self) -> frozenset[PeerId]:
        """Trainers to which this peer has no link, or one that a third member carries: gradients take
        another way.
        """
        return self.apart | self.linked.relayed if self.linked.relayed else self.apart

    def met(self) -> list[PeerId]:
        """Peers to which this one has a link though neither side can be dialled."""
        if not self.config.client_only:
            return []
        return [facts.peer for facts in self.linked if facts.client_only and not facts.relayed]

    def camp(self) -> Camp:
        """The camp of this peer, which counts as its only member. A peer without a state stands nowhere."""
        if self.here.role is not Role.TRAINER:
            return Camp(-1, self.here.lineage, 0, 0)
        return Camp(self.here.epoch, self.here.lineage, 1, self.history.total)

    def new_epoch(self, epoch: int, lineage: Lineage, leader: PeerId | None) -> None:
        """Stand at another (epoch, lineage): everything about the old epoch is over."""
        self.deadlines.relax(1.0)
        self.here.move(epoch, lineage, self.now)
        self.epoch_state = EpochState()
        self.own.offered.clear()
        self.vain.clear()
        self.promises.move((epoch, lineage))
        self.last_words = {
            peer: words
            for peer, words in self.last_words.items()
            if any(held.ballot.epoch >= epoch for held in words)
        }
        if leader is not None:
            self.follow(leader)

    def restart_epoch(self) -> None:
        """A round failed for good: the epoch begins anew, and who failed is forgotten."""
        self.epoch_state = EpochState()
