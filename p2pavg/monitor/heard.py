"""Events of a member's rounds in messages to watchers, parsed strictly. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2pavg.report.parsing import Malformed, count, peer_id, text


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """One event in a member's rounds."""

    kind: str
    epoch: int
    peer: bytes | None
    why: str
    number: int  # how many contribute to a round, or the epoch of a state, by kind of event
    final: bool
    attempt: int = 0


def event(message: Mapping[str, Any]) -> MemberEvent | None:
    """Parse {"t": "event", "kind": ..., "fields": {...}}. None: no correct peer sends this."""
    fields = message.get("fields")
    try:
        if not isinstance(fields, dict):
            return None
        peer = fields.get("peer", fields.get("leader"))
        number = fields.get("contributors", fields.get("to", 0))
        return MemberEvent(
            text(message.get("kind")),
            count(fields.get("epoch")),
            None if peer is None else peer_id(peer),
            text(fields.get("why", "")),
            count(number),
            fields.get("final") is True,
            count(fields.get("attempt", 0)),
        )
    except Malformed:
        return None
