"""A simulated training thread on top of its process: steps, boundaries, outcomes, a last boundary."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.protocol.ballot import Lineage, Note, PeerId
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.catching import Catching, followed
from tests.simulation.data.loader import Loader, Undrawn
from tests.simulation.handover import Handover
from tests.simulation.jobs import Job
from tests.simulation.process import Parameters, Process

if TYPE_CHECKING:
    from tests.simulation.swarm import Swarm

Sample = tuple[PeerId, int]
LIFE = 1_000_000  # the samples of a peer's second process are numbered from here on
SAVES_EVERY = 2  # epochs


class Node(Process):
    """One process: a machine, its driver, its training thread."""

    def __init__(
        self,
        swarm: Swarm,
        me: PeerId,
        role: Role,
        step_seconds: float,
        batch: int,
        life: int = 0,
        start: Parameters | None = None,
    ) -> None:
        """start: of a checkpoint; None: the parameters that everybody was built with."""
        start = start or Parameters(0, swarm.lineage)
        self.step_seconds = step_seconds
        self.apply_seconds = step_seconds * 0.3
        self.batch = batch
        self.parameters = start
        super().__init__(swarm, me, role, life, start)
        self.data = Undrawn(self) if swarm.checks.positions is None else Loader(self)
        self.note = me  # of the contribution
        self.noise = lambda: 0.7 + 0.6 * self.world.random.random()  # of the length of a step
        self.began_at = self.world.now  # the step under way
        self.last_step = 0.0
        self.saved: Parameters | None = start if life else None  # its last checkpoint
        self.produced = 0
        self.samples: list[Sample] = []
        self.stop_at = float("inf")
        self.stopping = False
        self.waiting = False  # in step(), without an outcome
        self.waits = 0  # how many waits there were, this one included
        self.waiting_since = 0.0
        self.contribution: list[Sample] = []  # of this wait, or of the one that was given an outcome
        self.weight: float | None = None
        self.outcomes: deque[tuple[str, Any]] = deque()
        self.applying = False
        self.healing: Catching | None = None
        self.made: dict[Lineage, tuple[act.Commit, Job]] = {}  # by what each result follows on
        self.past: deque[Parameters] = deque(maxlen=3)  # of the same lineage: older snapshots
        self.bare = role is Role.JOINER  # it has never had the state of a run
        self.discarded = 0
        self.longest_stall = 0.0
        self.hung = False  # the training thread never finishes its step
        # It brings one batch to each epoch, and computes no more until the outcome.
        self.only_averages = False
        self.idle = False  # and waits to be wanted
        self.poison = False  # its next contribution is not finite
        self.idles = 0.0  # how often a step counts nothing
        self.impatient = 0.0  # after so long a wait is withdrawn; 0: never
        self.chance = random.Random(f"{swarm.seed} {self.name}")  # of what a plain schedule does not do
        self.departing = False
        self.left = False
        self.notice_s = 5.0
        self.handover: Handover | None = None
        self.left_to: list[tuple[list[Sample], Note]] = []  # from peers that left, not among the samples yet
        self.receiver_of: set[Sample] = set()  # all that ever were inherited
        self.world.after(step_seconds * self.world.random.random(), self._step_ends)
        self.world.after(swarm.beat * self.world.random.random(), self.beat)

    @property
    def inherited(self) -> list[Sample]:
        """From peers that left, and not yet among the samples."""
        return [sample for samples, _ in self.left_to for sample in samples]

    @property
    def numbers(self) -> range:
        """The numbers of the samples that this process counted."""
        return range(self.life * LIFE, self.life * LIFE + self.produced)

    def beat(self) -> None:
        super().beat()
        if self.alive and self.running and self.waiting:
            self.feed(self._local())

    def lost(self, peer: PeerId, reason: str) -> None:
        super().lost(peer, reason)
        handover = self.handover
        if handover is not None:
            self.do(lambda: handover.lost(peer))

    # Steps.

    def _local(self) -> ev.LocalProgress:
        samples = self.contribution if self.waiting else self.samples
        return ev.LocalProgress(
            len(samples),
            self.batch / self.step_seconds,
            self.waiting,
            self.weight if self.waiting else None,
            self.last_step,
            self.batch,
            note=self.note,
        )

    def _step_ends(self) -> None:
        if not self.alive:
            return
        if not self.running or self.hung:
            self.world.after(self.step_seconds, self._step_ends)
            return
        self.last_step = self.world.now - self.began_at
        self._count()
        if self.departing:
            self._leaves()
        elif self._wanted() or (self.idles and self.chance.random() < self.idles):
            self._arrive()
        else:
            self.feed(self._local())
            self._next_step()

    def _count(self) -> None:
        """A step's samples; some steps count none."""
        if self.idles and self.chance.random() < self.idles:
            return
        first = self.life * LIFE
        counted = [(self.me, first + self.produced + number) for number in range(self.batch)]
        yields = self.data.drew(counted)
        self.samples += counted
        self.produced += self.batch
        if yields:
            self.drop(yields)

    def _wanted(self) -> bool:
        return bool(
            self.stopping
            or self.outcomes
            or self.healing
            or self.left_to
            or len(self.samples) >= self.stop_at
        )

    def _next_step(self) -> None:
        if self.only_averages and self.samples:
            self.idle = True
            self._come_if_wanted()
            return
        self.began_at = self.world.now
        self.world.after(self.step_seconds * self.noise(), self._step_ends)

    # Boundaries.

    def _wait(self) -> None:
        left, self.left_to = self.left_to, []
        self.samples += self.data.boundary(left)
        self.note = self.data.note(len(self.samples))
        self.waiting, self.waiting_since = True, self.world.now
        self.waits += 1
        self.contribution = list(self.samples)
        self.weight = self._weight()
        self.swarm.waits(self)
        self.data.waits()

    def _weight(self) -> float | None:
        """In a weighted run: what the training loop says."""
        if not self.swarm.weighted:
            return None
        return len(self.contribution) * self.chance.choice((0.5, 1.0, 3.0))

    def _arrive(self) -> None:
        self._wait()
        if self.outcomes and self.give_next():
            return
        if self.impatient and self.chance.random() < 0.7:
            wait = self.waits
            self.world.after(self.impatient * self.chance.random(), lambda: self.withdraw(wait))
        self.feed(self._local())

    def withdraw(self, wait: int | None = None) -> None:
        """The wait times out: unless its contribution is in use, the training loop goes on, and comes back
        with more, with other samples, or with the same.
        """
        if not self.alive or not self.running or not self.waiting or self.departing:
            return
        if (wait is not None and wait != self.waits) or self.machine.counted:
            return
        self._released()
        self.feed(self._local())
        then = self.chance.choice(("more", "other", "same"))
        if then == "more":
            self._next_step()
            return
        if then == "other" and self.samples:
            self.drop("no group came together")
            for _ in range(self.chance.choice((1, 1, 2))):
                self._count()
        self.world.after(self.chance.choice((0.0, 0.001, 0.02)), self._comes_back)

    def drop(self, why: str) -> None:
        """What was accumulated is discarded, and named."""
        self.data.dropped()
        if self.samples:
            self.discarded += len(self.samples)
            self.samples.clear()
            self.feed(ev.Discard(why))

    def _comes_back(self) -> None:
        if not self.alive:
            return
        if not self.running:
            self.world.after(self.step_seconds, self._comes_back)
        elif self.departing:
            self._leaves()
        else:
            self._arrive()

    def leave(self) -> None:
        """SIGTERM: the training thread leaves at its next boundary."""
        self.departing = True
        if self.waiting:
            self._leaves()

    def _leaves(self) -> None:
        if not self.alive:
            return
        if not self.running:
            self.backlog.append(self._leaves)
            return
        if not self.waiting:
            self._wait()
        if self.outcomes and self.give_next():
            return
        self.events.append(self._local())
        self.feed(ev.Leave(self.notice_s, hand_over=True))
        if self.handover is not None:
            self.handover.begin()

    def inherit(self, samples: list[Sample], note: Note) -> None:
        """Another's samples are ours from now on."""
        self.left_to.append((samples, note))
        self.receiver_of |= set(samples)
        self._come_if_wanted()

    # Outcomes.

    def _released(self) -> None:
        self.waiting = False
        if not self.struck:
            self.longest_stall = max(self.longest_stall, self.world.now - self.waiting_since)

    def _resume(self) -> None:
        if not self.waiting or self.departing:
            return
        if not self.contribution and self.machine.role is Role.JOINER:
            return  # it has nothing to lose, and nothing to go on from
        self._released()
        self.feed(self._local())
        self._next_step()

    def give_next(self) -> bool:
        """What is next, if the training thread waits for it."""
        if not self.waiting or self.applying or not self.outcomes:
            return False
        if self.departing:
            self.drop_states()
        elif self.healing and not self.healing.loaded and self.outcomes[0][0] != "heal":
            return False
        if not self.outcomes:
            return False
        outcome = self.outcomes.popleft()
        if outcome[0] == "average" and outcome[1][0].before != self.parameters.lineage:
            return self.give_next()  # it does not follow on what was loaded
        if outcome[0] == "heal":  # what was committed before comes again, as a result of others
            self.outcomes = deque((kind, what) for kind, what in self.outcomes if what[0].following)
        self._released()
        self.applying = True
        self.world.after(self.apply_seconds, lambda: self._applied(*outcome))
        return True

    def _applied(self, kind: str, what: Any) -> None:
        if not self.alive:
            return
        if not self.running:
            self.world.after(self.apply_seconds + 0.01, lambda: self._applied(kind, what))
            return
        self.applying = False
        if kind == "average":
            commit, job = what
            self.swarm.applied(self, commit, job)
            if not commit.late:
                del self.samples[: len(self.contribution)]
            self.past.append(self.parameters)
            self.parameters = Parameters(commit.ballot.epoch + 1, commit.lineage)
            self.data.committed(commit, counted=bool(self.contribution) and not commit.late)
            if commit.following:
                self.feed(followed(commit))
            else:
                self.feed(ev.Applied(commit.ballot.epoch + 1, commit.lineage))
            self._save()
        else:
            parameters = what
            self.bare = False
            self.past.clear()
            dropped = len(self.samples) + len(self.inherited)
            self.samples.clear()
            self.left_to.clear()
            self.parameters = Parameters(parameters.epoch, parameters.lineage)
            self.data.loaded(parameters.lineage)
            self.feed(ev.Healed(parameters.epoch, parameters.lineage, parameters.history, dropped))
        self.feed(self._local())
        if self.departing:
            self._leaves()
        elif self.outcomes or self.healing:
            self._arrive()
        else:
            self._next_step()

    def go_on_level(self) -> None:
        """State and results are applied: the training thread computes, unless it has something to hand in."""
        self.feed(self._local())

    def _save(self) -> None:
        """A checkpoint: what a later process with this identity may begin with."""
        epoch, lineage = self.parameters.epoch, self.parameters.lineage
        if epoch % SAVES_EVERY:
            return
        history = tuple(made for made in self.machine.history if made.epoch < epoch)
        if history and history[-1].lineage == lineage:
            self.saved = Parameters(epoch, lineage, history)

    # Actions.

    def perform(self, action: act.Action) -> None:
        handler = PERFORM.get(type(action))
        if handler is not None:
            handler(self, action)

    def _send(self, action: act.Send) -> None:
        self.swarm.send(self, action.peer, action.message)

    def _open(self, action: act.OpenJob) -> None:
        self.jobs[action.transfer] = Job(self, action)
        self.opened.add(action.transfer)

    def _begin(self, action: act.BeginJob) -> None:
        self.jobs[action.transfer].begin(action.weights, tuple(self.contribution) if self.waiting else ())

    def _cancel(self, action: act.CancelJob) -> None:
        self.jobs.pop(action.transfer, None)

    def _commit(self, action: act.Commit) -> None:
        job = self.jobs.pop(action.transfer)
        self.stopping = False
        self.made[action.before] = action, job
        self.outcomes.append(("average", (action, job)))
        self.give_next()

    def _go_on(self, _: act.Action) -> None:
        self.stopping = False
        self._resume()

    def _wait_at(self, action: act.WaitAt) -> None:
        others = action.others_samples
        self.stop_at = float("inf") if others is None else self.swarm.target - others
        self._come_if_wanted()

    def _stop_soon(self, _: act.Action) -> None:
        self.stopping = True
        self._come_if_wanted()

    def _come_if_wanted(self) -> None:
        if self.idle and self._wanted():
            self.idle = False
            self.world.after(0.0, self._arrive)

    def _discard(self, action: act.Discarded) -> None:
        self.discarded += action.samples

    def _hand_over(self, action: act.HandOver) -> None:
        self.handover = Handover(self, action)
        if self.waiting:
            self.handover.begin()

    def _leave(self, _: act.Action) -> None:
        self.left = True
        self.discarded += len(self.inherited)
        self.swarm.leaves(self)
        self.die("left")

    def drop_states(self) -> None:
        """What was downloaded and is not loaded is void."""
        kept = [(kind, what) for kind, what in self.outcomes if kind != "heal" and not what[0].following]
        self.outcomes = deque(kept)

    def _heal(self, action: act.StartHeal) -> None:
        self.drop_states()
        self.healing = Catching(self, action)
        self.world.after(0.01, self.healing.ask)

    def _stop_heal(self, _: act.StopHeal) -> None:
        self.healing = None
        self.give_next()


PERFORM: dict[type[Any], Callable[[Node, Any], None]] = {
    act.Send: Node._send,
    act.OpenJob: Node._open,
    act.BeginJob: Node._begin,
    act.CancelJob: Node._cancel,
    act.Commit: Node._commit,
    act.RoundFailed: Node._go_on,
    act.StartHeal: Node._heal,
    act.StopHeal: Node._stop_heal,
    act.WaitAt: Node._wait_at,
    act.Stop: Node._stop_soon,
    act.Resume: Node._go_on,
    act.Discarded: Node._discard,
    act.HandOver: Node._hand_over,
    act.Left: Node._leave,
}
