"""The bookkeeping of reduce jobs, its queues and limits: no sockets, no loop."""

from __future__ import annotations

import hashlib
import socket
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.report.wire import Wire
from p2pavg.transport import tcp_info
from p2pavg.transport.engine import SELF, Missing, ReduceJob
from p2pavg.transport.frames import Header, Kind
from p2pavg.transport.limiter import Limiter
from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.ledger import Ledger
from p2pavg.transport.python.outbox import Item, Outbox, Priority
from tests.unit.transport.engine_swarm import codec_layout

CHUNK = 10


def contribution_size(n: int) -> int:
    return 4 * n


def result_size(n: int) -> int:
    return 2 * n + 64


@st.composite
def groups(draw):
    """(owners, counts, voters, weights, deputies, regions, swaps): any legal group."""
    members = draw(st.integers(1, 5))
    voters = [True, *draw(st.lists(st.booleans(), min_size=members - 1, max_size=members - 1))]
    can_own = [rank for rank in range(members) if voters[rank]]
    owners = draw(st.lists(st.sampled_from(can_own), min_size=1, max_size=6))
    counts = draw(st.lists(st.integers(0, 35), min_size=len(owners), max_size=len(owners)))
    weights = [draw(st.sampled_from([0.0, 1.0, 2.5])) if voters[rank] else 0.0 for rank in range(members)]
    if not any(weights):
        weights[0] = 1.0
    regions = [draw(st.integers(0, 2)) for _ in range(members)]
    deputies = []
    for owner in owners:
        others = {regions[rank]: rank for rank in draw(st.permutations(can_own)) if draw(st.booleans())}
        deputies.append(tuple(rank for region, rank in others.items() if region != regions[owner]))
    swaps = [len(each) == 1 and draw(st.booleans()) for each in deputies]
    return owners, counts, voters, weights, deputies, regions, swaps


def make(group, rank: int) -> Ledger:
    owners, counts, voters, weights, deputies, regions, swaps = group
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    links = tuple(SELF if other == rank else other + 10 for other in range(len(voters)))
    parts = tuple(Part(*facts) for facts in zip(owners, starts, counts, deputies, swaps, strict=False))
    plan = Plan(parts, tuple(regions))
    assert plan.why_not(voters) is None
    job = ReduceJob(7, rank, links, tuple(voters), plan, CHUNK, 0, 1, np.empty(0, np.uint8))
    ledger = Ledger(job, contribution_size, result_size)
    ledger.begin(weights)
    return ledger


class Network:
    """Ledgers of a whole group, and the frames between them, which a test delivers, loses or doubles."""

    def __init__(self, group) -> None:
        self.members = len(group[2])
        self.voters = group[2]
        self.ledgers = [make(group, rank) for rank in range(self.members)]
        self.flying: list[tuple[Kind, int, int, int]] = []  # kind, from, to, chunk
        for ledger in self.ledgers:
            if group[3][ledger.rank] > 0:
                for other in ledger.others():
                    leaves = [number for number in ledger.above(other) if not ledger.reduces(number)]
                    self.send(Kind.CONTRIBUTION, ledger.rank, other, leaves)
                for number in ledger.reduced():
                    self.add(ledger.rank, ledger.rank, number)
            for number in ledger.reduced():
                self.unite(ledger.rank, number)

    def send(self, kind: Kind, sender: int, to: int, numbers: list[int]) -> None:
        for number in numbers:
            self.ledgers[sender].gone(kind, to, number)
            self.flying.append((kind, sender, to, number))

    def add(self, owner: int, rank: int, number: int) -> None:
        ledger = self.ledgers[owner]
        if not ledger.contribution_due(rank, number):
            return
        if rank == ledger.partner(number):
            ledger.take_other(number)
            self.unite(owner, number)
        elif ledger.take_contribution(rank, number):
            receiver = ledger.receiver(number)
            if receiver is None:
                self.finish(owner, number)
            else:
                self.send(Kind.CONTRIBUTION, owner, receiver, [number])
                self.unite(owner, number)

    def unite(self, rank: int, number: int) -> None:
        if self.ledgers[rank].result_due(number) and self.ledgers[rank].sides(number) is not None:
            self.finish(rank, number)

    def finish(self, rank: int, number: int) -> None:
        self.ledgers[rank].take_result(number, 1000 + number)
        for child in self.ledgers[rank].children(number):
            self.send(Kind.RESULT, rank, child, [number])

    def deliver(self, kind: Kind, sender: int, to: int, number: int) -> None:
        ledger = self.ledgers[to]
        chunk = ledger.chunks[number]
        plain = kind is Kind.CONTRIBUTION and not ledger.is_partial(sender, number)
        size = chunk.contribution_bytes if plain else chunk.result_bytes
        header = Header(kind, size, int(not plain), 0, 7, chunk.part, chunk.index, chunk.count, sender)
        assert ledger.refusal(sender, header) is None
        assert ledger.number(header.part, header.chunk) == number
        if kind is Kind.CONTRIBUTION:
            self.add(to, sender, number)
        elif ledger.result_due(number):
            self.finish(to, number)

    def repair(self) -> None:
        for ledger in self.ledgers:
            for other in ledger.others():
                missing = ledger.missing(other)
                contributions, results = self.ledgers[other].resendable(ledger.rank, missing)
                self.send(Kind.CONTRIBUTION, other, ledger.rank, contributions)
                self.send(Kind.RESULT, other, ledger.rank, results)


