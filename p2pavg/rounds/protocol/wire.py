"""How control messages travel: a strict translation from and to dicts that msgpack carries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.protocol.ballot import (
    DIGEST_BYTES,
    LINEAGE_BYTES,
    PEER_ID_BYTES,
    Ballot,
    Held,
    PeerId,
    Stage,
)
from p2pavg.rounds.protocol.causes import Cause, Objection
from p2pavg.rounds.protocol.fields import (
    Check,
    boolean,
    integer,
    items,
    listed,
    malformed,
    note,
    number,
    optional,
    signed,
    sized,
    text,
)
from p2pavg.rounds.protocol.messages import Begin, Committed, Departing, Message, Prepare

_peer = sized(PEER_ID_BYTES)
_lineage = sized(LINEAGE_BYTES)
_digest = sized(DIGEST_BYTES)


def _ballot(value: Any) -> Ballot:
    epoch, attempt, leader, serial, lineage = items(value, 5)
    return Ballot(integer(epoch), integer(attempt), _peer(leader), integer(serial), _lineage(lineage))


def _stage(value: Any) -> Stage:
    try:
        return Stage(text(value))
    except ValueError:
        raise malformed("an unknown stage") from None


def _objection(value: Any) -> Objection:
    try:
        return Objection(value)
    except ValueError:
        raise malformed("an unknown objection") from None


def _cause(value: Any) -> Cause:
    try:
        return Cause(value)
    except ValueError:
        raise malformed("an unknown cause") from None


def _held(value: Any) -> Held:
    ballot, stage, begun, digests, voters, weights, samples = items(value, 7)
    return Held(
        _ballot(ballot),
        _stage(stage),
        boolean(begun),
        listed(_digest)(digests),
        listed(_peer)(voters),
        listed(number)(weights),
        listed(integer)(samples),
    )


def _part(value: Any) -> Part:
    owner, start, count, deputies, swaps = items(value, 5)
    return Part(integer(owner), integer(start), integer(count), listed(integer)(deputies), boolean(swaps))


def _plan(value: Any) -> Plan:
    parts, groups, gathers = items(value, 3)
    return Plan(listed(_part)(parts), listed(integer)(groups), boolean(gathers))


def _link(value: Any) -> tuple[PeerId, float, float]:
    peer, bps, rtt_s = items(value, 3)
    return _peer(peer), number(bps), number(rtt_s)


_CHECKS: Mapping[str, Check] = {
    "int": integer,
    "Signed": signed,
    "float": number,
    "bool": boolean,
    "str": text,
    "Lineage": _lineage,
    "Note": note,
    "Objection": _objection,
    "Cause": _cause,
    "PeerId": _peer,
    "PeerId | None": optional(_peer),
    "bytes": _digest,
    "Ballot": _ballot,
    "Ballot | None": optional(_ballot),
    "Held | None": optional(_held),
    "tuple[Held, ...]": listed(_held),
    "tuple[PeerId, ...]": listed(_peer),
    "tuple[bool, ...]": listed(boolean),
    "tuple[int, ...]": listed(integer),
    "tuple[float, ...]": listed(number),
    "tuple[bytes, ...]": listed(_digest),
    "Plan": _plan,
    "tuple[tuple[PeerId, float, float], ...]": listed(_link),
}


def _ballot_row(ballot: Ballot | None) -> tuple[Any, ...] | None:
    if ballot is None:
        return None
    return ballot.epoch, ballot.attempt, ballot.leader, ballot.serial, ballot.lineage


def _held_row(held: Held | None) -> tuple[Any, ...] | None:
    if held is None:
        return None
    ballot, stage = _ballot_row(held.ballot), held.stage.value
    return ballot, stage, held.begun, held.digests, held.voters, held.weights, held.samples


def _plan_row(plan: Plan) -> tuple[Any, ...]:
    parts = [(part.owner, part.start, part.count, part.deputies, part.swaps) for part in plan.parts]
    return parts, plan.groups, plan.gathers


# Types of fields that msgpack does not carry as they are; it carries tuples as lists.
_ROWS: Mapping[str, Callable[[Any], Any]] = {
    "Ballot": _ballot_row,
    "Ballot | None": _ballot_row,
    "Held | None": _held_row,
    "tuple[Held, ...]": lambda helds: [_held_row(held) for held in helds],
    "Plan": _plan_row,
}


@dataclass(frozen=True, slots=True)
class Form:
    """How a kind of message travels."""

    kind: type[Any]
    checks: tuple[tuple[str, Check], ...]
    rows: tuple[tuple[str, Callable[[Any], Any]], ...]  # the fields that are made rows
    optional: frozenset[str]  # fields with a default, which a later minor version added


def form(kind: type[Any]) -> Form:
    """The form of a message's dataclass."""
    known = fields(kind)
    checks = tuple((field.name, _CHECKS[str(field.type)]) for field in known)
    rows = tuple((field.name, _ROWS[str(field.type)]) for field in known if str(field.type) in _ROWS)
    return Form(kind, checks, rows, frozenset(field.name for field in known if field.default is not MISSING))


