"""Measurements of links, which each peer tells the leader, and by which the leader plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.events import LinksMeasured
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.messages import Links
from p2pavg.rounds.protocol.roles import LinkFacts

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


class Measurements:
    """Tells each leader of this peer's links, once for each measurement."""

    def __init__(self, machine: Machine) -> None:
        self.core = machine.core
        self._told: tuple[object, Mapping[PeerId, LinkFacts]] | None = None

    def on_measured(self, event: LinksMeasured) -> None:
        """Something new was measured of this peer's links."""
        self.core.own.measured_links(event.links)

    def on_links(self, peer: PeerId, message: Links) -> None:
        """Keep what another peer measured."""
        facts = self.core.linked.get(peer)
        if facts is not None:
            facts.links = {other: LinkFacts(bps, rtt_s) for other, bps, rtt_s in message.links}

    def consider(self) -> None:
        """Called after every event: does the present leader know what this peer measured?"""
        core, links = self.core, self.core.own.links
        leader = core.leader() if links else None
        facts = core.linked.get(leader) if leader is not None else None
        if leader is None or facts is None:
            return
        told = self._told
        if told is not None and told[0] is facts and told[1] is links:  # a new link has other facts
            return
        self._told = facts, links
        rows = tuple((peer, link.bps, link.rtt_s) for peer, link in links.items())
        core.send(leader, Links(rows))
