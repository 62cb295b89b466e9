"""What others see of this peer once it trains: its hello on new links, and its record in the table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from p2pavg import codecs, outline
from p2pavg.membership import PeerInfo, View
from p2pavg.membership.table.address import Address
from p2pavg.peer.settings import Settings
from p2pavg.report import RoundReport
from p2pavg.report.compact import CompactReport
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.training import RunStart, TrainingSpec

ANNOUNCE_INTERVAL_S = 1.0


def enter(hello: dict[str, Any], spec: TrainingSpec, start: RunStart) -> None:
    """Say in a peer's hello that it trains in the run, what, and from where on."""
    # Calls of `Peer.all_reduce` say each for itself how many they wait for.
    target = (
        {} if spec.weighted else {"target_batch_size": "step" if spec.lockstep else spec.target_batch_size}
    )
    hello.update(
        schema=spec.schema,
        outline=outline.pack(spec.outline),
        terms={
            **target,
            "compression": codecs.label(codecs.get(spec.compression)),
            "model": ", ".join(spec.describe) or f"{spec.numel} values",
            **spec.terms,
        },
        epoch=start.epoch,
        lineage=start.lineage,
        role=Role.TRAINER.value,
        total=start.history[-1].total if start.history else 0,
        leader=b"",
    )


def stand(hello: dict[str, Any], machine: Machine) -> None:
    """Say in a peer's hello where it stands now."""
    hello.update(
        epoch=machine.epoch,
        lineage=machine.lineage,
        role=machine.role.value,
        total=machine.total_samples,
        leader=machine.leader or b"",
    )


def record_of(
    peer_id: bytes,
    settings: Settings,
    addresses: Sequence[Address],
    machine: Machine,
    spec: TrainingSpec,
    last: RoundReport | None,
    *,
    client_only: bool,
) -> PeerInfo:
    """What this peer says of itself in the table. last: the newest report."""
    measured = last is not None and last.seconds_total
    return PeerInfo(
        peer_id=peer_id,
        addresses=tuple(addresses),
        client_only=client_only,
        region=settings.region or "",
        epoch=machine.epoch,
        lineage=machine.lineage,
        role="trainer",
        model=spec.schema,
        samples_per_second=last.local_samples / last.seconds_total if last and measured else 0.0,
        report=b"" if last is None else CompactReport.of(last).encode(),
        name=settings.label,
        joining=machine.role is Role.JOINER,
    )


class Announcer:
    """Keeps this peer's record in the table up to date, at most one announcement a second."""

    def __init__(self, view: View, record: Callable[[], PeerInfo]) -> None:
        self._view = view
        self._record = record
        self._task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """The record differs from what was announced."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._announce())

    async def _announce(self) -> None:
        announced = None
        while (record := self._record()) != announced:
            announced = record
            await self._view.announce(record)
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    def close(self) -> None:
        """Announce no more."""
        if self._task is not None:
            self._task.cancel()
