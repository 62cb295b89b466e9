"""What travels between peers, from the structs, enums and dataclasses that carry it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import struct
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import p2pavg
from p2pavg.identity import Identity
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.table import record, wire
from p2pavg.report.compact import CompactReport
from p2pavg.report.status import LinkSeen, Other, Status
from p2pavg.rounds.protocol import messages
from p2pavg.rounds.protocol.ballot import Held
from p2pavg.transport import frames
from p2pavg.transport.links import handshake, proofs
from pages import words
from pages.markdown import table


class Untold(Exception):
    """The code sends something that `words` does not tell of, or the reverse."""


def same(what: str, sent: set[str], told: set[str]) -> None:
    """Raises Untold unless both name the same."""
    if sent - told:
        raise Untold(f"pages/words.py does not tell of {what}: {', '.join(sorted(sent - told))}")
    if told - sent:
        raise Untold(f"pages/words.py tells of {what} that nobody sends: {', '.join(sorted(told - sent))}")


# ------------------------------------------------------------------------------------------------- structs


def layout(packed: struct.Struct, told: Sequence[tuple[str, str]]) -> str:
    """Offset, type, name and meaning of each field."""
    names = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "f": "f32"}
    order, text = packed.format[0], packed.format[1:]
    rows, at = [], 0
    kinds = [
        (f"{count}s", int(count)) if code == "s" else (code, 0)
        for count, code in re.findall(r"(\d*)([a-zA-Z])", text)
        for _ in range(1 if code == "s" else int(count or 1))
    ]
    if len(kinds) != len(told):
        raise Untold(f"pages/words.py tells of {len(told)} fields where {packed.format!r} has {len(kinds)}")
    for (kind, size), (name, meaning) in zip(kinds, told, strict=True):
        rows.append([str(at), f"{size} bytes" if size else names[kind], f"`{name}`", meaning])
        at += size or struct.calcsize(f"={kind}")
    ends = {"<": "little", ">": "big"}[order]
    return table(["at", "type", "field", "meaning"], rows) + f"\n{at} bytes, {ends}-endian.\n"


# --------------------------------------------------------------------------------------------- dataclasses


def fields(kind: type[Any]) -> Iterator[tuple[str, str, str]]:
    """(name, type, comment) of each field of a dataclass, from its source."""
    source = textwrap.dedent(inspect.getsource(kind))
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    last = definition.lineno
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            end = node.end_lineno or node.lineno
            words_of = [comments[line] for line in range(last + 1, end + 1) if line in comments]
            yield node.target.id, ast.unparse(node.annotation), " ".join(words_of)
        last = node.end_lineno or node.lineno


def dataclass_table(kind: type[Any]) -> str:
    """Empty for a class without fields."""
    rows = [[f"`{name}`", f"`{type_}`", comment] for name, type_, comment in fields(kind)]
    return table(["field", "type", "meaning"], rows)


def round_messages() -> str:
    """Each control message of the rounds: who sends it to whom and when, and its fields."""
    kinds = {kind.__name__.lower(): kind for kind in get_args(messages.Message)}
    same("messages of the rounds", set(kinds), set(words.ROUNDS))
    parts = []
    for name, kind in kinds.items():
        meaning = " ".join((kind.__doc__ or "").split())
        parts.append(f"### `{name}`\n\n{meaning}\n\n*{words.ROUNDS[name]}*\n\n{dataclass_table(kind)}")
    meaning = " ".join((Held.__doc__ or "").split())
    parts.append(f"### `Held`\n\nA list in `promise`: {meaning}\n\n{dataclass_table(Held)}")
    return "\n".join(parts)


def _literals() -> set[str]:
    """Every constant that stands under "t" in a dictionary that the package makes."""
    found = set()
    for room in ("rounds", "transport", "monitor", "peer"):
        for path in (Path(p2pavg.__file__).parent / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Dict):
                    for key, value in zip(node.keys, node.values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == "t":
                            found.add(_constant(value, path))
    return found


def _constant(value: ast.expr, path: Path) -> str:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.Name):  # a constant of the package, named alike everywhere
        for file in Path(p2pavg.__file__).parent.rglob("*.py"):
            if found := re.search(rf'^{value.id} = "([\w-]+)"', file.read_text(), re.MULTILINE):
                return found[1]
    raise Untold(f"{path} sends a message whose type is not a constant")


def other_messages() -> str:
    """Control messages besides those of the rounds."""
    same("control messages", _literals(), set(words.OTHERS))
    rows = [[f"`{name}`", *told] for name, told in words.OTHERS.items()]
    parts = [table(["`t`", "who → whom, when", "fields", "answer"], rows)]
    told = (Status, "The fields of `status`:"), (Other, "A row of `peers`:"), (LinkSeen, "A row of `links`:")
    parts += [f"{words_before}\n\n{dataclass_table(kind)}" for kind, words_before in told]
    return "\n".join(parts)


def _sent(facts: dict[str, Any], told: dict[str, str], what: str) -> str:
    same(what, set(facts), set(told))
    rows = [[f"`{name}`", _type(facts[name]), told[name]] for name in facts]
    return table(["field", "type", "meaning"], rows)


def _type(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) and value else type(value).__name__


def hello() -> str:
    """The fields of a hello: those of every link, and those that a member of the rounds adds."""
    made = handshake.make_hello(Identity.generate(), "run", 1, 1, {})
    base = _sent({**made.facts, "schema": bytes(handshake.SCHEMA_BYTES)}, words.HELLO, "fields of a hello")
    same("facts of a hello", _facts(), set(words.HELLO_FACTS))
    rows = [[f"`{name}`", told] for name, told in words.HELLO_FACTS.items()]
    return base + "\nA peer of a run adds:\n\n" + table(["field", "meaning"], rows)


def _facts() -> set[str]:
    """What the floors above links put into a hello: `hello = {...}`, `hello={...}`, `hello.update(...)`."""
    found: set[str] = set()
    for room in ("peer", "monitor"):
        for path in (Path(p2pavg.__file__).parent / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.AnnAssign(target=ast.Name(id="hello"), value=ast.Dict(keys=keys)):
                        found |= {key.value for key in keys if isinstance(key, ast.Constant)}
                    case ast.keyword(arg="hello", value=ast.Dict(keys=keys)):
                        found |= {key.value for key in keys if isinstance(key, ast.Constant)}
                    case ast.Call(func=ast.Attribute(value=of, attr="update"), keywords=keywords):
                        if ast.unparse(of).rpartition(".")[2] == "hello":
                            found |= {keyword.arg for keyword in keywords if keyword.arg}
    return found - {"schema"}


def stream_hello() -> str:
    """What the two sides of a data stream say."""
    secret = bytes(32)
    asked = proofs.stream_hello(secret, 1)
    answered = proofs.stream_answer(secret, asked)
    return (
        _sent(asked, words.STREAM_HELLO, "fields of a stream's hello")
        + "\nThe listener answers:\n\n"
        + _sent(answered, words.STREAM_ANSWER, "fields of a stream's answer")
    )


def enum_table(kind: type[Enum], told: dict[str, str]) -> str:
    """Number, name and meaning."""
    same(kind.__name__, {one.name for one in kind}, set(told))
    return table(["number", "kind", "meaning"], [[str(one.value), one.name, told[one.name]] for one in kind])


def datagram_kinds() -> str:
    """Requests of the table, with the bodies of request and answer."""
    same("datagrams", {one.name for one in wire.RequestKind}, set(words.DATAGRAMS))
    rows = [[str(one.value), one.name, *words.DATAGRAMS[one.name]] for one in wire.RequestKind]
    return table(["number", "kind", "asks", "body", "body of the answer"], rows)


def record_value() -> str:
    """The fields of a peer's record, in their order, and those of the compact report inside it."""
    packed = {field.name for field in dataclasses.fields(PeerInfo)} - {"peer_id", "incarnation"}
    same("fields of a peer's record", packed | {"version"}, set(words.PEER_INFO))
    rows = [[str(at), f"`{name}`", told] for at, (name, told) in enumerate(words.PEER_INFO.items())]
    names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(CompactReport))
    return (
        table(["at", "field", "meaning"], rows)
        + f"\nThe compact report is a list too: its version, then {names}.\n"
    )


def limits() -> str:
    """Sizes beyond which a peer refuses."""
    rows = [[what, f"{value:,}"] for what, value in words.limits()]
    return table(["at most", "bytes"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "preamble": lambda: layout(handshake._PREAMBLE, words.PREAMBLE),
    "head": lambda: layout(struct.Struct(handshake._HEAD.format + "I"), words.HEAD),
    "hello": hello,
    "round_messages": round_messages,
    "other_messages": other_messages,
    "stream_hello": stream_hello,
    "frame": lambda: layout(frames._HEADER, words.FRAME),
    "frame_kinds": lambda: enum_table(frames.Kind, words.FRAME_KINDS),
    "heartbeat": lambda: layout(frames._HEARTBEAT, words.HEARTBEAT),
    "datagram": lambda: layout(wire._HEADER, words.DATAGRAM),
    "datagram_kinds": datagram_kinds,
    "record": lambda: layout(record._HEAD, words.RECORD),
    "record_value": record_value,
    "limits": limits,
}