class TestLedger:
    @settings(deadline=None)
    @given(groups(), st.data())
    def test_any_schedule_ends(self, group, data):
        """Delivered in any order, with frames lost, doubled and asked for again, every ledger ends the
        same.
        """
        net = Network(group)
        for _ in range(data.draw(st.integers(0, 200))):
            if not net.flying:
                break
            frame = net.flying.pop(data.draw(st.integers(0, len(net.flying) - 1)))
            fate = data.draw(st.sampled_from(["deliver", "deliver", "lose", "double"]))
            if fate != "lose":
                net.deliver(*frame)
            if fate == "double":
                net.deliver(*frame)
        for _ in range(3):
            while net.flying:
                net.deliver(*net.flying.pop())
            net.repair()
        while net.flying:
            net.deliver(*net.flying.pop())
        digests = {ledger.digests() for ledger in net.ledgers}
        assert len(digests) == 1
        for ledger in net.ledgers:
            assert ledger.done
            for other in range(net.members):
                assert ledger.missing(other) == Missing((), ())

    @settings(deadline=None)
    @given(groups(), st.data())
    def test_done_only_when_whole(self, group, data):
        """No ledger is done while a result is due to it, or something that voters need has not left."""
        net = Network(group)
        while net.flying:
            for ledger in net.ledgers:
                due = any(ledger.result_due(number) for number in range(len(ledger.chunks)))
                assert not (ledger.done and due)
            net.deliver(*net.flying.pop(data.draw(st.integers(0, len(net.flying) - 1))))
        assert all(ledger.done for ledger in net.ledgers)

    @given(groups())
    def test_layout(self, group):
        """Chunks cover the vector in order, and both encoded layouts without gaps, as `codec_layout` says."""
        ledger = make(group, 0)
        assert [chunk.start for chunk in ledger.chunks] == list(
            np.cumsum([0, *[chunk.count for chunk in ledger.chunks]])[:-1]
        )
        assert sum(chunk.count for chunk in ledger.chunks) == sum(group[1])
        for size, at in ((contribution_size, "contribution_at"), (result_size, "result_at")):
            flat = [offset for row in codec_layout(ledger._job, size) for offset in row]
            assert [getattr(chunk, at) for chunk in ledger.chunks] == flat
        assert ledger.own_bytes == 4 * sum(group[1])

    @given(groups(), st.integers(-2, 8), st.integers(-2, 8))
    def test_numbers(self, group, part, index):
        """Every (part, index) of the job has its own number; what the job has not has none."""
        ledger = make(group, 0)
        number = ledger.number(part, index)
        exists = any((chunk.part, chunk.index) == (part, index) for chunk in ledger.chunks)
        assert (number is not None) == exists
        if number is not None:
            assert (ledger.chunks[number].part, ledger.chunks[number].index) == (part, index)

    def test_order_of_owners(self):
        """Everybody starts with the next rank, so that no owner is everybody's first."""
        group = ([0], [5], [True] * 5, [1.0] * 5, [()], [0] * 5, [False])
        assert [make(group, rank).others()[0] for rank in range(5)] == [1, 2, 3, 4, 0]
        assert sorted(make(group, 3).others()) == [0, 1, 2, 4]

    def test_digests(self):
        """Per part sha256 over the chunks' CRC-32s, little-endian; an empty part has that of nothing."""
        ledger = make(([0, 0, 0], [15, 0, 5], [True], [1.0], [()] * 3, [0], [False] * 3), 0)
        for number, crc in enumerate([0x01020304, 5, 6]):
            ledger.take_result(number, crc)
        assert ledger.digests() == (
            hashlib.sha256(b"\x04\x03\x02\x01\x05\0\0\0").digest(),
            hashlib.sha256(b"").digest(),
            hashlib.sha256(b"\x06\0\0\0").digest(),
        )


