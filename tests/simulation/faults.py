"""What befalls a swarm: processes die, stop, come back, leave; links break, flap, slow down; traps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from p2pavg.rounds.machine.actions import Action, Commit, HandOver, Send
from p2pavg.rounds.protocol.messages import (
    Begin,
    Committed,
    Departing,
    Done,
    Prepare,
    Promise,
    Query,
    Ready,
)
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.handover import Handed
from tests.simulation.swarm import Swarm
from tests.simulation.trainer import Node

PLAIN = (
    *(
        "crash",
        "stop",
        "cut",
        "oneway",
        "reset",
        "jump",
        "join",
        "leave",
        "hang",
        "slow",
        "corrupt",
        "poison",
    ),
    *("trap",) * 8,
)
WIDE = (
    *(
        "restart",
        "restart",
        "restart",
    ),  # a process with the same identity follows, from a checkpoint or nothing
    *("rewire", "rewire"),  # links are reset while a process is stopped
    *("flap", "flap"),  # a cut comes and goes
    *("meet", "meet"),  # a partition mends when somebody says something about a commit
    *("depart", "depart", "depart"),  # one leaves, and something befalls it or others meanwhile
    *("withdraw", "withdraw"),  # waits time out, and are declared anew
    *("ambush",) * 3,  # any of these at a chosen moment
)
MOMENTS = (Prepare, Promise, Ready, Begin, Done, Done, Committed, Committed, Commit, Commit, Query)
DECISIVE = MOMENTS[4:]
AMBUSHES = (Promise, Ready, Begin, Done, Done, Committed, Commit, Query, Departing, HandOver)
DEPARTURES = (Departing, HandOver, Handed)
FORKING = frozenset({"stop", "cut", "oneway", "reset", "slow", "jump", "rewire", "flap", "meet", "depart"})
FAR = 7  # at most so many are cut off from the others


class Faults:
    """Strikes one swarm. Everything follows from the dice."""

    def __init__(self, swarm: Swarm, dice: random.Random, *, peers: int, large: bool) -> None:
        """peers: how many there are to begin with."""
        self.swarm = swarm
        self.dice = dice
        self.peers = peers
        self.large = large
        self.lasts: tuple[float, ...] = (0.05, 0.3, 1.0) if large else (0.05, 0.3, 1.0, 2.5, 4.0)
        self.only: str | None = None  # no other kind, besides joins
        self.focused = False  # traps around the commit only
        self.stopping = False  # traps that stop somebody only
        self.calm_at = 0.0  # all is over by then

    def _lasts(self, seconds: float) -> None:
        self.calm_at = max(self.calm_at, self.swarm.world.now + seconds)

    def _pick(self) -> Node | None:
        """Rather the leader: it is where it hurts."""
        nodes = [n for n in self.swarm.nodes.values() if n.alive and n.running]
        if not nodes:
            return None
        if self.dice.random() < 0.4:
            leaders = [n for n in nodes if n.machine.leader == n.me]
            nodes = leaders or nodes
        return self.dice.choice(nodes)

    def strike(self, kind: str, node: Node | None = None) -> None:
        """Now, or, if it is a trap, when its moment comes."""
        swarm, dice = self.swarm, self.dice
        if kind == "trap":
            self._trap()
            return
        if kind == "ambush":
            self._ambush()
            return
        if self.only is not None and kind != "join":
            kind = self.only
        node = node or self._pick()
        others = [n for n in swarm.nodes.values() if n.alive and n is not node]
        if node is None:
            return
        lasts = dice.choice(self.lasts) * (0.5 + dice.random())
        self._lasts(lasts)
        if kind in ("crash", "leave") and len(others) == 0:
            kind = "jump"
        swarm.checks.forks_allowed |= kind in FORKING
        swarm.say(f"!!! {kind} {node.name} for {lasts:.2f} s")
        if kind not in ("jump", "join", "withdraw"):
            self._disturb([node])
        STRIKES[kind](self, node, others, lasts)

    def _disturb(self, nodes: list[Node], struck: list[Node] | None = None) -> None:
        """The fault may show until long after it is over. struck: of them; None: all."""
        until = self.swarm.world.now + 1e6
        for node in nodes:
            node.disturbed_at = until
        for node in nodes if struck is None else struck:
            node.struck = True

    # Processes.

    def _crash(self, node: Node, others: list[Node], lasts: float) -> None:
        node.die("connection reset")

    def _leave(self, node: Node, others: list[Node], lasts: float) -> None:
        node.leave()

    def _stop(self, node: Node, others: list[Node], lasts: float) -> None:
        node.stop()
        self.swarm.world.after(lasts, node.go_on)

    def _hang(self, node: Node, others: list[Node], lasts: float) -> None:
        node.hung = True

        def wake() -> None:
            node.hung = False

        self.swarm.world.after(lasts, wake)

    def _jump(self, node: Node, others: list[Node], lasts: float) -> None:
        node.clock_offset += self.dice.choice((-3.0, 0.2, 3.0, 1000.0))
        node.disturbed_at = self.swarm.world.now
        node.struck = True

    def _join(self, node: Node, others: list[Node], lasts: float) -> None:
        if len(self.swarm.nodes) < self.peers + 3:
            template = next(iter(self.swarm.nodes.values()))
            self.swarm.add(Role.JOINER, template.step_seconds, template.batch)

    def _corrupt(self, node: Node, others: list[Node], lasts: float) -> None:
        self.swarm.corrupting.add(node.me)

    def _poison(self, node: Node, others: list[Node], lasts: float) -> None:
        node.poison = True

    def _restart(self, node: Node, others: list[Node], lasts: float) -> None:
        """It dies, perhaps together with its network, and another one with its identity takes its place."""
        swarm, dice = self.swarm, self.dice
        start = node.saved if dice.random() < 0.7 else None
        if others and dice.random() < 0.4:
            swarm.checks.forks_allowed = True
            near = [] if dice.random() < 0.5 else dice.sample(others, dice.randint(0, len(others) - 1))
            far = [node, *near]
            rest = [n for n in others if n not in far]
            self._disturb([*far, *rest], struck=[])
            self._part(far, rest, lasts, one_way=dice.random() < 0.2)
        node.die("connection reset")

        def back() -> None:
            if swarm.nodes[node.me] is node:
                again = swarm.restart(node, start)
                swarm.say(f"!!! {again.name} begins at {again.parameters.epoch} as a {again.machine.role}")
                self._disturb([again])

        swarm.world.after(lasts * dice.choice((0.02, 0.3, 0.9)), back)

    def _rewire(self, node: Node, others: list[Node], lasts: float) -> None:
        """Others give up its links while it is stopped: it reads what they said, and then that they went."""
        swarm, dice = self.swarm, self.dice
        node.stop()
        swarm.world.after(lasts, node.go_on)
        for other in others:
            if dice.random() < 0.7:
                at = lasts * dice.random()
                swarm.world.after(at, lambda other=other: swarm.reset(node, other, "no answer"))
                swarm.world.after(at + 0.01, lambda other=other: swarm.link(node, other))

    def _withdraw(self, node: Node, others: list[Node], lasts: float) -> None:
        """Its waits time out for a while; the one that it is in perhaps at once."""
        node.impatient = self.dice.choice((0.02, 0.1, 0.5))
        if self.dice.random() < 0.5:
            self.swarm.world.after(self.dice.choice((0.0, 0.01, 0.1)), node.withdraw)

        def over() -> None:
            node.impatient = 0.0

        self.swarm.world.after(lasts, over)

    def _depart(self, node: Node, others: list[Node], lasts: float) -> None:
        """One leaves at about the time at which something befalls it, a receiver, or another one."""
        swarm, dice = self.swarm, self.dice
        node.notice_s = dice.choice((0.3, 1.0, 5.0))
        kind = dice.choice(
            ("crash", "stop", "join", "leave", "reset", "oneway", "cut", "restart", "woken", "trap")
        )
        if kind == "woken":  # it is told to go when it has been away
            node.stop()
            swarm.world.after(lasts, node.go_on)
            swarm.world.after(lasts + dice.choice((0.0, 0.01, 0.1, 0.5)), lambda: node.alive and node.leave())
            return
        delay = dice.choice((0.0, 0.01, 0.1, 0.3)) * dice.random()
        if kind == "trap":
            self._ambush(DEPARTURES)
        elif others:
            victim = node if dice.random() < 0.3 and kind != "leave" else dice.choice(others)
            swarm.world.after(
                delay, lambda: self.strike(kind, victim) if victim.alive and victim.running else None
            )
        swarm.world.after(dice.choice((0.0, 0.0, 0.1)), lambda: node.alive and node.leave())

    # Links.

    def _between(self, kind: str, node: Node, others: list[Node], lasts: float) -> None:
        if not others:
            return
        dice, swarm = self.dice, self.swarm
        far = dice.sample(others, dice.randint(1, min(len(others), FAR)))
        near = [n for n in [node, *others] if n not in far]
        if kind == "reset":
            far = far[:1]
            near = [node]
        smaller = min(near, far, key=len) if kind not in ("reset", "slow") else [*near, *far]
        self._disturb([*near, *far], struck=smaller)
        if kind in ("cut", "oneway"):
            self._part(near, far, lasts, one_way=kind == "oneway")
        elif kind == "flap":
            for number in range(dice.randint(2, 5)):
                begins = lasts * number * (0.8 + 0.4 * dice.random())
                each, way = lasts * dice.choice((0.2, 0.5, 0.9)), dice.random() < 0.8
                swarm.world.after(begins, lambda each=each, way=way: self._part(near, far, each, one_way=way))
        elif kind == "meet":
            self._meet(near, far, lasts)
        elif kind == "reset":
            for a, b in self._linked(near, far):
                swarm.reset(a, b, "connection reset")
                swarm.world.after(lasts / 5, lambda a=a, b=b: swarm.link(a, b))
        else:
            self._slow(near, far, lasts)

    def _linked(self, near: list[Node], far: list[Node]) -> list[tuple[Node, Node]]:
        return [(a, b) for a in near for b in far if a.links.get(b.me) is b]

    def _part(self, near: list[Node], far: list[Node], lasts: float, *, one_way: bool) -> None:
        """Nothing arrives from near at far, nor, unless one_way, the other way round."""
        network = self.swarm.network
        self._lasts(lasts)
        for a, b in self._linked(near, far):
            ways = [(a.me, b.me)] if one_way else [(a.me, b.me), (b.me, a.me)]
            for x, y in ways:
                network.cut(x, y)

            def mend(ways: list[tuple[Any, Any]] = ways) -> None:
                for x, y in ways:
                    network.mend(x, y)

            self.swarm.world.after(lasts, mend)

    def _slow(self, near: list[Node], far: list[Node], lasts: float) -> None:
        network = self.swarm.network
        for a, b in self._linked(near, far):
            for x, y in ((a.me, b.me), (b.me, a.me)):
                way = network.ways[x, y]
                way.chunk_seconds = 10 * way.chunk_seconds + 0.05

            def mend(a: Node = a, b: Node = b) -> None:
                for x, y in ((a.me, b.me), (b.me, a.me)):
                    network.ways[x, y].chunk_seconds = self.swarm.chunk_seconds

            self.swarm.world.after(lasts, mend)

    def _meet(self, near: list[Node], far: list[Node], lasts: float) -> None:
        """A partition that mends when somebody says something that decides, or after so long."""
        network, moment = self.swarm.network, self.dice.choice(DECISIVE)
        ways = [pair for a, b in self._linked(near, far) for pair in ((a.me, b.me), (b.me, a.me))]
        self._part(near, far, lasts, one_way=False)
        left = self.dice.randint(1, 4)

        def mends(node: Node, action: Action) -> bool:
            nonlocal left
            left -= type(action) is moment or (type(action) is Send and type(action.message) is moment)
            if left <= 0:
                for x, y in ways:
                    network.mend(x, y)
            return left <= 0

        self.swarm.traps.append(mends)

    # Traps.

    def _trap(self) -> None:
        """Strike whoever sends a message of some kind, right after it, before it tells the next."""
        dice = self.dice
        moment = dice.choice(DECISIVE if self.focused else MOMENTS)
        kind = "stop" if self.stopping else dice.choice(("crash", "crash", "stop", "cut", "reset"))
        counts = {"left": dice.randint(1, 4)}
        receiver = moment is Done and dice.random() < 0.6  # rather the leader than the member

        def trap(node: Node, action: Action) -> bool:
            if isinstance(action, Commit) and moment is Commit:
                victim = node
                if node.me != action.ballot.leader or len(action.members) == 1:
                    return False
                counts["left"] = 0
            elif isinstance(action, Send) and isinstance(action.message, moment):
                victim = self.swarm.nodes[action.peer] if receiver else node
                counts["left"] -= 1
            else:
                return False
            if counts["left"] > 0 or not victim.alive or not victim.running:
                return False
            self.strike(kind, victim)
            return True

        self.swarm.traps.append(trap)

    def _ambush(self, moments: tuple[Any, ...] = AMBUSHES) -> None:
        """One of the wide faults at a moment, to whoever speaks, to whom it speaks, or to anybody."""
        dice, swarm = self.dice, self.swarm
        moment, left = dice.choice(moments), dice.randint(1, 4) if moments is AMBUSHES else 1
        kinds = (
            *("restart", "restart", "rewire", "flap", "cut", "oneway", "reset", "depart"),
            *("leave", "stop", "crash", "withdraw"),
        )
        kind = "withdraw" if moment is Ready and dice.random() < 0.6 else dice.choice(kinds)
        whom = dice.choice(("sender", "receiver", "anybody"))

        def trap(node: Node, action: Any) -> bool:
            nonlocal left
            sends = type(action) is Send and type(action.message) is moment
            left -= type(action) is moment or sends
            if left > 0:
                return False
            victim = self._pick() if whom == "anybody" else node
            if whom == "receiver" and isinstance(action, Send):
                victim = swarm.nodes[action.peer]
            elif whom == "receiver" and isinstance(action, Handed):
                victim = action.giver
            if victim is None or not victim.alive or not victim.running:
                return False
            if kind in ("withdraw", "leave", "depart"):  # the loop does these between two events
                swarm.world.after(
                    0.0, lambda: self.strike(kind, victim) if victim.alive and victim.running else None
                )
            else:
                self.strike(kind, victim)
            return True

        swarm.traps.append(trap)


def _links(kind: str) -> Callable[[Faults, Node, list[Node], float], None]:
    return lambda faults, node, others, lasts: faults._between(kind, node, others, lasts)


STRIKES: dict[str, Callable[[Faults, Node, list[Node], float], None]] = {
    "crash": Faults._crash,
    "leave": Faults._leave,
    "stop": Faults._stop,
    "hang": Faults._hang,
    "jump": Faults._jump,
    "join": Faults._join,
    "corrupt": Faults._corrupt,
    "poison": Faults._poison,
    "restart": Faults._restart,
    "rewire": Faults._rewire,
    "withdraw": Faults._withdraw,
    "depart": Faults._depart,
    **{kind: _links(kind) for kind in ("cut", "oneway", "reset", "slow", "flap", "meet")},
}
