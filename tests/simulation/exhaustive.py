"""Every order of events of one small round: `python -m tests.simulation.exhaustive --peers 3 --crashes 1`.

The real machines of two or three peers stand at the boundary where the target is reached. From there all
interleavings of message deliveries and finished transfers are explored, with a crash at any point, also
between two messages of one broadcast; what the kernel of the dead had not sent yet arrives or is lost. Time
passes only when nothing else can happen: then the next timer fires. No state is entered twice.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.lineage import first_lineage
from tests.simulation.checks import BrokenPromiseError
from tests.simulation.process import plan

SAMPLES = 2  # of each peer and step; one step of all peers is the target
MOST_WAITS = 40  # timers in a row that may fire before everybody alive must have its average
STEP_S = 0.05  # a released trainer is back at its boundary
Choice = tuple[Any, ...]


@dataclass
class Job:
    """One member's transfer."""

    weights: tuple[float, ...]
    members: tuple[PeerId, ...]
    parts: int


@dataclass
class Peer:
    """A machine at rest."""

    frozen: bytes
    deadline: float | None

    @classmethod
    def of(cls, machine: Machine) -> Peer:
        return cls(pickle.dumps(machine), machine.next_deadline)


@dataclass
class World:
    """All peers, what is on its way between them, and what was committed."""

    peers: dict[PeerId, Peer]
    queues: dict[tuple[PeerId, PeerId], list[ev.Event]]
    crashes: int
    now: float = 0.0
    waits: int = 0
    opened: dict[tuple[PeerId, int], tuple[tuple[PeerId, ...], int]] = field(default_factory=dict)
    running: dict[tuple[PeerId, int], Job] = field(default_factory=dict)
    begun: dict[int, list[PeerId]] = field(default_factory=dict)
    released: list[PeerId] = field(default_factory=list)
    samples: dict[PeerId, int] = field(default_factory=dict)
    lineages: dict[PeerId, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, peers: int, crashes: int) -> World:
        """The peers are linked, counted, and wait at the boundary."""
        ids = [hashlib.sha256(b"%d" % number).digest()[:20] for number in range(peers)]
        lineage = first_lineage(b"small", b"the same start")
        start = {
            me: Machine(
                me=me,
                run_id="small",
                epoch=0,
                lineage=lineage,
                target=SAMPLES * peers,
                plan=plan,
                now=0.0,
            )
            for me in ids
        }
        world = cls(
            {me: Peer.of(machine) for me, machine in start.items()},
            {(a, b): [] for a in ids for b in ids if a != b},
            0,
        )
        for a, b in world.queues:
            world.feed(a, ev.PeerUp(b, 0, lineage, rtt_s=0.01))
        for me in ids:
            world.arrive(me)
        world.crashes = crashes
        return world

    # One step.

    def choices(self) -> Iterator[Choice]:
        """All that may happen next."""
        idle = True
        for (a, b), queue in self.queues.items():
            if queue and b in self.peers:
                idle = False
                yield ("deliver", a, b)
        for (me, transfer), job in self.running.items():
            needed = [p for p, weight in zip(job.members, job.weights, strict=True) if weight > 0]
            if me in self.peers and all(p in self.begun.get(transfer, ()) for p in needed):
                idle = False
                yield ("finish", me, transfer)
        if idle:
            yield ("wait",)

    def take(self, choice: Choice, cut: int | None) -> int:
        """Do it; `cut`: whoever acts dies after that many messages. Returns how many messages were sent."""
        kind, *rest = choice
        if kind == "deliver":
            a, b = rest
            return self.feed(b, self.queues[a, b].pop(0), cut)
        if kind == "finish":
            me, transfer = rest
            job = self.running.pop((me, transfer))
            digests = tuple(hashlib.sha256(b"%d %d" % (transfer, part)).digest() for part in range(job.parts))
            return self.feed(me, ev.JobDone(transfer, digests), cut)
        self.wait()
        return 0

    def wait(self) -> None:
        """Nothing is on its way: whoever computes arrives, or the next timer fires."""
        self.waits += 1
        if self.released:
            self.now += STEP_S
            released, self.released = self.released, []
            for me in released:
                if me in self.peers and me not in self.lineages:
                    self.arrive(me)
            return
        due = {me: peer.deadline for me, peer in self.peers.items()}
        times = [at for at in due.values() if at is not None]
        if not times or self.waits > MOST_WAITS:
            raise BrokenPromiseError("Live: somebody waits, and nothing will happen")
        self.now = max(self.now, min(times)) + 1e-6
        for me, at in due.items():
            if at is not None and at <= self.now:
                self.feed(me, ev.Tick())

    def arrive(self, me: PeerId) -> None:
        """One more step was computed."""
        self.samples[me] = self.samples.get(me, 0) + SAMPLES
        self.feed(me, ev.LocalProgress(self.samples[me], 1.0, at_boundary=True))

    def feed(self, me: PeerId, event: ev.Event, cut: int | None = None) -> int:
        """One event, and all that follows from it until its messages are on their way."""
        sent = 0
        machine: Machine = pickle.loads(self.peers[me].frozen)
        actions = machine.handle(event, self.now)
        self.peers[me] = Peer.of(machine)
        for action in actions:
            if isinstance(action, act.Send):
                if sent == cut:
                    break
                sent += 1
                if action.peer in self.peers:
                    self.queues[me, action.peer].append(ev.Received(me, action.message))
            else:
                self.act(me, action)
        return sent

    def act(self, me: PeerId, action: act.Action) -> None:
        """What the driver and the training thread do."""
        if isinstance(action, act.OpenJob):
            members = tuple(seat.peer for seat in action.members)
            self.opened[me, action.transfer] = (members, len(action.parts))
        elif isinstance(action, act.BeginJob):
            members, parts = self.opened[me, action.transfer]
            self.running[me, action.transfer] = Job(action.weights, members, parts)
            self.begun[action.transfer] = sorted({*self.begun.get(action.transfer, ()), me})
        elif isinstance(action, act.CancelJob):
            self.running.pop((me, action.transfer), None)
        elif isinstance(action, (act.Resume, act.RoundFailed)):
            self.released = sorted({*self.released, me})
        elif isinstance(action, act.Commit):
            self.lineages[me] = action.lineage
            if len(set(self.lineages.values())) > 1:
                raise BrokenPromiseError("Equal: two lineages were committed")
            for seat, samples, weight in zip(action.members, action.samples, action.weights, strict=True):
                if samples != weight or (samples and samples != self.samples[seat.peer]):
                    raise BrokenPromiseError("Counted: other samples than announced")

    def crash(self, me: PeerId, *, lost: bool) -> None:
        """Its links break after what was sent, or without it."""
        self.crashes -= 1
        del self.peers[me]
        for (sender, _), queue in self.queues.items():
            if sender == me:
                if lost:
                    queue.clear()
                queue.append(ev.PeerDown(me, "connection reset"))

    @property
    def over(self) -> bool:
        """Everybody that lives has the average."""
        return all(me in self.lineages for me in self.peers)