class TestOutbox:
    def item(self, priority: Priority, number: int = 0, transfer: int = 1) -> Item:
        kinds = {
            Priority.CONTRIBUTION: Kind.CONTRIBUTION,
            Priority.BLOB: Kind.BLOB,
            Priority.HEARTBEAT: Kind.PING,
        }
        return Item(priority, kinds.get(priority, Kind.RESULT), transfer, number=number)

    def test_order(self):
        """Heartbeats, contributions, results, joiners' results, blobs; in the order put within each."""
        box = Outbox()
        for priority in reversed(Priority):
            for number in (2, 1):
                box.put(self.item(priority, number, transfer=priority))
        taken = []
        while (item := box.take(0, chunks=True)) is not None:
            taken.append((item.priority, item.number))
        chunks = [(priority, number) for priority in list(Priority)[1:] for number in (2, 1)]
        assert taken == [(Priority.HEARTBEAT, 1), *chunks]
        assert not box

    def test_only_heartbeats_under_the_limit(self):
        """When the upload limit is reached only heartbeats leave."""
        box = Outbox()
        box.put(self.item(Priority.RESULT))
        assert box.take(0, chunks=False) is None
        box.put(self.item(Priority.HEARTBEAT))
        assert box.take(0, chunks=False).priority is Priority.HEARTBEAT
        assert box.take(0, chunks=True).priority is Priority.RESULT

    def test_no_chunk_waits_twice(self):
        """A chunk asked for again while it still waits is sent once; after it left, again."""
        box = Outbox()
        box.put(self.item(Priority.RESULT, 5))
        box.put(self.item(Priority.RESULT, 5))
        first = box.take(0, chunks=True)
        assert box.take(0, chunks=True) is None
        box.put_back(first)
        box.put(self.item(Priority.RESULT, 5))
        assert box.take(0, chunks=True) is first
        assert box.take(0, chunks=True) is None

    def test_copies_go_over_other_streams(self):
        """What one stream was late with, another one takes."""
        box = Outbox()
        copy = self.item(Priority.RESULT, 1)
        copy.not_over = 0
        box.put(copy)
        box.put(self.item(Priority.RESULT, 2))
        assert box.take(0, chunks=True).number == 2
        assert box.take(0, chunks=True) is None
        assert box.take(1, chunks=True) is copy

    def test_put_back_goes_first(self):
        """What a lost stream had not wholly sent goes before everything of its class."""
        box = Outbox()
        box.put(self.item(Priority.CONTRIBUTION, 1))
        box.put(self.item(Priority.CONTRIBUTION, 2))
        box.put_back(box.take(0, chunks=True))
        assert box.take(0, chunks=True).number == 1

    def test_drop(self):
        """Dropped items are gone and may be put again; the others keep their order."""
        box = Outbox()
        for number in range(6):
            box.put(self.item(Priority.RESULT, number, transfer=number % 2))
        box.drop(lambda item: item.transfer == 0)
        assert [item.number for item in box] == [1, 3, 5]
        box.put(self.item(Priority.RESULT, 0, transfer=0))
        assert [item.number for item in box] == [1, 3, 5, 0]


