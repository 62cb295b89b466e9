"""A simulated swarm: nodes, their links, the faults that befall them, and the checks after every event."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.lineage import first_lineage
from p2pavg.rounds.protocol.messages import Committed, Inquire, Message, Progress, from_dict, to_dict
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.checks import Checks
from tests.simulation.jobs import SMALL, Value
from tests.simulation.trainer import Node
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
    ) -> None:
        """acknowledged: kernels tell when nothing that a node sends arrives."""
        self.world = World(seed)
        self.network = Network(self.world)
        self.latency = latency
        self.chunk_seconds = chunk_seconds
        self.target = target
        self.state_seconds = state_seconds
        self.beat = beat
        self.lineage = first_lineage(b"simulated", b"the same start")
        self.nodes: dict[PeerId, Node] = {}
        self.trace = trace
        self.through_wire = through_wire
        self.acknowledged = acknowledged
        self.corrupting: set[PeerId] = set()
        self.stopped: dict[PeerId, None] = {}
        self.only_old = False  # donors give the oldest snapshot that they have
        self.checks = Checks(self)
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
        node = Node(self, me, role, step_seconds, batch)
        for other in self.nodes.values():
            if other.alive and link:
                self.world.after(
                    self.world.random.random() * 0.02, lambda other=other: self.link(node, other)
                )
        self.nodes[me] = node
        return node

    def mesh(self) -> None:
        """All nodes have been linked for a while. Handshakes of a large swarm take longer than its rounds."""
        self.network.ways.mesh = lambda: Way(self.latency, chunk_seconds=self.chunk_seconds)
        hellos = [self._hello(node) for node in self.nodes.values()]
        for node in self.nodes.values():
            core = node.machine.core
            for hello in hellos:
                if hello.peer != node.me:
                    node.links[hello.peer] = True
                    core.view.up(hello)
                    core.deadlines.measured_rtt(hello.peer, hello.rtt_s)

    def link(self, a: Node, b: Node) -> None:
        """A handshake: each tells where it stands."""
        if not a.alive or not b.alive or b.me in a.links:
            return
        if not a.running or not b.running or self._cut(a, b) or self._cut(b, a):
            self.world.after(0.2, lambda: self.link(a, b))
            return
        self.network.connect(a.me, b.me, self.latency, self.chunk_seconds)
        a.links[b.me] = b.links[a.me] = True
        session = self.network.session[a.me, b.me]
        for node, other in ((a, b), (b, a)):
            hello = self._hello(other)

            def up(node: Node = node, other: Node = other, hello: ev.PeerUp = hello) -> None:
                if other.me in node.links and self.network.session[a.me, b.me] == session:
                    node.feed(hello)

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
        if b.me in a.links:
            self.network.disconnect(a.me, b.me)
            del a.links[b.me], b.links[a.me]
            a.feed(ev.PeerDown(b.me, reason))
            b.feed(ev.PeerDown(a.me, reason))

    def closed(self, node: Node, reason: str) -> None:
        """The process is gone: its kernel resets its connections."""
        for peer in list(node.links):
            other = self.nodes[peer]

            def tell(other: Node = other) -> None:
                if node.me in other.links:
                    self.network.disconnect(node.me, other.me)
                    del other.links[node.me]
                    other.feed(ev.PeerDown(node.me, reason))

            if self.world.random.random() < 0.5:
                self.network.disconnect(node.me, peer)  # what its kernel had not sent yet is lost
            cut = self._cut(node, other)
            self.world.after(10.0 if cut else self.latency * 1.5, tell)
        node.links.clear()

    def _cut(self, a: Node, b: Node) -> bool:
        way = self.network.ways.get((a.me, b.me))
        return way is not None and way.cut_at is not None

    def reaches(self, a: Node, b: Node) -> bool:
        """Whether a can send to b and hear from it."""
        return a.alive and b.alive and b.me in a.links and not self._cut(a, b) and not self._cut(b, a)

    def watched(self, node: Node) -> Iterable[PeerId]:
        """Whose health a node looks at: everybody's; in a large swarm a few and those that are or were not
        well.
        """
        peers = list(node.links)
        if len(peers) <= SMALL:
            return peers
        before, cuts = node.ill, self.network.cuts
        node.ill = [peer for peer in self.stopped if peer in node.links]
        node.ill += [a if b == node.me else b for a, b in cuts if node.me in (a, b)] if cuts else []
        few = self.world.random.sample(peers, 4)
        return dict.fromkeys(peer for peer in (*node.ill, *before, *few) if peer in node.links)

    def health(self, node: Node, peer: PeerId) -> ev.PeerHealth:
        since = self._broken_since(node, peer)
        heard = self.world.random.random() * 0.1 + self.latency if since is None else self.world.now - since
        return ev.PeerHealth(peer, heard, heard, heard, 2 * self.latency)

    def _broken_since(self, node: Node, peer: PeerId) -> float | None:
        """When `node` last heard `peer`, or was heard where the kernels tell so; None: now."""
        other, ways = self.nodes[peer], self.network.ways
        cuts = [ways[peer, node.me].cut_at, ways[node.me, peer].cut_at if self.acknowledged else None]
        since = [at for at in (*cuts, None if other.running else other.stopped_at) if at is not None]
        return min(since, default=None)

    def send(self, node: Node, peer: PeerId, message: Message) -> None:
        if peer not in node.links:
            return
        self.messages += 1
        if self.through_wire:
            message = from_dict(to_dict(message))
        if self.trace is not None:
            self.say(f"{node.name} -> {self.name(peer)} {short(message, self.name)}")
        target = self.nodes[peer]
        event = ev.Received(node.me, message)
        times = 1
        if type(message) in FACTS and self.world.random.random() < 0.05:
            times = 2
        for _ in range(times):
            self.network.send(node.me, peer, lambda: self._deliver(node.me, target, event))

    def _deliver(self, sender: PeerId, target: Node, event: ev.Event) -> None:
        if sender in target.links:
            target.feed(event)

    def send_data(self, node: Node, target: Node, transfer: int, kind: str, rank: int, value: Any) -> None:
        if target.me not in node.links:
            return

        def deliver() -> None:
            if not target.alive or node.me not in target.links:
                return
            if not target.running:
                target.backlog.append(deliver)
                return
            job = target.jobs.get(transfer)
            if job is not None:
                job.received(kind, rank, value)

        self.network.send(node.me, target.me, deliver, data=True)

    def corrupted(self, node: Node, rank: int, value: Any) -> Any:
        """What an owner with broken memory sends to one member."""
        if node.me in self.corrupting:
            self.corrupting.discard(node.me)
            self.say(f"{node.name} corrupts a result for rank {rank}")
            return Value((*value, "corrupt"))
        return value

    def spring(self, node: Node, action: act.Action) -> None:
        """A trap that finds its moment goes off, once."""
        if self.traps:
            self.traps = [trap for trap in self.traps if not trap(node, action)]

    # Checks.

    def acted(self, node: Node, action: act.Action) -> None:
        if self.trace is not None and not isinstance(action, (act.Send, act.WaitAt)):
            self.say(f"{node.name} {short(action, self.name)}")
        self.checks.acted(node, action)

    def check(self, node: Node) -> None:
        self.checks.handled(node)

    def applied(self, node: Node, commit: act.Commit) -> None:
        self.checks.applied(node, commit)


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
