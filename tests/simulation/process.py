"""One simulated process: a machine, its clock, its links, and the driver that carries its actions out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from p2pavg.plan import MOST_GATHERED, Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.protocol.ballot import Lineage, PeerId
from p2pavg.rounds.protocol.messages import Message
from p2pavg.rounds.protocol.roles import Generation, Role
from tests.simulation.jobs import SMALL, Job

if TYPE_CHECKING:
    from tests.simulation.data.loader import Undrawn
    from tests.simulation.swarm import Swarm
    from tests.simulation.trainer import Node

OWNERS = 8  # in a large group
GATHERED = 1 / 6  # of the groups exchange their contributions
TELLING = frozenset({ev.Received, ev.PeerUp, ev.PeerDown})  # events that the checks look at
SERIALS = 10**6  # of ballots, for each process of a peer


@dataclass(frozen=True)
class Parameters:
    """What training has made so far: enough to tell which averages are in it."""

    epoch: int
    lineage: Lineage
    history: tuple[Generation, ...] = ()  # when it was saved or downloaded


class Process:
    """A machine and its driver. It can be stopped, and it can die."""

    data: Undrawn

    def __init__(self, swarm: Swarm, me: PeerId, role: Role, life: int, start: Parameters) -> None:
        """life: how many processes had this identity before."""
        self.swarm = swarm
        self.world = swarm.world
        self.me = me
        self.life = life
        self.name = swarm.name(me) + "'" * life
        self.clock_offset = self.world.random.uniform(0, 1000)
        self.running = True  # not stopped
        self.alive = True  # neither dead nor gone
        self.stopped_at = 0.0
        self.ended_at: float | None = None
        self.disturbed_at = -1e9  # when a fault last touched this process or its links
        self.struck = False  # it has been the victim of one: its stalls are its own
        self.backlog: list[Any] = []
        self.events: deque[ev.Event] = deque()
        self.feeding = False
        self.reading = False  # what came while it was stopped
        self.interrupted: Callable[[], None] | None = None
        self.links: dict[PeerId, Node] = {}
        self.met: dict[PeerId, float] = {}  # since when the machine knows of a link
        self.handles: ev.Event = ev.Tick()  # what its machine looked at last
        self.ill: list[PeerId] = []  # peers that stood still or were cut off when last looked at
        self.jobs: dict[int, Job] = {}
        self.opened: set[int] = set()  # all that ever were
        self.sent = [0, 0, 0]  # messages in this virtual second: (which, how many, over how many links)
        self._tick_at: float | None = None
        self.machine = Machine(
            Config(
                me=me,
                run_id="simulated",
                epoch=start.epoch,
                lineage=start.lineage,
                history=start.history,
                target=swarm.target,
                plan=plan,
                role=role,
                weighted=swarm.weighted,
                spacing=swarm.spacing,
                life=life * SERIALS,
                combine=lambda *said: self.data.combine(*said),
            ),
            self.clock(),
        )
        self.machine.health_interval = swarm.beat
        self.machine.core.inbox = ToItself(self)

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
                event = self.events.popleft()
                actions = self.machine.handle(event, self.clock())
                self.handles = event
                if type(event) in TELLING:
                    self.swarm.handled(self, event)
                self._carry_out(actions)
        finally:
            self.feeding = False
        if not self.alive or not self.running:
            return
        if not self.reading:
            self.swarm.check(self)
        deadline = self.machine.next_deadline
        if deadline is not None:
            at = max(self.world.now, deadline - self.clock_offset) + 1e-6
            if self._tick_at is None or at < self._tick_at - 1e-9 or self._tick_at < self.world.now:
                self._tick_at = at
                self.world.at(at, lambda: self._tick(at))

    def do(self, job: Callable[[], None]) -> None:
        """What the event loop does beside the machine: now, or when the process goes on."""
        if not self.alive:
            return
        if self.running:
            job()
        else:
            self.backlog.append(job)

    def _carry_out(self, actions: list[act.Action]) -> None:
        """In order; a fault may strike between two of them."""
        swarm = self.swarm
        for index, action in enumerate(actions):
            swarm.acted(self, action)
            self.perform(action)
            if swarm.traps:
                swarm.spring(self, action)
            if not self.alive:
                return
            if not self.running:
                self.interrupted = partial(self._carry_out, actions[index + 1 :])
                return

    def perform(self, action: act.Action) -> None:
        raise NotImplementedError

    def _tick(self, at: float) -> None:
        if self._tick_at == at:
            self._tick_at = None
            if self.running:
                self.feed(ev.Tick())

    def beat(self) -> None:
        """The regular beat: health of links, progress of jobs."""
        if not self.alive:
            return
        self.world.after(self.swarm.beat, self.beat)
        if not self.running:
            return
        self.feed(self.swarm.health(self))
        for job in list(self.jobs.values()):
            if job.begun:
                self.feed(ev.JobProgressed(job.transfer, job.progress()))

    # Faults.

    def stop(self) -> None:
        """SIGSTOP."""
        self.running = False
        self.swarm.stopped[self.me] = None
        self.struck = True
        self.stopped_at = self.world.now
        self.disturbed_at = self.world.now

    def go_on(self) -> None:
        """SIGCONT: what came meanwhile is read."""
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
        self.reading = True
        if self.world.random.random() < 0.5:
            self.feed(ev.Tick())  # timers may fire before the sockets are read
        for event in backlog:
            if callable(event):
                self.do(event)
            else:
                self.feed(event)
        self.reading = False
        self.feed(ev.Tick())

    def die(self, reason: str) -> None:
        """The process is gone: its kernel resets its connections."""
        self.alive = False
        self.ended_at = self.world.now
        self.swarm.stopped.pop(self.me, None)
        self.swarm.closed(self, reason)

    def lost(self, peer: PeerId, reason: str) -> None:
        """The link to a peer is gone."""
        self.feed(ev.PeerDown(peer, reason))


class ToItself(deque[Message]):
    """A machine's messages to itself are looked at like those to others."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def append(self, message: Message) -> None:
        super().append(message)
        self._process.swarm.checks.said.tells_itself(self._process, message)