class TestPacing:
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.floats(1e3, 1e9),
        st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 500_000)), max_size=100),
    )
    def test_never_above_the_rate(self, rate, sends):
        """However bytes are offered, what left by any time is at most the rate, a burst and one frame
        more.
        """
        bucket = Limiter(rate, 0.0)
        now, sent, largest = 0.0, 0, 0
        for pause, nbytes in sends:
            now += pause
            now += bucket.wait_s(now)
            assert bucket.wait_s(now) <= 1e-6
            bucket.spend(nbytes)
            sent, largest = sent + nbytes, max(largest, nbytes)
            assert sent <= rate * (now + 0.2) + largest + 1

    def test_full_use(self):
        """A sender that is always ready uses the whole rate."""
        bucket, now, sent = Limiter(1e6, 0.0), 0.0, 0
        while now < 60.0:
            now += bucket.wait_s(now)
            bucket.spend(30_000)
            sent += 30_000
        assert sent == pytest.approx(60e6, rel=0.01)


class TestBufferPool:
    def test_reuse(self):
        """A returned buffer is handed out again for any size of its class, and never two of them at once."""
        pool = BufferPool()
        first = pool.take(5000)
        second = pool.take(5000)
        assert not np.shares_memory(first, second)
        assert len(first) >= 5000
        pool.give(first)
        assert pool.take(8000) is first

    def test_keeps_no_more_than_it_should(self):
        """Returned buffers beyond the limit are freed."""
        pool = BufferPool(keep_bytes=1 << 20)
        buffers = [pool.take(1 << 19) for _ in range(4)]
        for buffer in buffers:
            pool.give(buffer)
        again = [pool.take(1 << 19) for _ in range(4)]
        assert sum(any(one is other for other in buffers) for one in again) == 2


class TestTcpInfo:
    def struct(self, length: int) -> bytes:
        raw = bytearray(300)
        for offset, fmt, value in (
            (16, "=I", 1448),
            (68, "=I", 300_000),
            (80, "=I", 100),
            (100, "=I", 7),
            (144, "=I", 99),
        ):
            struct.pack_into(fmt, raw, offset, value)
        struct.pack_into("=Q", raw, 160, 1_000_000)
        struct.pack_into("=Q", raw, 128, 5000)  # bytes received
        struct.pack_into("=II", raw, 136, 10, 20)  # segments out and in
        struct.pack_into("=Q", raw, 200, 9000)  # bytes sent
        return bytes(raw[:length])

    @pytest.mark.parametrize("length", [168, 232, 248, 300])
    def test_whole(self, length):
        """The fields are found whatever a newer kernel appends."""
        info = tcp_info.parse(self.struct(length))
        assert info == tcp_info.TcpInfo(0.3, 144_800, 8e6, 7, 99)

    @pytest.mark.parametrize("length", [208, 232, 300])
    def test_wire(self, length):
        """Each segment adds its headers to the bytes, with 12 more where the connection has timestamps."""
        plain = self.struct(length)
        assert tcp_info.parse_wire(plain, 40) == Wire(9000 + 10 * 40, 5000 + 20 * 40)
        stamped = plain[:5] + b"\x01" + plain[6:]
        assert tcp_info.parse_wire(stamped, 60) == Wire(9000 + 10 * 72, 5000 + 20 * 72)
        assert tcp_info.parse_wire(self.struct(207), 40) is None

    def test_wire_to_this_machine(self):
        """What a connection between two processes of this machine sends is told apart: it costs nothing."""
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as one,
            server.accept()[0] as other,
        ):
            one.sendall(b"x" * 1000)
            assert other.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
            carried = tcp_info.wire(one)
        assert carried is not None
        assert carried.sent_here == carried.sent > 1000

    def test_short(self):
        """What an older kernel does not fill is 0."""
        assert tcp_info.parse(self.struct(104)) == tcp_info.TcpInfo(0.3, 144_800, 0.0, 7, 0)
        assert tcp_info.parse(self.struct(160)).delivery_rate_bps == 0.0
        assert tcp_info.parse(b"") == tcp_info.TcpInfo(0.0, 0, 0.0, 0, 0)