FORMS: dict[str, Form] = {kind.__name__.lower(): form(kind) for kind in get_args(Message)}
NAMES = frozenset(FORMS)  # the values of "t" that belong to the rounds


def to_dict(message: Message) -> dict[str, Any]:
    """The message as a dict that msgpack carries."""
    name = type(message).__name__.lower()
    known = FORMS[name]
    data: dict[str, Any] = {field: getattr(message, field) for field, _ in known.checks}
    for field, row in known.rows:
        data[field] = row(data[field])
    data["t"] = name
    return data


def from_dict(data: Mapping[Any, Any], *, newer: bool = False, older: bool = False) -> Message:
    """The message, or ProtocolError: unknown type, missing or surplus fields, wrong types or sizes.

    newer: the sender is of a later minor version; fields that are unknown here are left out. older: the
    sender is of an earlier minor version; fields that the sender does not know have their default.
    """
    name = data.get("t")
    known = FORMS.get(name) if type(name) is str else None
    if known is None:
        raise malformed("an unknown type")
    values = {field: check(data[field]) for field, check in known.checks if field in data}
    if len(values) < len(known.checks):
        missing = {field for field, _ in known.checks} - values.keys()
        if not (older and missing <= known.optional):
            raise malformed(f"{known.kind.__name__} lacks {sorted(missing)[0]}")
    if len(data) > len(values) + 1 and not newer:
        raise malformed(f"surplus fields in {known.kind.__name__}")
    message: Message = known.kind(**values)
    _consistent(message)
    return message


def digest_of(message: Begin) -> bytes:
    """32 bytes by which two members compare what each was told of one round."""
    return hashlib.sha256(repr(message).encode()).digest()


def _consistent(message: Message) -> None:
    """Check that lengths inside one message agree."""
    if isinstance(message, Prepare):
        count = len(message.members)
        if not 1 <= count == len(message.voters) or len(set(message.members)) != count:
            raise malformed("the members of a group are not distinct, or not matched by their votes")
        why = message.plan.why_not(message.voters)
        if why is not None:
            raise malformed(why)
        if message.ballot.leader not in message.members:
            raise malformed("the leader is no member of its own group")
    if isinstance(message, Departing) and len(message.held) > 2:
        raise malformed("a departing peer tells of more than two ballots")
    if isinstance(message, (Begin, Committed)) and len(message.weights) != len(message.samples):
        raise malformed("weights and samples differ in number")
    if isinstance(message, Begin) and len(message.waits) != len(message.weights):
        raise malformed("weights and waits differ in number")
    if isinstance(message, Begin) and not any(weight > 0 for weight in message.weights):
        raise malformed("a round in which nobody has a weight cannot begin")
