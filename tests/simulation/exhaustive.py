"""Every order of events of one small round: `python -m tests.simulation.exhaustive --peers 3 --crashes 2`.

The real machines of two or three peers stand at the boundary where the target is reached. From there all
interleavings of message deliveries and finished transfers are explored. Crashes strike at any point, also
between two messages of one broadcast; what the kernel of the dead had not sent yet arrives or is lost. Time
passes when nothing else can happen; and so many times as `--races` says a timer fires before what is on its
way, as if that were late. No state is entered twice, and no machine is asked twice for the same answer.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.protocol.ballot import Stage
from p2pavg.rounds.protocol.lineage import first_lineage
from p2pavg.rounds.protocol.messages import Done, Promise
from tests.simulation.checks import BrokenPromiseError
from tests.simulation.memory import Memory
from tests.simulation.process import flat

SAMPLES = 2  # of each peer and step; one step of all peers is the target
MOST_WAITS = 60  # timers in a row that may fire before everybody alive must have its average
STEP_S = 0.05  # a released trainer is back at its boundary
CALM_S = 1e9  # no Health comes, and its absence means nothing
JUDGES = frozenset({"query"})  # who does not answer a successor until then counts as unreachable
Choice = tuple[Any, ...]
Fact = tuple[Any, ...]


class World(NamedTuple):
    """All peers, what is on its way between them, and what happened. Peers are named by their number."""

    machines: tuple[int | None, ...]  # as `Memory` numbers them; None: dead
    clocks: tuple[float, ...]
    queues: tuple[tuple[int, ...], ...]  # events on their way: of (0, 1), (0, 2), (1, 0) ...
    samples: tuple[int, ...]
    lineages: tuple[bytes | None, ...]  # of those that have the average
    facts: frozenset[Fact]  # see `Search._act`
    crashes: int
    races: int
    waits: int

    @property
    def over(self) -> bool:
        """Everybody that lives has the average, or goes to fetch the state that the others have."""
        return all(
            machine is None or self.lineages[peer] is not None or ("healing", peer) in self.facts
            for peer, machine in enumerate(self.machines)
        )


class Search:
    """What can happen in a world, and what comes of it."""

    def __init__(self, peers: int) -> None:
        self.ids = [hashlib.sha256(b"%d" % number).digest()[:20] for number in range(peers)]
        self.number = {me: number for number, me in enumerate(self.ids)}
        self.pairs = [(a, b) for a in range(peers) for b in range(peers) if a != b]
        self.memory = Memory()
        self.jobs: dict[int, tuple[tuple[int, ...], int]] = {}  # members and how many parts, of each transfer

    def first(self, crashes: int, races: int) -> World:
        """The peers are linked, counted, and wait at the boundary."""
        count, lineage = len(self.ids), first_lineage(b"small", b"the same start")
        machines = []
        for me in self.ids:
            machine = Machine(
                Config(me=me, run_id="small", epoch=0, lineage=lineage, target=SAMPLES * count, plan=flat),
                0.0,
            )
            machine.health_interval = CALM_S
            machines.append(self.memory.machine(machine))
        world = World(
            tuple(machines),
            (0.0,) * count,
            ((),) * len(self.pairs),
            (0,) * count,
            (None,) * count,
            frozenset(),
            0,
            0,
            0,
        )
        for a, b in self.pairs:
            world, _ = self.feed(world, a, ev.PeerUp(self.ids[b], 0, lineage, rtt_s=0.01))
        for peer in range(count):
            world = self.arrive(world, peer)
        return world._replace(crashes=crashes, races=races)

    # One step.

    def choices(self, world: World) -> Iterator[Choice]:
        """All that may happen next."""
        idle = True
        for (a, b), queue in zip(self.pairs, world.queues, strict=True):
            if queue and world.machines[b] is not None:
                idle = False
                yield ("deliver", a, b)
        for kind, peer, transfer in sorted(fact for fact in world.facts if fact[0] in ("running", "late")):
            if world.machines[peer] is not None and (kind == "late" or self._complete(world, transfer)):
                idle = False
                yield ("finish", peer, transfer)
        if idle:
            yield ("wait",)
        elif world.races:
            for peer, machine in enumerate(world.machines):
                if machine is not None and self.memory.deadline(machine) is not None:
                    yield ("race", peer)

    def _complete(self, world: World, transfer: int) -> bool:
        """Whoever contributes has begun, and nothing of it is lost."""
        members, _ = self.jobs[transfer]
        weights = self._weights(world, transfer)
        needed = (p for p, weight in zip(members, weights, strict=True) if weight > 0)
        return all(("begun", p, transfer) in world.facts and ("lost", p) not in world.facts for p in needed)

    def _weights(self, world: World, transfer: int) -> tuple[float, ...]:
        """Those with which it began somewhere."""
        return next((fact[2] for fact in world.facts if fact[:2] == ("weights", transfer)), ())

    def take(self, world: World, choice: Choice, cut: int | None) -> tuple[World, int]:
        """Do it; `cut`: whoever acts dies after that many messages. Also how many messages were sent."""
        kind, *rest = choice
        if kind == "deliver":
            at = self.pairs.index((rest[0], rest[1]))
            event, *others = world.queues[at]
            world = self._queue(world, at, tuple(others))
            return self.feed(world, rest[1], self.memory.events[event], cut)
        if kind == "finish":
            peer, transfer = rest
            _, parts = self.jobs[transfer]
            digests = tuple(hashlib.sha256(b"%d %d" % (transfer, part)).digest() for part in range(parts))
            facts = world.facts - {("late", peer, transfer)}
            if ("running", peer, transfer) in facts:
                facts = facts - {("running", peer, transfer)} | {("whole", peer, transfer)}
            world = world._replace(facts=facts)
            return self.feed(world, peer, ev.JobDone(transfer, digests), cut)
        if kind == "race":
            return self._race(world, rest[0], cut)
        return self._wait(world), 0

    def _race(self, world: World, peer: int, cut: int | None) -> tuple[World, int]:
        """A timer fires before what is on its way arrives."""
        machine = world.machines[peer]
        assert machine is not None
        deadline = self.memory.deadline(machine)
        assert deadline is not None
        clocks = list(world.clocks)
        clocks[peer] = round(max(clocks[peer], deadline) + 1e-6, 6)
        world = world._replace(clocks=tuple(clocks), races=world.races - 1)
        if self.memory.due(machine, clocks[peer]) & JUDGES:
            world = world._replace(facts=world.facts | {("split",)})
        return self.feed(world, peer, ev.Tick(), cut)

    def _wait(self, world: World) -> World:
        """Nothing is on its way: whoever computes arrives, or the next timer fires."""
        world = world._replace(waits=world.waits + 1)
        released = {fact for fact in world.facts if fact[0] == "released"}
        if released:
            world = self._pass(world, STEP_S)._replace(facts=world.facts - released)
            for _, peer in sorted(released):
                if world.machines[peer] is not None and world.lineages[peer] is None:
                    world = self.arrive(world, peer)
            return world
        left = {}
        for peer, machine in enumerate(world.machines):
            deadline = None if machine is None else self.memory.deadline(machine)
            if deadline is not None:
                left[peer] = max(0.0, deadline - world.clocks[peer])
        if not left or world.waits > MOST_WAITS:
            raise BrokenPromiseError("Live: somebody waits, and nothing will happen")
        first = min(left.values())
        world = self._pass(world, first + 1e-6)
        for peer, seconds in left.items():
            if seconds <= first + 1e-6:
                world, _ = self.feed(world, peer, ev.Tick())
        return world

    def _pass(self, world: World, seconds: float) -> World:
        return world._replace(clocks=tuple(round(clock + seconds, 6) for clock in world.clocks))

    def _queue(self, world: World, at: int, queue: tuple[int, ...]) -> World:
        return world._replace(queues=(*world.queues[:at], queue, *world.queues[at + 1 :]))

    def arrive(self, world: World, peer: int) -> World:
        """One more step was computed."""
        samples = list(world.samples)
        samples[peer] += SAMPLES
        world = world._replace(samples=tuple(samples))
        world, _ = self.feed(world, peer, ev.LocalProgress(samples[peer], 1.0, at_boundary=True))
        return world

    def feed(self, world: World, peer: int, event: ev.Event, cut: int | None = None) -> tuple[World, int]:
        """One event, and all that follows from it until its messages are on their way."""
        sent = 0
        before = world.machines[peer]
        assert before is not None
        after, actions = self.memory.handle(before, event, world.clocks[peer])
        machines = list(world.machines)
        machines[peer] = after
        world = world._replace(machines=tuple(machines))
        for action in actions:
            if isinstance(action, act.Send):
                if sent == cut:
                    break
                sent += 1
                world = self._send(world, peer, action)
            else:
                world = self._act(world, peer, action)
        return world, sent

    def _send(self, world: World, peer: int, action: act.Send) -> World:
        message, other = action.message, self.number[action.peer]
        if isinstance(message, Promise) and message.held is not None and message.held.stage is Stage.OPEN:
            world = world._replace(facts=world.facts | {("denied", peer, message.held.ballot)})
        if isinstance(message, Done):
            if ("denied", peer, message.ballot) in world.facts:
                raise BrokenPromiseError("Equal: DONE after a denial")
            world = world._replace(facts=world.facts | {("done", peer, message.ballot)})
        if world.machines[other] is None:
            return world
        at = self.pairs.index((peer, other))
        return self._queue(
            world, at, (*world.queues[at], self.memory.event(ev.Received(self.ids[peer], message)))
        )

    def _act(self, world: World, peer: int, action: act.Action) -> World:
        """What the driver and the training thread do, as facts.

        ("weights", transfer, weights)
        ("begun", peer, transfer): its contribution flows; ("lost", peer): but does not arrive
        ("running" | "whole" | "late", peer, transfer): its engine is at it, through, through after a cancel
        ("done" | "denied", peer, ballot): it said so
        ("released" | "healing", peer); ("split",): a fork is nobody's fault
        """
        facts = world.facts
        if isinstance(action, act.OpenJob):
            members = tuple(self.number[seat.peer] for seat in action.members)
            self.jobs[action.transfer] = members, len(action.plan.parts)
        elif isinstance(action, act.BeginJob):
            if {self._weights(world, action.transfer), action.weights} - {()} != {action.weights}:
                raise BrokenPromiseError("Whole: a transfer begins with two kinds of weights")
            facts |= {("weights", action.transfer, action.weights)}
            facts |= {("begun", peer, action.transfer), ("running", peer, action.transfer)}
        elif isinstance(action, act.CancelJob):
            running = ("running", peer, action.transfer)
            if running in facts and self._complete(world, action.transfer):
                facts |= {
                    ("late", peer, action.transfer)
                }  # the engine was through, and the loop did not know
            facts -= {running, ("whole", peer, action.transfer)}
        elif isinstance(action, (act.Resume, act.RoundFailed)):
            facts |= {("released", peer)}
        elif isinstance(action, act.StartHeal):
            facts |= {("healing", peer)}
        elif isinstance(action, act.Commit):
            return self._commit(world, peer, action)
        return world if facts is world.facts else world._replace(facts=facts)

    def _commit(self, world: World, peer: int, commit: act.Commit) -> World:
        if ("whole", peer, commit.transfer) not in world.facts:
            raise BrokenPromiseError("Whole: a result is committed that is not there")
        denied = any(fact[0] == "denied" and fact[2] == commit.ballot for fact in world.facts)
        if self.ids[peer] == commit.ballot.leader:
            if denied:
                raise BrokenPromiseError("Equal: a leader commits what a voter denied to a successor")
            others = [self.number[seat.peer] for seat in commit.members if seat.voter]
            if any(("done", o, commit.ballot) not in world.facts for o in others if o != peer):
                raise BrokenPromiseError("Whole: a leader commits before all voters are DONE")
        for seat, samples, weight in zip(commit.members, commit.samples, commit.weights, strict=True):
            if samples != weight or (samples and samples != world.samples[self.number[seat.peer]]):
                raise BrokenPromiseError("Counted: other samples than announced")
        lineages = list(world.lineages)
        lineages[peer] = commit.lineage
        if len(set(lineages) - {None}) > 1 and ("split",) not in world.facts:
            raise BrokenPromiseError("Equal: two lineages were committed")
        return world._replace(lineages=tuple(lineages))

    def crash(self, world: World, peer: int, *, lost: bool) -> World:
        """Its links break after what was sent, or without it, the data of its transfers included."""
        machines, queues = list(world.machines), list(world.queues)
        machines[peer] = None
        down = self.memory.event(ev.PeerDown(self.ids[peer], "connection reset"))
        for at, (a, _) in enumerate(self.pairs):
            if a == peer:
                queues[at] = (*(() if lost else queues[at]), down)
        facts = world.facts | {("lost", peer)} if lost else world.facts
        return world._replace(
            machines=tuple(machines), queues=tuple(queues), facts=facts, crashes=world.crashes - 1
        )


@dataclass
class Explored:
    """What was seen."""

    states: int = 0
    ends: int = 0
    seconds: float = 0.0


def explore(peers: int, crashes: int, races: int = 0, limit: int | None = None) -> Explored:
    """All of it, or up to `limit` states. Raises BrokenPromiseError with the choices that led there."""
    began, found, search = time.perf_counter(), Explored(), Search(peers)
    first = search.first(crashes, races)
    came: dict[World, tuple[World, str] | None] = {first: None}  # from where, by which choice
    stack = [first]

    def enter(world: World, here: World, said: str) -> None:
        if world not in came:
            came[world] = here, said
            stack.append(world)

    while stack and (limit is None or found.states < limit):
        here = stack.pop()
        found.states += 1
        if here.over:
            found.ends += 1
            continue
        for choice in list(search.choices(here)):
            said = " ".join(f"p{part}" if part in range(peers) else str(part) for part in choice)
            try:
                world, sent = search.take(here, choice, None)
                enter(world, here, said)
                if here.crashes == 0 or choice[0] == "wait":
                    continue
                actor = choice[2] if choice[0] == "deliver" else choice[1]
                for cut in range(sent + 1):
                    for lost in (False, True):
                        world, _ = search.take(here, choice, cut)
                        world = search.crash(world, actor, lost=lost)
                        enter(world, here, f"{said}, crash after {cut} messages, lost={lost}")
            except BrokenPromiseError as broken:
                raise BrokenPromiseError(f"{broken}; after: {_way(came, here)}; {said}") from None
    found.seconds = time.perf_counter() - began
    return found


def _way(came: dict[World, tuple[World, str] | None], world: World) -> str:
    """The choices that led there."""
    choices: list[str] = []
    while (step := came[world]) is not None:
        world, said = step
        choices.append(said)
    return "; ".join(reversed(choices))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.exhaustive", description=__doc__)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--crashes", type=int, default=1)
    parser.add_argument("--races", type=int, default=0, help="timers that fire before what is on its way")
    parser.add_argument("--limit", type=int, help="states (default: all of them)")
    given = parser.parse_args()
    try:
        found = explore(given.peers, given.crashes, given.races, given.limit)
    except BrokenPromiseError as broken:
        print(broken)
        return 1
    print(f"{found.states} states, {found.ends} of them ends, in {found.seconds:.1f} s: no promise is broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
