"""One seeded schedule: a swarm, its faults, and the verdict."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from p2pavg.rounds.machine.actions import Action, Commit, Send
from p2pavg.rounds.protocol.messages import Begin, Committed, Done, Prepare, Promise, Query, Ready
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.checks import BrokenPromiseError
from tests.simulation.jobs import SMALL
from tests.simulation.swarm import Swarm
from tests.simulation.trainer import Node

FAULTS = (
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
FAR = 7  # at most so many are cut off from the others
LIMIT_S = 120.0  # virtual seconds until everybody must have finished


@dataclass(frozen=True)
class Verdict:
    """What one schedule came to."""

    seed: int
    peers: int
    broken: str | None
    seconds: float  # virtual
    events: int
    messages: int
    commits: int
    late: int
    heals: int
    aborts: int
    failed: int
    readmitted: int
    successions: int
    longest_stall: float  # of nodes that nothing befell


class Schedule:
    """Everything follows from the seed (and the number of peers, when it is given).

    only: the one kind of fault, besides joins.
    """

    def __init__(
        self,
        seed: int,
        peers: int | None = None,
        faults: int | None = None,
        only: str | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        dice = random.Random(f"schedule {seed}")
        self.seed = seed
        self.dice = dice
        self.only = only
        self.peers = peers or dice.choice((1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 8))
        large = self.large = self.peers > SMALL
        step = 0.2 if large else dice.choice((0.03, 0.08, 0.2))
        batch = dice.choice((1, 4))
        epoch_steps = 4 if large else dice.choice((2, 4, 8))
        latency = min(dice.choice((0.0002, 0.002, 0.02, 0.05, 0.15)), step * epoch_steps / 5)
        chunk_seconds = min(dice.choice((0.0, 0.001, 0.05)), step * epoch_steps / 8) / self.peers
        self.swarm = Swarm(
            seed,
            latency=latency,
            chunk_seconds=chunk_seconds,
            target=max(1, int(batch * epoch_steps * self.peers)),
            state_seconds=dice.choice((0.01, 0.1, 1.0)),
            beat=0.5 if large else 0.25,
            trace=trace,
            through_wire=seed % 10 == 0,
            acknowledged=seed % 5 != 2,
        )
        for _ in range(self.peers):
            pace = dice.choice((1.0, 1.0, 1.0, 1.5, 4.0))
            self.swarm.add(Role.TRAINER, step * pace, batch, link=not large)
        if large:
            self.swarm.mesh()
        self.step, self.batch = step, batch
        self.focused = seed % 4 == 3  # only traps around the commit
        self.stopping = seed % 8 == 5 and self.peers > 2  # only stops, in long transfers
        if self.stopping:
            self.swarm.chunk_seconds = min(0.3, step * epoch_steps / 8) / self.peers
        self.calm_at = 0.0
        at = 0.2
        for _ in range(dice.choice((0, 1, 1, 2, 2, 3, 4)) if faults is None else faults):
            at += dice.choice((0.0, 0.05, 0.3, 1.0)) * dice.random() * 2
            kind = "trap" if self.focused or self.stopping else dice.choice(FAULTS)
            self.swarm.world.at(at, lambda kind=kind: self._befall(kind))
            self.calm_at = max(self.calm_at, at)

    def _trap(self) -> None:
        """Strike whoever sends a message of some kind, right after it, before it tells the next."""
        dice = self.dice
        moments = (Prepare, Promise, Ready, Begin, Done, Done, Committed, Committed, Commit, Commit, Query)
        moment = dice.choice(moments[4:] if self.focused else moments)
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
            self._befall(kind, victim)
            return True

        self.swarm.traps.append(trap)

    def _pick(self) -> Node | None:
        """Rather the leader: it is where it hurts."""
        nodes = [n for n in self.swarm.nodes.values() if n.alive and n.running]
        if not nodes:
            return None
        if self.dice.random() < 0.4:
            leaders = [n for n in nodes if n.machine.leader == n.me]
            nodes = leaders or nodes
        return self.dice.choice(nodes)

    def _befall(self, kind: str, node: Node | None = None) -> None:
        swarm, dice, world = self.swarm, self.dice, self.swarm.world
        if kind == "trap":
            self._trap()
            return
        if self.only is not None and kind != "join":
            kind = self.only
        node = node or self._pick()
        others = [n for n in swarm.nodes.values() if n.alive and n is not node]
        if node is None:
            return
        lasts = dice.choice((0.05, 0.3, 1.0, *(() if self.large else (2.5, 4.0)))) * (0.5 + dice.random())
        self.calm_at = max(self.calm_at, world.now + lasts)
        if kind in ("crash", "leave") and len(others) == 0:
            kind = "jump"
        swarm.checks.forks_allowed |= kind in ("stop", "cut", "oneway", "reset", "slow", "jump")
        swarm.say(f"!!! {kind} {node.name} for {lasts:.2f} s")
        if kind in ("cut", "oneway", "reset", "slow", "stop", "crash", "leave", "hang", "corrupt", "poison"):
            self._disturb([node])
        if kind == "crash":
            node.alive = False
            swarm.closed(node, "connection reset")
        elif kind == "leave":
            node.leave()
        elif kind == "stop":
            node.stop()
            world.after(lasts, node.go_on)
        elif kind == "hang":
            node.hung = True

            def wake() -> None:
                node.hung = False

            world.after(lasts, wake)
        elif kind == "jump":
            node.clock_offset += dice.choice((-3.0, 0.2, 3.0, 1000.0))
            node.disturbed_at = world.now
            node.struck = True
        elif kind == "join" and len(swarm.nodes) < self.peers + 3:
            swarm.add(Role.JOINER, self.step, self.batch)
        elif kind == "corrupt":
            swarm.corrupting.add(node.me)
        elif kind == "poison":
            node.poison = True
        elif others and kind in ("cut", "oneway", "slow", "reset"):
            far = dice.sample(others, dice.randint(1, min(len(others), FAR)))
            near = [n for n in [node, *others] if n not in far]
            if kind == "reset":
                far = far[:1]
                near = [node]
            cut_off = min(near, far, key=len) if kind in ("cut", "oneway") else [*near, *far]
            self._disturb([*near, *far], struck=cut_off)
            self._between(kind, near, far, lasts)

    def _disturb(self, nodes: list[Node], struck: list[Node] | None = None) -> None:
        """The fault may show until long after it is over. struck: of them; None: all."""
        until = self.swarm.world.now + 1e6
        for node in nodes:
            node.disturbed_at = until
        for node in nodes if struck is None else struck:
            node.struck = True

    def _between(self, kind: str, near: list[Node], far: list[Node], lasts: float) -> None:
        swarm, world = self.swarm, self.swarm.world
        network = swarm.network
        pairs = [(a, b) for a in near for b in far if b.me in a.links]
        for a, b in pairs:
            if kind == "reset":
                swarm.reset(a, b, "connection reset")
                world.after(lasts / 5, lambda a=a, b=b: swarm.link(a, b))
                continue
            ways = [(a, b)] if kind == "oneway" else [(a, b), (b, a)]
            for x, y in ways:
                way = network.ways[x.me, y.me]
                if kind == "slow":
                    way.chunk_seconds = 10 * way.chunk_seconds + 0.05
                else:
                    network.cut(x.me, y.me)

            def mend(ways: list[tuple[Node, Node]] = ways) -> None:
                for x, y in ways:
                    if kind == "slow":
                        network.ways[x.me, y.me].chunk_seconds = swarm.chunk_seconds
                    else:
                        network.mend(x.me, y.me)

            world.after(lasts, mend)

    def run(self) -> Verdict:
        """Raises nothing: a broken promise is in the verdict."""
        swarm, broken = self.swarm, None
        try:
            self._run()
        except BrokenPromiseError as found:
            broken = str(found)
        checks = swarm.checks
        return Verdict(
            seed=self.seed,
            peers=self.peers,
            broken=broken,
            seconds=swarm.world.now,
            events=swarm.world.events,
            messages=swarm.messages,
            commits=checks.commits,
            late=checks.late,
            heals=checks.heals,
            aborts=checks.aborts,
            failed=checks.failed,
            readmitted=checks.readmitted,
            successions=checks.successions,
            longest_stall=max(node.longest_stall for node in swarm.nodes.values()),
        )

    def _run(self) -> None:
        swarm = self.swarm
        # Through the faults, then to rest: one more epoch for everybody that lives.
        while True:
            calm = self.calm_at
            swarm.world.run(calm + 1e-3, lambda: False)
            if self.calm_at == calm:
                break
        goal = 1 + max((n.machine.epoch for n in swarm.nodes.values() if n.alive), default=0)

        def finished() -> bool:
            if all(not n.alive or swarm.checks.orphaned(n) for n in swarm.nodes.values()):
                return True
            for node in swarm.nodes.values():
                if node.alive and (node.parameters.epoch < goal or node.machine.role is not Role.TRAINER):
                    return False
            return not swarm.checks.strays([node for node in swarm.nodes.values() if node.alive])

        swarm.world.run(calm + LIMIT_S, finished)
        if any(n.alive for n in swarm.nodes.values()):
            swarm.checks.at_the_end(goal)
