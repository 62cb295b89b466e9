"""A simulated swarm: nodes, their links, the faults that befall them, and the checks after every event."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from p2pavg.plan import Plan
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.memory.config import Spaced
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.lineage import first_lineage
from p2pavg.rounds.protocol.messages import Committed, Inquire, Message, Progress
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.protocol.wire import from_dict, to_dict
from tests.simulation.checks import Checks
from tests.simulation.jobs import SMALL, Job, Value
from tests.simulation.process import Parameters, Process
from tests.simulation.trainer import Node, Sample
from tests.simulation.world import Network, Way, World

FACTS = frozenset({Committed, Progress, Inquire})  # may be told twice


class Swarm:
    """All that a schedule acts on."""

    def __init__(
        self,
        seed: int,
        *,
        latency: float,
        chunk_seconds: float,
        target: int,
        state_seconds: float,
        beat: float = 0.25,
        trace: Callable[[str], None] | None = None,
        through_wire: bool = False,
        acknowledged: bool = True,
        weighted: bool = False,
        wide: bool = False,
        data: tuple[int, int] | None = None,
    ) -> None:
        """acknowledged: kernels tell when nothing that a node sends arrives. weighted: contributions have
        weights of their own. wide: what an engine tells comes late now and then. data: positions of a pass
        over the data that the peers share out, and of a block; None: each draws its own samples.
        """
        self.seed = seed
        self.world = World(seed)
        self.network = Network(self.world)
        self.latency = latency
        self.chunk_seconds = chunk_seconds
        self.target = target
        self.state_seconds = state_seconds
        self.beat = beat
        self.lineage = first_lineage(b"simulated", b"the same start")
        self.weighted = weighted
        self.spacing: Spaced | None = None  # how far apart rounds must be; None: as the samples come
        self.nodes: dict[PeerId, Node] = {}  # the last process of each identity
        self.lives: list[Node] = []  # all processes that ever were
        self.trace = trace
        self.through_wire = through_wire
        self.acknowledged = acknowledged
        self.corrupting: set[PeerId] = set()
        self.stopped: dict[PeerId, None] = {}
        self.ended: dict[PeerId, None] = {}  # behind a cut, so that others were not told at once
        self.only_old = False  # donors give the oldest snapshot that they have
        self._lags = random.Random(f"lags {seed}") if wide else None
        self.checks = Checks(self, data)
        self.messages = 0
        self.traps: list[
            Callable[[Node, act.Action], bool]
        ] = []  # faults that wait for a moment of the protocol

    def name(self, peer: PeerId) -> str:
        return f"p{int.from_bytes(peer[-2:], 'big')}"

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.world.now:9.4f} {text}")

    # Nodes and links.

    def add(self, role: Role, step_seconds: float, batch: int, *, link: bool = True) -> Node:
        """link: to all others, one handshake each."""
        number = len(self.nodes)
        me = hashlib.sha256(b"%d" % number).digest()[:18] + number.to_bytes(2, "big")
        return self._enter(Node(self, me, role, step_seconds, batch), link)

    def restart(self, dead: Node, start: Parameters | None) -> Node:
        """A process with the identity of one that is dead, from a checkpoint or from nothing.

        It is a joiner when one of those that it reaches is ahead of it.
        """
        epoch, lineage = (0, self.lineage) if start is None else (start.epoch, start.lineage)
        role = Role.TRAINER
        for other in self.nodes.values():
            here = other is not dead and other.alive and other.running and other.machine.role is Role.TRAINER
            if not here or self._cut(dead, other) or self._cut(other, dead):
                continue
            if other.machine.epoch > epoch or (epoch == 0 and other.machine.lineage != lineage):
                role = Role.JOINER
        return self._enter(
            Node(self, dead.me, role, dead.step_seconds, dead.batch, dead.life + 1, start), link=True
        )

    def _enter(self, node: Node, link: bool) -> Node:
        for other in self.nodes.values():
            if other.alive and link:
                self.world.after(
                    self.world.random.random() * 0.02, lambda other=other: self.link(node, other)
                )
        self.nodes[node.me] = node
        self.lives.append(node)
        return node

    def mesh(self) -> None:
        """All nodes have been linked for a while. Handshakes of a large swarm take longer than its rounds."""
        self.network.ways.mesh = lambda: Way(self.latency, chunk_seconds=self.chunk_seconds)
        hellos = [self._hello(node) for node in self.nodes.values()]
        for node in self.nodes.values():
            node.links |= self.nodes
            del node.links[node.me]
            up, measured = node.machine.core.linked.up, node.machine.core.deadlines.measured_rtt
            for hello in hellos:
                if hello.peer != node.me:
                    up(hello)
                    measured(hello.peer, hello.rtt_s)

    def link(self, a: Node, b: Node) -> None:
        """A handshake: each tells where it stands."""
        if not a.alive or not b.alive or a.links.get(b.me) is b:
            return
        if not a.running or not b.running or self._cut(a, b) or self._cut(b, a):
            self.world.after(0.2, lambda: self.link(a, b))
            return
        for node, other in ((a, b), (b, a)):
            if other.me in node.links:  # a process that was there before, and is dead
                del node.links[other.me]
                node.lost(other.me, "another process took its place")
        if not a.alive or not b.alive:
            return  # that was what it waited for before it left
        self.network.connect(a.me, b.me, self.latency, self.chunk_seconds)
        a.links[b.me], b.links[a.me] = b, a
        way = self.network.ways[a.me, b.me]
        session = way.session
        for node, other in ((a, b), (b, a)):
            hello = self._hello(other)

            def up(node: Node = node, other: Node = other, hello: ev.PeerUp = hello) -> None:
                if node.links.get(other.me) is other and way.session == session:
                    node.feed(hello)
                    node.data.met(other.me)

            # One side is done first: what it says at once, the other may not hear.
            self.world.after(self.world.random.choice((0.0, 0.0, 2.5 * self.latency)), up)

    def _hello(self, node: Node) -> ev.PeerUp:
        machine = node.machine
        return ev.PeerUp(
            node.me,
            machine.epoch,
            machine.lineage,
            machine.role,
            total_samples=machine.total_samples,
            leader=machine.leader,
            rtt_s=2 * self.latency,
        )

    def reset(self, a: Node, b: Node, reason: str) -> None:
        """The connection between two nodes breaks, and both learn it."""
        if a.links.get(b.me) is b and b.links.get(a.me) is a:
            self.network.disconnect(a.me, b.me)
            del a.links[b.me], b.links[a.me]
            a.lost(b.me, reason)
            b.lost(a.me, reason)

    def closed(self, node: Process, reason: str) -> None:
        """The process is gone: its kernel resets its connections."""
        for peer, other in node.links.items():

            def tell(other: Node = other) -> None:
                if other.links.get(node.me) is node:
                    self.network.disconnect(node.me, other.me)
                    del other.links[node.me]
                    other.lost(node.me, reason)

            if self.world.random.random() < 0.5:
                self.network.disconnect(node.me, peer)  # what its kernel had not sent yet is lost
            cut = self._cut(node, other)
            if cut:
                self.ended[node.me] = None
            self.world.after(10.0 if cut else self.latency * 1.5, tell)
        node.links.clear()

    def _cut(self, a: Process, b: Process) -> bool:
        way = self.network.ways.get((a.me, b.me))
        return way is not None and way.cut_at is not None

    def reaches(self, a: Node, b: Node) -> bool:
        """Whether a can send to b and hear from it."""
        return a.alive and b.alive and a.links.get(b.me) is b and not self._cut(a, b) and not self._cut(b, a)

    def watched(self, node: Process) -> Iterable[PeerId]:
        """Whose health a node looks at: everybody's; in a large swarm a few and those that are or were not
        well.
        """
        peers = list(node.links)
        if len(peers) <= SMALL:
            return peers
        before = node.ill
        node.ill = [peer for peer in (*self.stopped, *self.ended) if peer in node.links]
        if self.network.cuts:
            node.ill += [a if b == node.me else b for a, b in self.network.cut_at[node.me]]
        few = self.world.random.sample(peers, 4)
        return dict.fromkeys(peer for peer in (*node.ill, *before, *few) if peer in node.links)

    def health(self, node: Process) -> ev.Health:
        """How long ago a node last heard each peer, or was heard where the kernels tell so."""
        dice, now, latency = self.world.random.random, self.world.now, self.latency
        troubled = self.network.cuts or self.stopped or self.ended
        told = []
        for peer in self.watched(node):
            since = self._broken_since(node, peer) if troubled else None
            heard = dice() * 0.1 + latency if since is None else now - since
            told.append(ev.PeerHealth(peer, heard, heard, heard, 2 * latency))
        return ev.Health(tuple(told))

    def _broken_since(self, node: Process, peer: PeerId) -> float | None:
        """None: nothing keeps the two from hearing each other."""
        other, ways = node.links[peer], self.network.ways
        cuts = [ways[peer, node.me].cut_at, ways[node.me, peer].cut_at if self.acknowledged else None]
        stopped = None if other.running else other.stopped_at
        since = [at for at in (*cuts, stopped, other.ended_at) if at is not None]
        return min(since, default=None)

    def send(self, node: Node, peer: PeerId, message: Message) -> None:
        target = node.links.get(peer)
        if target is None:
            return
        self.messages += 1
        self.checks.sends(node, peer, message)
        if self.through_wire:
            message = from_dict(to_dict(message))
        if self.trace is not None:
            self.say(f"{node.name} -> {self.name(peer)} {short(message, self.name)}")
        event = ev.Received(node.me, message)
        times = 1
        if type(message) in FACTS and self.world.random.random() < 0.05:
            times = 2
        for _ in range(times):
            self.network.send(node.me, peer, partial(_deliver, node, target, event))

    def post(self, node: Node, target: Node, job: Callable[[], None]) -> None:
        """A message that is not the machine's: in order with those that are."""
        if node.links.get(target.me) is not target:
            return

        def deliver() -> None:
            if target.links.get(node.me) is node:
                target.do(job)

        self.network.send(node.me, target.me, deliver)

    def lag(self, node: Node) -> float:
        """How much later than the engine's threads the event loop looks at what they tell."""
        if self._lags is None:
            return 0.0
        return self._lags.choice((0.0, 0.0, 0.0, 0.0005, self.latency, 3 * self.latency))

    def send_data(
        self, node: Node, target: Node, transfer: int, kind: str, rank: int, part: int, value: Any
    ) -> None:
        if node.links.get(target.me) is target:
            bring = partial(_bring, node, target, transfer, (kind, rank, part, value))
            self.network.send(node.me, target.me, bring, data=True)

    def corrupted(self, node: Node, rank: int, value: Any) -> Any:
        """What an owner with broken memory sends to one member."""
        if node.me in self.corrupting:
            self.corrupting.discard(node.me)
            self.say(f"{node.name} corrupts a result for rank {rank}")
            return Value((*value, "corrupt"))
        return value

    def spring(self, node: Node, action: Any) -> None:
        """A trap that finds its moment goes off, once."""
        if self.traps:
            self.traps = [trap for trap in self.traps if not trap(node, action)]

    # What the checks look at.

    def handled(self, node: Process, event: ev.Event) -> None:
        self.checks.handled(node, event)

    def acted(self, node: Process, action: act.Action) -> None:
        if self.trace is not None and type(action) not in (act.Send, act.WaitAt):
            self.say(f"{node.name} {short(action, self.name)}")
        self.checks.acted(node, action)

    def check(self, node: Process) -> None:
        self.checks.rests(node)

    def waits(self, node: Node) -> None:
        """A training thread comes to a boundary."""
        self.checks.books.waits(node)

    def applied(self, node: Node, commit: act.Commit, job: Job) -> None:
        """A training thread steps with an average."""
        self.checks.applied(node, commit, job)

    def handed(self, giver: Node, receiver: Node, samples: list[Sample]) -> None:
        """A receiver takes what a departing process has."""
        self.say(f"{receiver.name} inherits {len(samples)} samples of {giver.name}")
        self.checks.books.handed(giver, receiver, samples)

    def leaves(self, node: Node) -> None:
        """A process ends by itself, having named what is lost."""
        self.checks.books.left(node)


