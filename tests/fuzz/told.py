"""What members say on a link, each kind as its receiver takes it; and what `bench net` is asked."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import struct
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgpack
import numpy as np

from p2pavg import codecs
from p2pavg.bench.net import protocol, streams
from p2pavg.errors import ProtocolError, StateError
from p2pavg.identity import Identity
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.monitor.picture import Picture
from p2pavg.monitor.shown import run_line
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.report.compact import CompactReport
from p2pavg.rounds.loop import hello
from p2pavg.rounds.loop.handover import MOST_AT_ONCE, Handovers
from p2pavg.rounds.machine.departure import Acceptance
from p2pavg.rounds.protocol import messages, wire
from p2pavg.rounds.protocol.ballot import Ballot, Held, Stage
from p2pavg.rounds.protocol.causes import Cause, Objection
from p2pavg.rounds.protocol.lineage import next_lineage
from p2pavg.rounds.protocol.roles import Generation, Seat
from p2pavg.rounds.state import generation_rows as history
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.donor import MOST_TIMES, Donor
from p2pavg.rounds.state.results import ResultHead
from p2pavg.transport.engine import SELF, Missing, ReduceJob
from p2pavg.transport.links import handshake
from p2pavg.transport.links.control import ControlConnection
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.link import Link
from p2pavg.transport.links.repair import Repairs
from p2pavg.transport.paths import Paths
from p2pavg.transport.python.ledger import Ledger
from tests.fuzz.target import Target, quiet
from tests.unit.report.reports import report

PEER, OTHER, LINEAGE, DIGEST = b"p" * 20, b"q" * 20, b"l" * 32, b"d" * 32


def _packed(*told: dict[str, Any]) -> list[bytes]:
    return [msgpack.packb(message) for message in told]


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def in_loop(work: Callable[[bytes], Coroutine[Any, Any, None]]) -> Callable[[bytes], None]:
    return lambda data: loop().run_until_complete(work(data))


# -- the rounds


def _rounds() -> list[bytes]:
    ballot = Ballot(3, 1, PEER, 1 << 60, LINEAGE)
    held = Held(ballot, Stage.DONE, True, (DIGEST,), (PEER, OTHER), (1.0, 2.0), (1, 2))
    made: list[messages.Message] = [
        messages.Progress(3, LINEAGE, 7, 9.5, True, False, False, 70, 2, 0.3, 4, PEER, 1e9, 0.0, (PEER,), ()),
        messages.Totals(3, LINEAGE, 12),
        messages.Follow(3, LINEAGE, PEER),
        messages.Prepare(
            ballot, (PEER, OTHER), (True, True), Plan((Part(0, 0, 5), Part(1, 5, 5, (0,))), (3, 4))
        ),
        messages.Query(ballot),
        messages.Promise(ballot, None, ballot),
        messages.Promise(ballot, held, ballot),
        messages.Refuse(ballot, 3, LINEAGE, Objection.BUSY, ballot, (OTHER,)),
        messages.Ready(ballot, 1, 7, 7.0, b"note", 0.5, 7),
        messages.Unready(ballot, 1),
        messages.Begin(ballot, (1.0, 2.0), (1, 2), (3, 0), b"note"),
        messages.Begun(ballot, DIGEST, True),
        messages.Done(ballot, (DIGEST,)),
        messages.Links(((OTHER, 1e9, 0.1),)),
        messages.Stalled(ballot, (0,), (1,), 1),
        messages.Complain(ballot, OTHER, "why"),
        messages.Committed(ballot, (1.0,), (1,), (DIGEST,)),
        messages.Aborted(ballot, ballot, Cause.COMPLAINT, "why", (PEER,), False),
        messages.Inquire(ballot),
        messages.Unknown(ballot, 3, LINEAGE),
        messages.CatchUp(3, 1, 12.5, 5_000_000, 900_000, 20e6),
        messages.Departing(4, (held,)),
    ]
    return _packed(*(wire.to_dict(message) for message in made))


def _parse_round(data: bytes) -> None:
    parsed = wire.from_dict(handshake.unpack(data))
    assert wire.from_dict(wire.to_dict(parsed)) == parsed


def _introductions() -> list[bytes]:
    trainer = {"role": "trainer", "epoch": 3, "lineage": LINEAGE, "total": 9, "leader": PEER}
    return _packed(trainer, {**trainer, "role": "joiner", "client_only": True}, {"role": "watcher"})


def _parse_introduction(data: bytes) -> None:
    facts = handshake.unpack(data)
    hello.vet(facts)
    if hello.trains(facts):
        assert hello.introduced(PEER, facts, 0.1).epoch >= 0


# -- states


def _manifests() -> list[bytes]:
    made = state.describe(3, LINEAGE, 10, np.zeros(100, np.uint8))
    return _packed(made.signed(Identity.generate().sign).to_message())


def _parse_manifest(data: bytes) -> None:
    made = state.Manifest.from_message(handshake.unpack(data))
    made.check(b"k" * 32)


def _states() -> list[bytes]:
    packed = {"dict": [["a", {"tensor": ["float32", [2, 3], 0]}]]}
    meta = msgpack.packb({"meta": packed, "buffers": [["t", 64]]})
    return [struct.pack("<H", len(meta)) + meta + bytes(64)]


def _parse_state(data: bytes) -> None:
    """What a donor sent, hashes right: its own metadata, then the trees inside it."""
    from p2pavg.optim import tree

    head, blob = data[:2].ljust(2, b"\0"), np.frombuffer(bytearray(data[2:]), np.uint8)
    meta_bytes = min(struct.unpack("<H", head)[0], blob.nbytes)
    manifest = state.describe(1, LINEAGE, meta_bytes, blob)
    inside = state.unpack(manifest, blob)
    for section in (*inside.buffers.values(), blob[:0]):
        tree.unpack(inside.meta, section)


def _histories() -> list[bytes]:
    rows = history.to_rows(
        (Generation(2, LINEAGE, 7, 8, 24, PEER), Generation(3, LINEAGE, 9, 8, 32, PEER)), 4
    )
    return _packed({"history": rows})


def _parse_history(data: bytes) -> None:
    made = history.from_rows(handshake.unpack(data).get("history"))
    assert history.from_rows(history.to_rows(made, 1 << 63)) == made


_BLOB = np.zeros(2 * state.CHUNK_BYTES + 100, np.uint8)
_MANIFEST = state.describe(3, LINEAGE, 10, _BLOB)


class _Background:
    """Nobody copies."""

    def submit(self, *_: object) -> None:
        pass


class _Kernel:
    """An engine that takes blobs, and keeps what it was told to send."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.open: set[int] = set()

    def send_blob(self, link: int, transfer: int, chunk: int, data: memoryview) -> None:
        assert len(data)
        self.sent.append((transfer, chunk))

    def open_blob(self, transfer: int, buffer: memoryview, chunk_bytes: int) -> None:
        self.open.add(transfer)

    def cancel(self, transfer: int) -> None:
        self.open.remove(transfer)


