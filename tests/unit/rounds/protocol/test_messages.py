"""The rounds' control messages: what goes out comes in, and nothing else gets in."""

from __future__ import annotations

import random
from dataclasses import field, fields, make_dataclass
from typing import Any, get_args

import msgpack
import pytest

from p2pavg.errors import ProtocolError
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.protocol import messages as m
from p2pavg.rounds.protocol import wire
from p2pavg.rounds.protocol.ballot import Ballot, Held, Stage
from p2pavg.rounds.protocol.causes import Cause, Objection

PEER, OTHER, LINEAGE, DIGEST = b"a" * 20, b"b" * 20, b"l" * 32, b"d" * 32
BALLOT = Ballot(7, 2, PEER, 5, LINEAGE)
HELD = Held(BALLOT, Stage.DONE, True, (DIGEST,), (PEER, OTHER), (1.0, 2.5), (1, 2))
VALUES: dict[str, Any] = {
    "int": 3,
    "Signed": -3,
    "float": 0.5,
    "bool": True,
    "str": "because",
    "Objection": Objection.BUSY,
    "Cause": Cause.MUTE,
    "Lineage": LINEAGE,
    "Note": b"note",
    "PeerId": PEER,
    "bytes": DIGEST,
    "PeerId | None": OTHER,
    "Ballot": BALLOT,
    "Ballot | None": BALLOT,
    "Held | None": HELD,
    "tuple[Held, ...]": (HELD, HELD),
    "tuple[PeerId, ...]": (PEER, OTHER),
    "tuple[bool, ...]": (True, False),
    "tuple[int, ...]": (3, 0),
    "tuple[float, ...]": (3.0, 0.0),
    "tuple[bytes, ...]": (DIGEST,),
    "tuple[tuple[PeerId, float, float], ...]": ((b"a" * 20, 1e9, 0.1),),
    "Plan": Plan((Part(0, 0, 5), Part(0, 5, 2))),
}


def example(kind: type[Any]) -> Any:
    return kind(**{field.name: VALUES[str(field.type)] for field in fields(kind)})