def _bring(sender: Node, target: Node, transfer: int, chunk: tuple[str, int, int, Any]) -> None:
    if not target.alive or target.links.get(sender.me) is not sender:
        return
    if not target.running:
        target.backlog.append(partial(_bring, sender, target, transfer, chunk))
        return
    job = target.jobs.get(transfer)
    if job is not None:
        job.received(*chunk)


def _deliver(sender: Node, target: Node, event: ev.Event) -> None:
    if target.links.get(sender.me) is sender:
        target.feed(event)


def short(thing: Any, name: Callable[[PeerId], str]) -> str:
    """One line for a trace."""

    def show(value: Any) -> str:
        if isinstance(value, bytes):
            return name(value) if len(value) == 20 else value[:3].hex()
        if isinstance(value, (tuple, list)):
            return "[" + " ".join(show(item) for item in value[:12]) + "]"
        if isinstance(value, dict):
            return " ".join(f"{key}={show(item)}" for key, item in value.items() if key != "epoch")
        if hasattr(value, "attempt"):
            return f"({value.epoch}.{value.attempt} {show(value.leader)})"
        if isinstance(value, Plan):
            return show([(part.owner, *part.deputies, *["swap"] * part.swaps) for part in value.parts])
        if hasattr(value, "stage"):
            return f"held({show(value.ballot)} {value.stage.value})"
        if hasattr(value, "voter"):
            return show(value.peer) + ("" if value.voter else "*")
        if isinstance(value, float):
            return f"{value:.3g}"
        return str(value)

    if isinstance(thing, act.Trace):
        return f"* {thing.kind} e{thing.fields.get('epoch')} {show(dict(thing.fields))}"
    fields = [
        f"{field}={show(getattr(thing, field))}"
        for field in thing.__dataclass_fields__
        if field not in ("parts", "voters", "digests", "rate", "step_s", "total", "transfer", "seconds")
    ]
    return f"{type(thing).__name__} " + " ".join(fields)
