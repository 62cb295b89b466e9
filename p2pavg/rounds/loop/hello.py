"""Where a peer says that it stands when it makes a link: the rounds' part of its hello."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2pavg.rounds.machine.events import PeerUp
from p2pavg.rounds.protocol.ballot import LINEAGE_BYTES, PEER_ID_BYTES, PeerId
from p2pavg.rounds.protocol.fields import boolean, integer, optional, sized, text
from p2pavg.rounds.protocol.roles import Role

_lineage, _leader = sized(LINEAGE_BYTES), optional(sized(PEER_ID_BYTES))
_ROLES = {role.value for role in (Role.TRAINER, Role.JOINER)}


def trains(facts: Mapping[str, Any]) -> bool:
    """Whether it takes part in rounds. facts: of its hello."""
    role = facts.get("role")
    return isinstance(role, str) and role in _ROLES


def vet(facts: Mapping[str, Any]) -> None:
    """Raises ProtocolError when it takes part, and does not say properly where it stands."""
    if trains(facts):
        introduced(bytes(PEER_ID_BYTES), facts, 0.0)


def introduced(peer: PeerId, facts: Mapping[str, Any], rtt_s: float, *, relayed: bool = False) -> PeerUp:
    """What the rounds are told of a new link. relayed: a third member carries it. Raises ProtocolError."""
    return PeerUp(
        peer=peer,
        epoch=integer(facts.get("epoch")),
        lineage=_lineage(facts.get("lineage")),
        role=Role(facts["role"]),
        client_only=boolean(facts.get("client_only", False)),
        total_samples=integer(facts.get("total", 0)),
        leader=_leader(facts.get("leader") or None),
        rtt_s=rtt_s,
        relayed=relayed,
        region=text(facts.get("region", "")),
    )
