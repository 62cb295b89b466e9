"""Swarms without random faults, for tests that look at one thing."""

from __future__ import annotations

from collections.abc import Callable

from p2pavg.rounds.machine.actions import Action, Trace
from p2pavg.rounds.machine.memory.config import Spaced
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.swarm import Swarm
from tests.simulation.trainer import Node


class Calm:
    """A swarm that a test disturbs itself, and what its machines traced: (time, node, kind)."""

    def __init__(
        self,
        peers: int,
        *,
        latency: float = 0.0001,
        step: float = 0.02,
        batch: int = 4,
        target: int | None = None,
        chunk_seconds: float = 0.0,
        slow: float = 1.0,
        spacing: Spaced | None = None,
    ) -> None:
        self.swarm = Swarm(
            1,
            latency=latency,
            chunk_seconds=chunk_seconds,
            target=target or batch * peers * 10,
            state_seconds=0.05,
            beat=0.1,
        )
        self.swarm.spacing = spacing
        self.traced: list[tuple[float, Node, Trace]] = []
        acted = self.swarm.acted

        def record(node: Node, action: Action) -> None:
            acted(node, action)
            if isinstance(action, Trace):
                self.traced.append((self.swarm.world.now, node, action))

        self.swarm.acted = record  # type: ignore[method-assign]
        self.nodes = [
            self.swarm.add(Role.TRAINER, step * (slow if number == peers - 1 else 1.0), batch)
            for number in range(peers)
        ]

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        self.swarm.world.run(self.swarm.world.now + seconds, until)

    def epochs(self, count: int, limit: float = 60.0) -> None:
        """Until all that live and run stand at epoch `count` or later."""

        def there() -> bool:
            return all(n.parameters.epoch >= count for n in self.nodes if n.alive and n.running)

        self.run(limit, there)
        if not there():
            self.swarm.checks.broken("Live", f"not everybody reached epoch {count} within {limit:.0f} s")

    def times(self, kind: str, epoch: int) -> list[float]:
        """When this was traced in this epoch, in order."""
        return [at for at, _, trace in self.traced if trace.kind == kind and trace.fields["epoch"] == epoch]

    def transferring(self) -> bool:
        """A round is under way, and nobody is through."""
        jobs = [job for node in self.nodes for job in node.jobs.values()]
        return any(job.begun for job in jobs) and not any(job.done for job in jobs)

    @property
    def leader(self) -> Node:
        return next(n for n in self.nodes if n.alive and n.running and n.machine.leader == n.me)
