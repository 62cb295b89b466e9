"""A simulated training thread and the driver around one machine: what a process does, without its I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from p2pavg.part import Part
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.departure import Verdict
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.protocol.ballot import Lineage, PeerId
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.catching import Catching, followed
from tests.simulation.jobs import SMALL, Job

if TYPE_CHECKING:
    from tests.simulation.swarm import Swarm

Sample = tuple[PeerId, int]
OWNERS = 8  # in a large group


@dataclass
class Parameters:
    """What training has made so far: enough to tell which averages are in it."""

    epoch: int
    lineage: Lineage


@dataclass
class Stalls:
    longest: float = 0.0
    since: float | None = None


class Node:
    """One process: a machine, its driver, its training thread."""

    def __init__(self, swarm: Swarm, me: PeerId, role: Role, step_seconds: float, batch: int) -> None:
        self.swarm = swarm
        self.world = swarm.world
        self.me = me
        self.name = swarm.name(me)
        self.step_seconds = step_seconds
        self.apply_seconds = step_seconds * 0.3
        self.batch = batch
        self.noise = lambda: 0.7 + 0.6 * self.world.random.random()  # of the length of a step
        self.began_at = self.world.now  # the step under way
        self.last_step = 0.0
        self.clock_offset = self.world.random.uniform(0, 1000)
        self.running = True  # not stopped
        self.alive = True  # neither dead nor gone
        self.stopped_at = 0.0
        self.disturbed_at = -1e9  # when a fault last touched this process or its links
        self.struck = False  # it has been the victim of one: its stalls are its own
        self.backlog: list[Any] = []
        self.events: deque[ev.Event] = deque()
        self.feeding = False
        self.interrupted: Callable[[], None] | None = None
        self.links: dict[PeerId, bool] = {}
        self.ill: list[PeerId] = []  # peers that stood still or were cut off when last looked at
        self.jobs: dict[int, Job] = {}
        # The training thread.
        self.parameters = Parameters(0, swarm.lineage)
        self.past: deque[Parameters] = deque(maxlen=3)  # of the same lineage: older snapshots
        self.produced = 0
        self.samples: list[Sample] = []
        self.stop_at = float("inf")
        self.stopping = False
        self.waiting = False  # in step(), without an outcome
        self.waiting_since = 0.0
        self.contribution: list[Sample] = []
        self.outcomes: deque[tuple[str, Any]] = deque()
        self.applying = False
        self.healing: Catching | None = None
        self.made: dict[Lineage, tuple[act.Commit, Job]] = {}  # by what each result follows on
        self.discarded = 0
        self.longest_stall = 0.0
        self.hung = False  # the training thread never finishes its step
        self.only_averages = (
            False  # it brings one batch to each epoch, and computes no more until the outcome
        )
        self.idle = False  # and waits to be wanted
        self.finished = False
        self.bare = role is Role.JOINER  # it has never had the state of a run
        self.poison = False  # its next contribution is not finite
        self.refused: set[int] = set()
        self.leaving = False
        self.inherited: list[Sample] = []  # from peers that left, not yet among the samples
        self.heir_of: set[Sample] = set()  # all that ever were inherited
        self._tick_at: float | None = None
        self.machine = Machine(
            me=me,
            run_id="simulated",
            epoch=0,
            lineage=swarm.lineage,
            target=swarm.target,
            plan=plan,
            now=self.clock(),
            role=role,
        )
        self.machine.health_interval = swarm.beat
        self.world.after(step_seconds * self.world.random.random(), self._step_ends)
        self.world.after(swarm.beat * self.world.random.random(), self._beat)

    def clock(self) -> float:
        return self.world.now + self.clock_offset

    # Feeding the machine.

    def feed(self, event: ev.Event) -> None:
        if not self.alive:
            return
        if not self.running:
            self.backlog.append(event)
            return
        self.events.append(event)
        if self.feeding:
            return
        self.feeding = True
        try:
            while self.events and self.alive and self.running:
                self._carry_out(self.machine.handle(self.events.popleft(), self.clock()))
        finally:
            self.feeding = False
        if not self.alive or not self.running:
            return
        self.swarm.check(self)
        deadline = self.machine.next_deadline
        if deadline is not None:
            at = max(self.world.now, deadline - self.clock_offset) + 1e-6
            if self._tick_at is None or at < self._tick_at - 1e-9 or self._tick_at < self.world.now:
                self._tick_at = at
                self.world.at(at, lambda: self._tick(at))

    def _carry_out(self, actions: list[act.Action]) -> None:
        """In order; a fault may strike between two of them."""
        for index, action in enumerate(actions):
            self.swarm.acted(self, action)
            self._perform(action)
            self.swarm.spring(self, action)
            if not self.alive:
                return
            if not self.running:
                self.interrupted = partial(self._carry_out, actions[index + 1 :])
                return

    def _tick(self, at: float) -> None:
        if self._tick_at == at:
            self._tick_at = None
            if self.running:
                self.feed(ev.Tick())

    def _beat(self) -> None:
        if not self.alive:
            return
        self.world.after(self.swarm.beat, self._beat)
        if not self.running:
            return
        self.feed(ev.Health(tuple(self.swarm.health(self, peer) for peer in self.swarm.watched(self))))
        for job in list(self.jobs.values()):
            if job.begun:
                self.feed(ev.JobProgressed(job.transfer, job.progress()))
        if self.waiting:
            self.feed(self._local())

    def stop(self) -> None:
        self.running = False
        self.swarm.stopped[self.me] = None
        self.struck = True
        self.stopped_at = self.world.now
        self.disturbed_at = self.world.now

    def go_on(self) -> None:
        if self.running or not self.alive:
            return
        self.running = True
        self.swarm.stopped.pop(self.me, None)
        self.disturbed_at = self.world.now
        interrupted, self.interrupted = self.interrupted, None
        if interrupted is not None:
            self.feeding = True
            interrupted()
            self.feeding = False
        backlog, self.backlog = [*self.events, *self.backlog], []
        self.events.clear()
        if self.world.random.random() < 0.5:
            self.feed(ev.Tick())  # timers may fire before the sockets are read
        for event in backlog:
            if callable(event):
                event()
            else:
                self.feed(event)
        self.feed(ev.Tick())

    # The training thread.

    def _local(self) -> ev.LocalProgress:
        samples = self.contribution if self.waiting else self.samples
        return ev.LocalProgress(
            len(samples),
            self.batch / self.step_seconds,
            self.waiting,
            None,
            self.last_step,
            self.batch,
            note=self.me,
        )

    def _step_ends(self) -> None:
        if not self.alive:
            return
        if not self.running or self.hung:
            self.world.after(self.step_seconds, self._step_ends)
            return
        self.last_step = self.world.now - self.began_at
        for _ in range(self.batch):
            self.samples.append((self.me, self.produced))
            self.produced += 1
        if self.leaving:
            self._leaves()
        elif self.stopping or self.outcomes or self.healing or len(self.samples) >= self.stop_at:
            self._arrive()
        else:
            self.feed(self._local())
            self._next_step()

    def _next_step(self) -> None:
        if self.only_averages and self.samples:
            self.idle = True
            self._come_if_wanted()
            return
        self.began_at = self.world.now
        self.world.after(self.step_seconds * self.noise(), self._step_ends)

    def leave(self) -> None:
        """SIGTERM: the training thread leaves at its next boundary."""
        self.leaving = True
        if self.waiting:
            self._leaves()

    def _leaves(self) -> None:
        self.waiting, self.waiting_since = True, self.world.now
        self.contribution = list(self.samples)
        if self.outcomes and self._give_next():
            return
        self.events.append(self._local())
        self.feed(ev.Leave(5.0, hand_over=True))

    def _bequeath(self, action: act.Bequeath) -> None:
        """What the driver does: ask one heir after the other, and carry the samples there."""
        heirs, later = deque(action.heirs), deque[PeerId]()

        def ask() -> None:
            if not self.alive:
                return
            while heirs:
                heir = self.swarm.nodes[heirs.popleft()]
                if not heir.running or not self.swarm.reaches(heir, self):
                    continue
                verdict = self._verdict(heir)
                if verdict is Verdict.LATER:
                    later.append(heir.me)
                elif verdict is Verdict.TAKEN:
                    # The offer follows all that was sent on this link before.
                    told = self.swarm.network.ways[self.me, heir.me].free_at + 1e-6
                    at = max(self.world.now + self.swarm.state_seconds, told)
                    self.world.at(at, lambda heir=heir: carried(heir))
                    return
            if not later:
                self.feed(ev.Bequeathed(False))
                return
            heirs.extend(later)
            later.clear()
            self.world.after(0.05, ask)

        def carried(heir: Node) -> None:
            if not self.alive:
                return
            here = heir.running and self.swarm.reaches(heir, self)
            if not here or self._verdict(heir) is not Verdict.TAKEN:
                ask()
                return
            heir.inherited += self.contribution
            heir.heir_of |= set(self.contribution)
            self.samples.clear()
            self.feed(ev.Bequeathed(True))

        ask()

    def _verdict(self, heir: Node) -> Verdict:
        if heir.leaving:
            return Verdict.NEVER
        return heir.machine.departure.verdict(self.parameters.epoch, self.parameters.lineage)

    def _arrive(self) -> None:
        self.samples += self.inherited
        self.inherited.clear()
        self.waiting, self.waiting_since = True, self.world.now
        self.contribution = list(self.samples)
        if self.outcomes and self._give_next():
            return
        self.feed(self._local())

    def _released(self) -> None:
        self.waiting = False
        if not self.struck:
            self.longest_stall = max(self.longest_stall, self.world.now - self.waiting_since)

    def _resume(self) -> None:
        if self.waiting and not self.leaving:
            self._released()
            self._next_step()

    def _give_next(self) -> bool:
        if not self.waiting or self.applying or not self.outcomes:
            return False
        if self.leaving:
            self._drop_states()
        elif self.healing and not self.healing.loaded and self.outcomes[0][0] != "heal":
            return False
        if not self.outcomes:
            return False
        outcome = self.outcomes.popleft()
        if outcome[0] == "average" and outcome[1][0].before != self.parameters.lineage:
            return self._give_next()  # it does not follow on what was loaded
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
            self.swarm.applied(self, commit)
            if not commit.late:
                count = commit.samples[job.rank]
                del self.samples[:count]
            self.past.append(self.parameters)
            self.parameters = Parameters(commit.ballot.epoch + 1, commit.lineage)
            if commit.following:
                self.feed(followed(commit))
            else:
                self.feed(ev.Applied(commit.ballot.epoch + 1, commit.lineage))
        else:
            parameters, history = what
            self.bare = False
            self.past.clear()
            dropped = len(self.samples) + len(self.inherited)
            self.samples.clear()
            self.inherited.clear()
            self.parameters = Parameters(parameters.epoch, parameters.lineage)
            self.feed(ev.Healed(parameters.epoch, parameters.lineage, history, dropped))
        self.feed(self._local())
        if self.leaving:
            self._leaves()
        elif self.outcomes or self.healing:
            self._arrive()
        else:
            self._next_step()

    def go_on_level(self) -> None:
        """State and results are applied: the training thread computes, unless it has something to hand in."""
        self.feed(self._local())
        if self.waiting and not self.contribution and not self.stopping and not self.outcomes:
            self._resume()

    # Actions.

    def _perform(self, action: act.Action) -> None:
        handler = PERFORM.get(type(action))
        if handler is not None:
            handler(self, action)

    def _send(self, action: act.Send) -> None:
        self.swarm.send(self, action.peer, action.message)

    def _open(self, action: act.OpenJob) -> None:
        self.jobs[action.transfer] = Job(self, action)

    def _begin(self, action: act.BeginJob) -> None:
        self.jobs[action.transfer].begin(action.weights, tuple(self.contribution) if self.waiting else ())

    def _cancel(self, action: act.CancelJob) -> None:
        self.jobs.pop(action.transfer, None)

    def _commit(self, action: act.Commit) -> None:
        job = self.jobs.pop(action.transfer)
        self.stopping = False
        self.made[action.before] = action, job
        self.outcomes.append(("average", (action, job)))
        self._give_next()

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
        wanted = self.stopping or self.outcomes or self.healing or len(self.samples) >= self.stop_at
        if self.idle and wanted:
            self.idle = False
            self.world.after(0.0, self._arrive)

    def _discard(self, action: act.Discarded) -> None:
        self.discarded += action.samples

    def _leave(self, _: act.Action) -> None:
        self.alive = False
        self.swarm.closed(self, "left")

    def _drop_states(self) -> None:
        kept = [o for o in self.outcomes if o[0] != "heal"]
        if self.healing is not None or len(kept) < len(self.outcomes):
            kept = [(kind, what) for kind, what in kept if not what[0].following]
        self.outcomes = deque(kept)

    def _heal(self, action: act.StartHeal) -> None:
        self._drop_states()
        self.healing = Catching(self, action)
        self.world.after(0.01, self.healing.ask)


PERFORM: dict[type[Any], Callable[[Node, Any], None]] = {
    act.Send: Node._send,
    act.OpenJob: Node._open,
    act.BeginJob: Node._begin,
    act.CancelJob: Node._cancel,
    act.Commit: Node._commit,
    act.RoundFailed: Node._go_on,
    act.StartHeal: Node._heal,
    act.WaitAt: Node._wait_at,
    act.Stop: Node._stop_soon,
    act.Resume: Node._go_on,
    act.Discarded: Node._discard,
    act.Bequeath: Node._bequeath,
    act.Left: Node._leave,
}


def plan(members: Any) -> tuple[Part, ...]:
    """One part for each voter, of uneven sizes; in a large group a few own all."""
    parts, at = [], 0
    voters = [rank for rank, member in enumerate(members) if member.voter]
    for rank in voters if len(voters) <= SMALL else voters[:: len(voters) // OWNERS]:
        parts.append(Part(rank, at, rank + 1))
        at += rank + 1
    return tuple(parts)