EXAMPLES = [example(kind) for kind in get_args(m.Message)]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_msgpack(message: m.Message) -> None:
    """Every message type comes back equal after to_dict, msgpack and from_dict."""
    packed = msgpack.packb(wire.to_dict(message))
    assert wire.from_dict(msgpack.unpackb(packed)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_missing_or_surplus_field_is_refused(message: m.Message) -> None:
    """Fields are exactly those of the type: one less or one more is a ProtocolError."""
    data = wire.to_dict(message)
    for name in data:
        with pytest.raises(ProtocolError):
            wire.from_dict({key: value for key, value in data.items() if key != name})
    with pytest.raises(ProtocolError):
        wire.from_dict({**data, "more": 1})


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_peers_of_two_minor_versions_understand_each_other(
    message: m.Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that knows one field more is understood, and understands one that does not know it.

    Within one minor version it is an error to lack the field, or to send one that is not known.
    """
    kind = type(message)
    known = [(each.name, each.type) for each in fields(kind)]
    later = make_dataclass(kind.__name__, [*known, ("more", "int", field(default=7))])
    sent = wire.to_dict(message)
    values = {each.name: getattr(message, each.name) for each in fields(kind)}
    assert wire.from_dict({**sent, "more": 5}, newer=True) == message
    with pytest.raises(ProtocolError, match="surplus"):
        wire.from_dict({**sent, "more": 5}, older=True)
    monkeypatch.setitem(wire.FORMS, kind.__name__.lower(), wire.form(later))
    assert wire.from_dict(sent, older=True) == later(**values)
    assert wire.from_dict({**sent, "more": 5}, older=True) == later(**values, more=5)
    for sender in ({}, {"newer": True}):
        with pytest.raises(ProtocolError, match="lacks more"):
            wire.from_dict(sent, **sender)
    name = known[0][0]
    with pytest.raises(ProtocolError, match=f"lacks {name}"):  # only what is optional may be missing
        wire.from_dict({key: value for key, value in sent.items() if key != name}, older=True)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_wrong_values_raise_nothing_but_protocol_errors(message: m.Message) -> None:
    """Any junk in any field is either refused with ProtocolError or makes a message that is well typed."""
    dice = random.Random(type(message).__name__)
    junk = [
        None,
        -1,
        2**63,
        1.5,
        float("nan"),
        float("inf"),
        "x" * 500,
        b"",
        b"z" * 21,
        b"n" * 70_000,
        [],
        [1],
        [[1]],
        {},
        True,
    ]
    data = wire.to_dict(message)
    for name in data:
        for value in junk:
            changed = {**data, name: value}
            if dice.random() < 0.3:
                changed[dice.choice(list(data))] = dice.choice(junk)
            try:
                accepted = wire.from_dict(changed)
            except ProtocolError:
                continue
            assert wire.from_dict(wire.to_dict(accepted)) == accepted


@pytest.mark.parametrize(
    "change",
    [
        {"members": [PEER, PEER]},
        {"voters": [True]},
        {"members": [OTHER, b"c" * 20]},
        {"plan": [[[0, 1, 5, [], False]], [], False]},  # a gap
        {"plan": [[[1, 0, 5, [], False]], [], False]},  # the owner does not vote
        {"plan": [[[9, 0, 5, [], False]], [], False]},
        {"plan": [[[0, 0, 5, [1], False]], [1, 2], False]},  # the deputy does not vote
        {"plan": [[[0, 0, 5, [0], False]], [1, 2], False]},  # it owns the part
        {"voters": [True, True], "plan": [[[0, 0, 5, [1], False]], [], False]},  # no groups
        {"plan": [[[0, 0, 5, [], True]], [1, 2], False]},  # it swaps with nobody
        {"members": [PEER] * 2000},
    ],
)
def test_a_group_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    """Members must be distinct, contain the leader, and own parts that follow each other without gap; who
    owns a part or is a deputy votes; who swaps does so with one deputy.
    """
    data = wire.to_dict(example(m.Prepare))
    wire.from_dict(data)
    wire.from_dict({**data, "plan": [[[0, 0, 5, [], False]], [], False]})
    swapped = [[[0, 0, 5, [1], True]], [1, 2], False]
    assert wire.from_dict({**data, "voters": [True, True], "plan": swapped})
    with pytest.raises(ProtocolError):
        wire.from_dict({**data, **change})


def test_a_round_without_any_weight_is_refused() -> None:
    """A BEGIN in which all weights are 0 never gets in."""
    data = wire.to_dict(example(m.Begin))
    with pytest.raises(ProtocolError):
        wire.from_dict({**data, "weights": [0.0, 0.0]})


def test_an_unknown_type_is_refused() -> None:
    """The type must be one of ours, and a string."""
    for name in ("nothing", 5, None, b"progress"):
        with pytest.raises(ProtocolError):
            wire.from_dict({"t": name})


def test_ballots_are_totally_ordered() -> None:
    """Epoch first, then attempt, then leader, then which of the leader's ballots."""
    ballots = [
        Ballot(*numbers, LINEAGE)
        for numbers in ((2, 0, PEER, 0), (1, 1, PEER, 0), (1, 0, OTHER, 0), (1, 0, PEER, 1), (1, 0, PEER, 0))
    ]
    assert sorted(ballots) == ballots[::-1]


def test_transfers_differ_by_lineage_and_ballot() -> None:
    """The data of two attempts, or of two histories, can never be taken for each other."""
    ids = {
        Ballot(e, a, p, serial, lineage).transfer
        for e in range(3)
        for a in range(3)
        for p in (PEER, OTHER)
        for serial in (0, 2**61)
        for lineage in (LINEAGE, DIGEST)
    }
    assert len(ids) == 72
    assert all(0 <= i < 2**63 for i in ids)