def _head() -> ResultHead:
    """Of a round of two members, as one of them keeps it."""
    weights, ballot = (1.0, 2.0), Ballot(3, 1, PEER, 7, LINEAGE)
    after = next_lineage(LINEAGE, 3, (PEER, OTHER), weights, (DIGEST, DIGEST), b"note")
    seats, parts = (Seat(PEER, True), Seat(OTHER, True)), (Part(0, 0, 60), Part(1, 60, 40))
    return ResultHead(
        ballot, 9, seats, parts, False, weights, (1, 2), (DIGEST, DIGEST), b"note", LINEAGE, after
    )


def _heads() -> list[bytes]:
    return _packed({"t": "result", **_head().to_message()})


def _parse_head(data: bytes) -> None:
    """What a donor says of a result, and what is made of that."""
    head = ResultHead.from_message(handshake.unpack(data), _NUMEL)
    layout = head.layout(_CODEC)
    assert layout.numel == _NUMEL
    assert not head.fits(layout, np.zeros(layout.nbytes, np.uint8))
    assert ResultHead.from_message(head.to_message(), _NUMEL) == head


def _chunk_requests() -> list[bytes]:
    asked = {"t": "state-chunks", "transfer": 7, "root": _MANIFEST.root}
    result = {"t": "state-chunks", "transfer": 8, "lineage": _head().lineage}
    return _packed({**asked, "chunks": [0, 1, 2]}, {**asked, "chunks": []}, {**result, "chunks": [0]})


def _parse_chunk_request(data: bytes) -> None:
    """Asked twice, and all goes out."""
    kernel, asked = _Kernel(), handshake.unpack(data)
    donor = Donor(kernel, None, None, bytes, _Background(), lambda: False, list, None)  # type: ignore[arg-type]
    donor._snapshot = (_MANIFEST, _BLOB)
    donor._retained.begin((3, LINEAGE), [(_head(), np.zeros(200, np.uint8))])
    donor._begin(1, _MANIFEST, 3)
    for _ in range(2):
        donor.send(1, asked)
        for transfer, chunk in kernel.sent:  # grows meanwhile
            assert 0 <= chunk < _MANIFEST.chunks
            donor.sent(1, transfer)
    assert len(kernel.sent) <= MOST_TIMES * _MANIFEST.chunks


# -- departure