@dataclass
class Explored:
    """What was seen."""

    states: int = 0
    ends: int = 0
    seconds: float = 0.0


def explore(peers: int, crashes: int, limit: int | None = None) -> Explored:
    """All of it, or up to `limit` states. Raises BrokenPromiseError with the choices that led there."""
    began, found = time.perf_counter(), Explored()
    first = World.of(peers, crashes)
    names = {me: f"p{number}" for number, me in enumerate(first.peers)}
    seen: set[bytes] = set()
    stack: list[tuple[bytes, tuple[str, ...]]] = []

    def enter(world: World, path: tuple[str, ...]) -> None:
        frozen = pickle.dumps(world)
        key = hashlib.sha256(frozen).digest()  # a few states that behave alike differ: in the order of a dict
        if key not in seen:
            seen.add(key)
            stack.append((frozen, path))

    enter(first, ())
    while stack and (limit is None or found.states < limit):
        frozen, path = stack.pop()
        found.states += 1
        here: World = pickle.loads(frozen)
        if here.over:
            found.ends += 1
            continue
        for choice in list(here.choices()):
            said = " ".join(names.get(part, str(part)) for part in choice)
            after = (*path, said)
            try:
                world: World = pickle.loads(frozen)
                sent = world.take(choice, None)
                enter(world, after)
                if here.crashes == 0 or choice[0] == "wait":
                    continue
                me = choice[2] if choice[0] == "deliver" else choice[1]
                for cut in range(sent + 1):
                    for lost in (False, True):
                        world = pickle.loads(frozen)
                        world.take(choice, cut)
                        world.crash(me, lost=lost)
                        enter(world, (*after, f"crash {names[me]} after {cut} messages, lost={lost}"))
            except BrokenPromiseError as broken:
                raise BrokenPromiseError(f"{broken}; after: " + "; ".join(after)) from None
    found.seconds = time.perf_counter() - began
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.exhaustive", description=__doc__)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--crashes", type=int, default=1)
    parser.add_argument("--limit", type=int, help="states (default: all of them)")
    given = parser.parse_args()
    try:
        found = explore(given.peers, given.crashes, given.limit)
    except BrokenPromiseError as broken:
        print(broken)
        return 1
    print(f"{found.states} states, {found.ends} of them ends, in {found.seconds:.1f} s: no promise is broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
