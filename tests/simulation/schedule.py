"""One seeded schedule: a swarm, its faults, and the verdict."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from p2pavg.rounds.machine.rules.spacing import Spacing
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.checks import BrokenPromiseError
from tests.simulation.faults import PLAIN, WIDE, Faults
from tests.simulation.jobs import SMALL
from tests.simulation.swarm import Swarm

LIMIT_S = 120.0  # virtual seconds until everybody must have finished
DRAWN_S = 600.0  # until all that is left of a pass must be averaged, were it by one peer
SPACED = 16  # in every so-manieth schedule, rounds are a second apart at least
WHOLE = 4  # in every so-manieth schedule, all that was drawn under faults must be averaged at the end


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

    only: the one kind of fault, besides joins. plain: without the rarer faults, and in an even run. shared:
    except in plain and large ones, the peers share data out.
    """

    def __init__(
        self,
        seed: int,
        peers: int | None = None,
        only: str | None = None,
        plain: bool = False,
        trace: Callable[[str], None] | None = None,
        *,
        shared: bool = True,
    ) -> None:
        dice = random.Random(f"schedule {seed}")
        self.seed = seed
        self.peers = peers or dice.choice((1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 8))
        wider = None if plain or only is not None else random.Random(f"wider {seed}")
        if wider is not None and peers is None and wider.random() < 0.3:
            self.peers = wider.choice((5, 6, 7))
        large = self.peers > SMALL
        step = 0.2 if large else dice.choice((0.03, 0.08, 0.2))
        batch = dice.choice((1, 4))
        epoch_steps = 4 if large else dice.choice((2, 4, 8))
        if wider is not None and self.peers > 4:  # an epoch of many peers costs more to simulate
            step, epoch_steps = max(step, 0.08), max(epoch_steps, 4)
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
            weighted=wider is not None and wider.random() < 0.25,
            wide=wider is not None,
            data=None
            if wider is None or large or not shared
            else self._shared_out(batch * epoch_steps * self.peers),
        )
        if wider is not None and seed % SPACED == 11:  # rounds that would cost too much
            self.swarm.spacing = lambda members: Spacing(0.01, 36.0)
        for _ in range(self.peers):
            pace = dice.choice((1.0, 1.0, 1.0, 1.5, 4.0))
            self.swarm.add(Role.TRAINER, step * pace, batch, link=not large)
        if large:
            self.swarm.mesh()
        self.faults = faults = Faults(self.swarm, dice, peers=self.peers, large=large)
        faults.only = only
        faults.focused = seed % 4 == 3
        faults.stopping = seed % 8 == 5 and self.peers > 2  # in long transfers
        if faults.stopping:
            self.swarm.chunk_seconds = min(0.3, step * epoch_steps / 8) / self.peers
        traps = faults.focused or faults.stopping
        self._strikes(dice, (0, 1, 1, 2, 2, 3, 4), ("trap",) if traps else PLAIN)
        if wider is not None:
            if not large:
                faults.lasts = (0.05, 0.3, 0.3, 1.0, 1.0, 2.5, 4.0)
            self._strikes(wider, (0, 1, 1, 2, 3), WIDE)
            for node in self.swarm.lives:
                node.idles = 0.3 if wider.random() < 0.1 else 0.0

    def _shared_out(self, target: int) -> tuple[int, int]:
        """Positions of a pass, and of a block."""
        dice = random.Random(f"data {self.seed}")
        return max(1, dice.choice((target // 2, 3 * target, 20 * target + 1))), dice.choice((1, 3, 16))

    def _strikes(self, dice: random.Random, counts: tuple[int, ...], kinds: tuple[str, ...]) -> None:
        faults, at = self.faults, 0.2
        for _ in range(dice.choice(counts)):
            at += dice.choice((0.0, 0.05, 0.3, 1.0)) * dice.random() * 2
            kind = dice.choice(kinds) if len(kinds) > 1 else kinds[0]
            self.swarm.world.at(at, lambda kind=kind: faults.strike(kind))
            faults.calm_at = max(faults.calm_at, at)

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
            calm = self.faults.calm_at
            swarm.world.run(calm + 1e-3, lambda: False)
            if self.faults.calm_at == calm:
                break
        goal = 1 + max((n.machine.epoch for n in swarm.nodes.values() if n.alive), default=0)

        positions = swarm.checks.positions if self.seed % WHOLE == 0 else None
        least = 0 if positions is None else positions.drawn

        def finished() -> bool:
            if all(not n.alive or swarm.checks.orphaned(n) for n in swarm.nodes.values()):
                return True
            for node in swarm.nodes.values():
                if node.alive and (node.parameters.epoch < goal or node.machine.role is not Role.TRAINER):
                    return False
            living = [node for node in swarm.nodes.values() if node.alive]
            return not swarm.checks.strays(living)

        def drawn() -> bool:
            living = [n for n in swarm.nodes.values() if n.alive and not swarm.checks.orphaned(n)]
            return positions is None or not any(
                positions.missing(n.parameters.lineage, least) for n in living
            )

        swarm.world.run(calm + LIMIT_S, lambda: finished() and drawn(), look_every=8)
        if any(n.alive for n in swarm.nodes.values()):
            swarm.checks.at_the_end(goal)
            if positions is not None:
                swarm.world.run(calm + DRAWN_S, drawn, look_every=8)
                positions.at_the_end(least)