_NUMEL, _CODEC = 100, codecs.get("fp16")


class _Line:
    """A link that keeps the answers."""

    id, peer_id = 1, PEER

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []

    def reply(self, request: dict[str, Any], message: dict[str, Any]) -> None:
        self.answers.append(message)


def _handovers() -> list[bytes]:
    offer = {
        "epoch": 3,
        "lineage": LINEAGE,
        "samples": 12,
        "note": b"n",
        "hash": DIGEST,
        "offered": [[7, 12]],
    }
    return _packed(
        {"t": "handover", **offer, "bytes": _CODEC.encoded_size(_NUMEL)}, {"t": "handover-end", "transfer": 0}
    )


async def _take_handover(data: bytes) -> None:
    """Beside a sound one that came before, which the message may end: it says transfer 0 for that one's."""
    message, line, kernel = handshake.unpack(data), _Line(), _Kernel()
    if message.get("t") not in ("handover", "handover-end"):
        return
    taken: list[Any] = []
    receiver = Handovers(
        kernel,  # type: ignore[arg-type]
        {},
        _CODEC,
        _NUMEL,
        lambda epoch, lineage, transfers: (
            Acceptance.TAKEN if (epoch, lineage) == (3, LINEAGE) else Acceptance.LATER
        ),
        lambda epoch, transfers: None,
        lambda samples: True,
        lambda *what: taken.append(what),
    )
    receiver.message(line, msgpack.unpackb(_handovers()[0]))  # type: ignore[arg-type]
    if message.get("transfer") == 0:
        message["transfer"] = line.answers[0]["transfer"]
    for _ in range(2):
        receiver.message(line, message)  # type: ignore[arg-type]
    for transfer in list(kernel.open):
        receiver.chunk(transfer)
    assert len(kernel.open) <= MOST_AT_ONCE
    receiver.close()
    assert not kernel.open
    assert not taken


# -- links


_JOB = ReduceJob(
    9, 0, (SELF, 1), (True, True), Plan((Part(0, 0, 50), Part(1, 50, 50))), 10, 1, 1, np.empty(200, np.uint8)
)


class _Reducing:
    """An engine with one job, for which it looks up what it is asked to send again."""

    def __init__(self) -> None:
        self._ledger = Ledger(_JOB, _CODEC.encoded_size, _CODEC.encoded_size)
        self._ledger.begin((1.0, 1.0))

    def running(self) -> list[ReduceJob]:
        return [_JOB]

    def resend(self, transfer: int, rank: int, missing: Missing) -> None:
        contributions, results = self._ledger.resendable(rank, missing)
        assert set(contributions) <= set(range(10)) >= set(results)


class _Wire:
    """An asyncio transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> None:
        """It is no socket's."""

    def set_write_buffer_limits(self, high: int) -> None:
        pass


def _link(connection: ControlConnection, on_close: Callable[[Link, str], None]) -> Link:
    return Link(
        1,
        PEER,
        {},
        ("127.0.0.1", 1),
        dialled=False,
        secret=bytes(32),
        connection=connection,
        rtt_s=0.1,
        on_close=on_close,
        party=handshake.Party.of("run", closed=False),
    )


def _resends() -> list[bytes]:
    return _packed({"t": "_resend", "transfer": 9, "contributions": [[1, 0], [1, 4]], "results": [[0, 2]]})


async def _new_link() -> Link:
    return _link(ControlConnection(), lambda link, reason: None)


@functools.cache
def _old_link() -> Link:
    return loop().run_until_complete(_new_link())


def _parse_resend(data: bytes) -> None:
    """However much is asked for, what is remembered of it is bounded by the job."""
    link = _old_link()
    repairs = Repairs(_Reducing(), {1: link}, lambda link, stream: None)  # type: ignore[arg-type]
    for _ in range(2):
        repairs.asked(link, handshake.unpack(data))
    for watch in repairs._ranks.values():
        for part, chunk in (*watch.contributions_again.sent, *watch.results_again.sent):
            assert part < 2
            assert chunk < 5


_RAW = b"\xff"  # what follows is no body of one message, but what a connection carries


def _said() -> list[bytes]:
    told: list[dict[str, Any]] = [
        {"t": "_ping", "at": 12},
        {"t": "_pong", "at": 12},
        {"t": "_alive", "_id": 3},
        {"t": "_streams", "n": 4},
        {"taken": True, "_re": 1},
        {"t": "departing", "epoch": 4},
    ]
    return [*_packed(*told), _RAW + b"".join(handshake.pack(message) for message in told)]


