"""How a peer enters the rounds of its run: first links, its role, its state machine, and early messages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from p2pavg import codecs
from p2pavg.allreduce.choosing import swaps_of
from p2pavg.errors import ProtocolError
from p2pavg.membership import View
from p2pavg.peer import advice
from p2pavg.peer.dialling import Dialler
from p2pavg.peer.refusals import LinkRefusals
from p2pavg.peer.settings import DEFAULT_PORT, Settings
from p2pavg.rounds.loop.planning import Planner
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.machine.rules.notes import of_leader
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.training import RunStart, TrainingSpec
from p2pavg.transport.links import handshake
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.link import Link

EARLY_BYTES = 1 << 20  # of messages that wait for the start of the rounds


async def first_links(
    dialler: Dialler, refusals: LinkRefusals, endpoint: Endpoint, view: View, settings: Settings
) -> None:
    """Link to the trainers in view.

    Raises what the members said to this peer when they refused it.
    """
    named = settings.initial_addresses if settings.membership is None else ()
    async with advice.asking_whether_closed(named, settings.run_id) as refused:
        await dialler.first_links(lambda: bool(refusals.met))
    refusals.met += refused
    if not endpoint.links and not refusals.met:
        refusals.met += refusals.distrusted or await advice.ask(
            endpoint, settings.initial_addresses, settings.run_id
        )
    if refusals.met:
        raise refusals.met[0]
    if not endpoint.links and not settings.initial_addresses and settings.port_is_default:
        before = range(DEFAULT_PORT, endpoint.port)
        await advice.warn_of_run_beside(before, settings.run_id, closed=settings.membership is not None)
    trainers = [info for info in view.peers.values() if info.role == "trainer"]
    regions = [settings.region or "", *(info.region for info in trainers)]
    advice.check_room(settings, regions)


def role_among(links: Iterable[Link], start: RunStart) -> Role:
    """JOINER when a linked peer stands further than `start`, though it may download a later state itself, or
    when a trainer began from another state; else TRAINER.
    """
    for link in links:
        facts = link.hello
        trains = facts.get("role") == Role.TRAINER.value
        if not trains and facts.get("role") != Role.JOINER.value:
            continue
        elsewhere = trains and start.epoch == 0 and facts["lineage"] != start.lineage
        if facts["epoch"] > start.epoch or elsewhere:
            return Role.JOINER
    return Role.TRAINER


def build_machine(
    settings: Settings, me: bytes, spec: TrainingSpec, start: RunStart, role: Role, *, client_only: bool
) -> tuple[Machine, Planner]:
    """The state machine of the rounds, as it stands when this peer enters, and what plans its rounds."""
    contribution = codecs.get(spec.compression)
    result = codecs.for_results(contribution)
    prices = settings.price_table
    planner = Planner(
        lambda: spec.exact(machine.epoch) or spec.numel,
        lambda numel: 4 * numel if spec.exact(machine.epoch) else result.encoded_size(numel),
        settings.topology,
        None if prices is None else prices.between,
        codecs.is_sparse(result),
        math.inf if spec.egress_usd_per_hour is None else spec.egress_usd_per_hour,
        swaps_of(contribution, result),
    )
    machine = Machine(
        Config(
            me=me,
            run_id=settings.run_id,
            epoch=start.epoch,
            lineage=start.lineage,
            history=start.history,
            role=role,
            target=spec.target_batch_size,
            plan=planner,
            spacing=None if spec.egress_usd_per_hour is None else planner.spacing,
            region=settings.region or "",
            client_only=client_only,
            weighted=spec.weighted,
            combine=of_leader if spec.drawing is None else spec.drawing.combine,
            lockstep=spec.lockstep,
            life=time.time_ns(),
        ),
        time.monotonic(),
    )
    return machine, planner


class EarlyMessages:
    """Messages of peers that were faster than this one's start, in order, at most EARLY_BYTES of them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Link, dict[str, Any]]] = []
        self._bytes = 0

    def add(self, link: Link, message: dict[str, Any]) -> None:
        """Keep a message until the rounds start, unless EARLY_BYTES are kept already."""
        self._bytes += len(handshake.pack(message))
        if self._bytes <= EARLY_BYTES:
            self._waiting.append((link, message))

    def deliver(self, links: Mapping[bytes, Link], deliver: Callable[[Link, dict[str, Any]], None]) -> None:
        """Hand on the messages whose links are still up, and close a link whose message is malformed."""
        waiting, self._waiting = self._waiting, []
        for link, message in waiting:
            if links.get(link.peer_id) is not link:
                continue
            try:
                deliver(link, message)
            except ProtocolError as error:
                link.close(str(error))