def plan(members: Any) -> Plan:
    """Flat, or, for half of the groups of at least three, over two or three regions, with deputies in
    most, half of which swap with the owner where there is one; for some groups an all-gather.
    """
    found, count = flat(members), len(members)
    voters = [rank for rank, member in enumerate(members) if member.voter]
    owners = [rank for rank in voters if members[rank].owns][:MOST_GATHERED]
    if (
        len(voters) > 1
        and owners
        and random.Random(members[0].peer + bytes([count % 256])).random() < GATHERED
    ):
        return Plan(tuple(Part(rank, at, 1) for at, rank in enumerate(owners)), gathers=True)
    dice = random.Random(b"".join(member.peer for member in members))
    if not 3 <= count <= SMALL or dice.random() < 0.5:
        return found
    groups = tuple(dice.randrange(dice.choice((2, 3))) for _ in members)
    parts = []
    for part in found.parts:
        deputies = []
        for group in set(groups) - {groups[part.owner]}:
            here = [other.owner for other in found.parts if groups[other.owner] == group]
            if here and dice.random() < 0.8:
                deputies.append(dice.choice(here))
        swaps = len(deputies) == 1 and dice.random() < 0.5
        parts.append(replace(part, deputies=tuple(deputies), swaps=swaps))
    return Plan(tuple(parts), groups)


def flat(members: Any) -> Plan:
    """One part for each voter that may own one, of uneven sizes; in a large group a few own all."""
    parts, at = [], 0
    voters = [rank for rank, member in enumerate(members) if member.voter and member.owns]
    for rank in voters if len(voters) <= SMALL else voters[:: len(voters) // OWNERS]:
        parts.append(Part(rank, at, rank + 1))
        at += rank + 1
    return Plan(tuple(parts))