class _Above:
    """Takes what is no message of the transport."""

    def link_up(self, link: Link) -> None: ...

    def link_down(self, link: Link, reason: str) -> None: ...

    def message(self, link: Link, message: dict[str, Any]) -> None:
        handshake.pack(message)  # as what is kept until somebody trains is measured


@functools.cache
def _endpoint() -> Endpoint:
    identity = Identity.generate()
    engine: Any = _Reducing()
    return Endpoint(identity, "run", engine, {}, 1, _Above(), None, lambda facts: None, Paths(None))


async def _take_said(data: bytes) -> None:
    """In two pieces. A message that could not be handled is a bug, though it costs its sender the link."""
    wire, connection, endpoint = _Wire(), ControlConnection(), _endpoint()
    link = _link(connection, lambda link, reason: None)
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.start(lambda message: endpoint._received(link, message), link.close, lambda nbytes: 0.0)
    link._answers[1] = asyncio.get_running_loop().create_future()
    framed = handshake.make_head(len(data), zlib.crc32(data)) + data
    carried = data[1:] if data[:1] == _RAW else framed
    for piece in (carried[: len(carried) // 2], carried[len(carried) // 2 :]):
        if not wire.closed:
            connection.data_received(piece)
    assert connection._lost != "a message could not be handled"
    assert wire.closed == link.closed
    assert len(wire.written) <= 100 * (1 + len(data))


# -- watchers


def _statuses() -> list[bytes]:
    status = {
        "t": "status",
        "epoch": 3,
        "target": 100,
        "samples": 7,
        "counted": 12,
        "rate": 9.5,
        "state": "computing",
        "leader": PEER,
        "total": 70,
        "region": "eu",
        "relayed": 5000,
        "peers": [[OTHER, 3, 5, 4.5, False]],
        "links": [[OTHER, 1, 0.1, 4, 1e8, 1000, 2000]],
    }
    event = {"t": "event", "kind": "aborted", "fields": {"epoch": 3, "peer": OTHER, "why": "x", "attempt": 1}}
    told = CompactReport.of(report()).encode()
    return _packed(status, event, {**event, "kind": "begun"}, {"t": "report", "report": told})


def _parse_status(data: bytes) -> None:
    """Told twice, and shown."""
    picture = Picture("run")
    picture.listed({peer: PeerInfo(peer, (("10.0.0.1", 31330),)) for peer in (PEER, OTHER)}, 0.0)
    picture.linked(PEER, 0.0)
    message = handshake.unpack(data)
    for at in (1.0, 2.0):
        picture.told(PEER, message, at)
    shown = picture.show(3.0)
    assert run_line(shown)
    assert json.dumps(shown.to_dict(1e9), allow_nan=False)


# -- bench net


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def setsockopt(self, *_: int) -> None: ...

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


class _Streams:
    """A bundle that carries nothing."""

    def send(self, *budgets: streams.SendBudget) -> None:
        assert all(budget.left >= 0 for budget in budgets)

    def stop(self) -> None: ...

    def restart(self) -> None: ...

    def samples(self) -> list[tuple[float, int]]:
        return [(0.5, 3)]

    deliveries = samples

    def infos(self) -> list[Any]:
        return [report()]


class _Session(protocol._Session):
    """All streams of its step are there; it waits for no other's."""

    def _wait(self, step: int) -> Any:
        if step:
            raise ProtocolError("no such step")
        return _Streams()


def _questions() -> list[bytes]:
    asked = [{"do": do, "step": 0, "bytes": 9} for do in ("send", "stop", "restart", "samples", "ping")]
    return [json.dumps(question).encode() + b"\n" for question in asked]


def _parse_question(data: bytes) -> None:
    session = _Session(streams.SendBudget(1000))
    session.answer(protocol.JsonLines(_Socket(data)).read())  # type: ignore[arg-type]


TARGETS = (
    Target("round", quiet(_parse_round, ProtocolError), _rounds),
    Target("introduction", quiet(_parse_introduction, ProtocolError), _introductions),
    Target("manifest", quiet(_parse_manifest, ProtocolError, StateError), _manifests),
    Target("state", quiet(_parse_state, StateError), _states),
    Target("history", quiet(_parse_history, ProtocolError, StateError), _histories),
    Target("result", quiet(_parse_head, ProtocolError, StateError), _heads),
    Target("state-chunks", quiet(_parse_chunk_request, ProtocolError, StateError), _chunk_requests),
    Target("handover", quiet(in_loop(_take_handover), ProtocolError), _handovers),
    Target("resend", quiet(_parse_resend, ProtocolError), _resends),
    Target("link", in_loop(_take_said), _said),
    Target("watched", quiet(_parse_status, ProtocolError), _statuses),
    Target("bench-net", quiet(_parse_question, ProtocolError, ConnectionResetError), _questions),
)
