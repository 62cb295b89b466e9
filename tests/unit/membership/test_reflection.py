"""A ledger of what goes to addresses that have proven nothing, and the keys of runs under attack."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from p2pavg.bench.dht.simulation import Network
from p2pavg.credentials import Authority
from p2pavg.identity import Identity
from p2pavg.membership import PeerInfo, key_of
from p2pavg.membership.closed import PAGE_BYTES, ClosedRun
from p2pavg.membership.names import MAX_LOOKUPS, MAX_NAMES, Names
from p2pavg.membership.table import serving
from p2pavg.membership.table.address import Address, pack_address
from p2pavg.membership.table.beat import TAG_BYTES, Beat, Heard, decode_beat
from p2pavg.membership.table.ledger import MAX_PROVED_OF_NETWORK, MAX_PROVED_OF_SOURCE, AddressLedger
from p2pavg.membership.table.record import Chain, Refresh, SignedRecord, sign_record, to_store
from p2pavg.membership.table.records.entries import Outcome
from p2pavg.membership.table.records.store import RecordStore
from p2pavg.membership.table.wire import Contact, Flag, RequestKind, decode, encode, pack_contacts
from tests.unit.membership.test_strangers import (
    KEY,
    PORT,
    RUN,
    Stranger,
    home,
    join,
    network,
    run,
    swarm,
    until,
)

VICTIM = ("203.0.113.66", 4444)  # where nobody is
SYN_BYTES = 240  # that a dial may send before it is answered


class Books:
    """What strangers sent, and what went to an address that never answered."""

    def __init__(self, net: Network, strangers: set[Address]) -> None:
        self.came = self.went = 0
        self.net, self.kinds = net, Counter[str]()
        deliver = net.send

        def spy(data: bytes, source: Address, destination: Address) -> None:
            if source in strangers or source == VICTIM:
                self.came += len(data)
            if destination[0] == VICTIM[0]:
                self.went += len(data)
                self.kinds[f"{data[:1]!r} {data[3]}"] += 1
            deliver(data, source, destination)

        net.send = spy  # type: ignore[method-assign]

    @property
    def drawn(self) -> int:
        """With the connections that were tried."""
        return self.went + SYN_BYTES * sum(destination[0] == VICTIM[0] for _, destination in self.net.dials)


def record_at(publisher: Identity, *addresses: Address, value: bytes | None = None) -> SignedRecord:
    value = PeerInfo(publisher.peer_id, addresses).encode() if value is None else value
    return sign_record(
        publisher, KEY, value, incarnation=1, sequence=1, lifetime=300.0, anchor=Chain().anchor
    )


def store_body(record: SignedRecord, by: Identity, holder: bytes, token: bytes) -> list[Any]:
    signed = to_store(holder, token, record.key)
    return [record.encoded, 0, record.anchor, 300_000, by.sign(signed)]


@pytest.mark.parametrize("members", [2, 5, 12])
def test_an_announced_address_that_proves_nothing_is_left_in_peace(members: int) -> None:
    """A stranger of an open run that announces somebody else's address makes all members together send there
    at most three times what it sent, in minutes: beats, stores, questions and connections.
    """

    async def scenario() -> None:
        net = network(20 + members)
        made = await swarm(net, members)
        for _, view in made:
            view.on_change = lambda view=view: [  # type: ignore[misc]
                net.dials.append(("", address))
                for info in view.peers.values()
                for address in view.addresses_to_dial(info)
                if address == VICTIM
            ]
        stranger = Stranger(net, ("198.51.100.7", PORT))
        books = Books(net, {stranger.address})
        identity = stranger.identities[0]
        record = record_at(identity, VICTIM)
        for number, (dht, _) in enumerate(made, 1):
            stranger.tokens[home(number)] = dht.node.rpc.token_for(stranger.address)
            body = store_body(record, identity, dht.identity.peer_id, stranger.tokens[home(number)])
            stranger.ask(home(number), RequestKind.STORE, body)
        for _ in range(12):
            await asyncio.sleep(10.0)
            for _, view in made:
                view.on_change()
        assert books.came > 0
        assert books.drawn <= 3 * books.came, books.kinds

    run(scenario())


@pytest.mark.parametrize("members", [2, 4, 7])
def test_a_record_that_names_three_addresses_draws_little_from_a_whole_swarm(members: int) -> None:
    """A stranger that brings its record to one member, changes it every ten seconds and says nothing else
    makes all members together send to the addresses in it at most three times what it sent.
    """

    async def scenario() -> None:
        net = network(60 + members)
        made = await swarm(net, members)
        stranger = Stranger(net, ("198.51.100.7", PORT))
        stranger.datagram_received = lambda data, addr: None  # type: ignore[method-assign]
        identity, (dht, _) = stranger.identities[0], made[0]
        books = Books(net, {stranger.address})
        victims = [(VICTIM[0], VICTIM[1] + n) for n in range(3)]
        value = PeerInfo(identity.peer_id, tuple(victims)).encode()
        stranger.tokens[home(1)] = dht.node.rpc.token_for(stranger.address)
        for sequence in range(1, 7):
            record = sign_record(
                identity, KEY, value, incarnation=1, sequence=sequence, lifetime=300.0, anchor=Chain().anchor
            )
            body = store_body(record, identity, dht.identity.peer_id, stranger.tokens[home(1)])
            stranger.ask(home(1), RequestKind.STORE, body)
            await asyncio.sleep(10.0)
            for _, view in made:
                for info in view.peers.values():
                    net.dials += [("", place) for place in view.addresses_to_dial(info) if place in victims]
        assert books.came > 0
        assert books.drawn <= 3 * books.came, books.kinds

    run(scenario())


def test_spoofed_questions_and_beats_draw_little() -> None:
    """Questions, beats of nobody known and messages of another version that claim to come from a third party
    make a member send there at most three times as much.
    """

    async def scenario() -> None:
        net = network(40)
        made = await swarm(net, 3)
        books = Books(net, set())
        here = home(2)
        beat = Beat(KEY[:3], b"none", 1, Refresh(1, b"0123456789"), 0, b"dig").encode()
        for number in range(200):
            sender = bytes([number]) * 20
            for kind, body in (
                (RequestKind.PING, []),
                (RequestKind.FIND, [KEY]),
                (RequestKind.INDEX, [KEY, b"", b""]),
                (RequestKind.FETCH, [KEY, b""]),
                (RequestKind.STORE, [b"r" * 200, 0, b"l" * 10, 9, b"s" * 64]),
                (RequestKind.DIAL, [VICTIM[1]]),
                (RequestKind.REVOKED, [KEY, b"", b""]),
            ):
                asked = pack_address(here) if number % 2 else b""
                flags = Flag.PROVE if asked else 0
                net.send(encode(kind, flags, b"t" * 8, sender, bytes(8), body, asked=asked), VICTIM, here)
            net.send(beat, VICTIM, here)
            net.send(b"pD\x63" + bytes(60), VICTIM, here)
            await asyncio.sleep(0.05)
        await asyncio.sleep(30.0)
        assert 0 < books.drawn <= 3 * books.came, books.kinds
        assert not net.dials
        assert len(made[1][1].peers) == 2

    run(scenario())


def test_contacts_that_a_stranger_names_draw_little() -> None:
    """Whoever answers a lookup with eight nodes at one address draws three times that there at most."""

    async def scenario() -> None:
        net = network(41)
        made = await swarm(net, 2)
        stranger = Stranger(net, ("198.51.100.7", PORT))
        answer = stranger.datagram_received

        def lie(data: bytes, addr: Any) -> None:
            message = decode(data)
            if (
                message is not None
                and message.kind in (RequestKind.FIND, RequestKind.INDEX)
                and not message.flags & 1
            ):
                contacts = pack_contacts([Contact(bytes([n]) * 20, VICTIM) for n in range(1, 9)])
                found = [contacts] if message.kind == RequestKind.FIND else [b"", b"", 0, bytes(8), contacts]
                stranger.answer(message, addr, stranger.identities[0], found)
            else:
                answer(data, addr)

        stranger.datagram_received = lie  # type: ignore[method-assign]
        books = Books(net, {stranger.address})
        contact = await made[0][0].node.ping(stranger.address)
        assert contact is None  # an address that nobody named is not even asked
        made[0][0].node.rpc.ledger.told(stranger.address, 400)
        assert await made[0][0].node.ping(stranger.address) is not None
        for _ in range(20):
            await made[0][0].node.find(bytes([7]) * 20)
            await asyncio.sleep(2.0)
        assert books.came > 0
        assert books.drawn <= 3 * books.came, books.kinds

    run(scenario())


def test_a_ledger_forgets_no_honest_address_for_a_flood() -> None:
    """Ten thousand addresses of one source, or of one network, that prove themselves take its places only."""
    ledger = AddressLedger(lambda: 0.0)
    ledger.proved(("192.0.2.1", PORT), b"p" * 20)
    for port in range(1, 10_001):
        ledger.proved(("198.51.100.7", port), b"s" * 20)
        ledger.proved((f"2001:db8:0:{port:x}::1", PORT), b"s" * 20)
    assert ledger.is_home(("192.0.2.1", PORT), b"p" * 20)
    assert len(ledger._proved) <= 1 + MAX_PROVED_OF_SOURCE + MAX_PROVED_OF_NETWORK
    for port in range(1, 20_000):
        ledger.told(("203.0.113.1", port), 1)
    assert ledger.is_home(("192.0.2.1", PORT), b"p" * 20)
    assert not ledger.spend(("203.0.113.1", 19_999), 4)
    assert ledger.spend(("203.0.113.1", 19_999), 3)


# ------------------------------------------------------------------------------------------- under load


def test_a_flood_of_spoofed_questions_costs_no_signatures() -> None:
    """Of 5,000 questions at once from as many addresses that ask for a proof, a few hundred are answered with
    one, the rest with a token alone; who repeats the question with its token is served meanwhile.
    """

    async def scenario() -> None:
        net = network(42)
        node, other = await net.start(address=home(1)), await net.start(address=home(2))
        signed: list[bytes] = []
        sign = node.identity.sign
        node.identity.sign = lambda message: (signed.append(message), sign(message))[1]  # type: ignore[method-assign]
        asked = pack_address(home(1))
        data = encode(RequestKind.PING, Flag.PROVE, b"t" * 8, b"s" * 20, bytes(8), [], asked=asked)
        for number in range(5000):
            node.node.rpc.datagram_received(data, (f"100.64.{number // 250}.{number % 250 + 1}", PORT))
        assert len(signed) <= serving.STRANGERS_AT_ONCE
        other.node.rpc.ledger.proved(home(1))
        assert await other.node.ping(home(1)) is not None
        assert len(signed) <= serving.STRANGERS_AT_ONCE + 2

    run(scenario())


def test_a_mute_stranger_holds_up_no_check() -> None:
    """Somebody with a hundred addresses of one network that knocks and never answers leaves room for others
    to be checked, and listed, at once.
    """

    async def scenario() -> None:
        net = network(43)
        node = await net.start(address=home(1))
        for number in range(1000):
            source = (f"198.51.100.{number % 250 + 1}", 1000 + number)
            token = node.node.rpc.token_for(source)
            data = encode(RequestKind.FIND, 0, b"t" * 8, number.to_bytes(20, "big"), token, [KEY])
            node.node.rpc.datagram_received(data, source)
        assert len(node.node._checking) <= 16
        await net.start([f"{home(1)[0]}:{PORT}"], address=home(2))
        await until(lambda: node.contacts == 1, 1.0)

    run(scenario())


@pytest.mark.parametrize("steps", [1, 255])
def test_a_beat_far_ahead_is_not_hashed(steps: int) -> None:
    """Anybody can send a beat that claims to be 255 links ahead: a few hashes are made for it, not 255."""

    async def scenario() -> None:
        net = network(44)
        made = await swarm(net, 2)
        member = made[1][0].node.store.lookup(KEY, made[0][0].identity.peer_id[:8])
        assert member is not None
        now, hashed = member.refresh, 0
        real = SignedRecord.accepts

        def accepts(self: SignedRecord, known: Refresh, refresh: Refresh) -> bool:
            nonlocal hashed
            hashed += refresh.step - known.step
            return real(self, known, refresh)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SignedRecord, "accepts", accepts)
            record = member.record
            refresh = Refresh(min(255, now.step + steps), b"0123456789")
            beat = Beat(KEY[:3], record.peer_id[:4], record.sequence, refresh, 0, b"dig")
            made[1][0].node.rpc.datagram_received(beat.encode(), VICTIM)
            assert hashed == (1 if steps == 1 else 0)
            heard = Heard(record.peer_id[:4], record.sequence, refresh, 0)
            beat = beat._replace(refresh=member.refresh, heard=(heard,))
            made[1][0].node.rpc.datagram_received(beat.encode(), VICTIM)
        assert hashed == (2 if steps == 1 else 0)  # what others pass on costs no more

    run(scenario())


def test_a_beat_that_was_changed_on_its_way_counts_for_nothing() -> None:
    """In a closed run nobody without the run key changes what a beat says, nor says anything with the link of
    somebody else's chain that a beat reveals.
    """

    async def scenario() -> None:
        net = network(45)
        made = await swarm(net, 2, Authority.new(RUN))
        (_, speaker), (listener, view) = made
        pulse, told = speaker._pulse, view._roster.members[made[0][0].identity.peer_id]
        assert pulse._publication._chain.reveal() is not None
        genuine = decode_beat(pulse._own_beat(0.0))
        assert genuine is not None
        before = told.held.refresh
        assert genuine.refresh.step > before.step
        for changed in (genuine._replace(flags=genuine.flags ^ 1), genuine._replace(digest=b"dig")):
            for tag in (genuine.tag, b"", bytes(TAG_BYTES)):
                listener.node.rpc.datagram_received(changed.encode() + tag, VICTIM)
                assert told.held.refresh == before
        listener.node.rpc.datagram_received(genuine.encode() + genuine.tag, home(1))
        assert told.held.refresh == genuine.refresh

    run(scenario())


async def test_names_that_strangers_announce_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten thousand host names, looked up by a resolver that does not answer, a few are asked for at once,
    each off the loop; those that were answered are remembered up to a limit.
    """
    release = asyncio.Event()
    loop, asked = asyncio.get_running_loop(), 0

    def slow(host: str, *rest: Any, **options: Any) -> list[Any]:
        nonlocal asked
        asked += 1
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30.0)
        return [(2, 2, 17, "", ("192.0.2.7", 0))]

    found = asyncio.Event()
    names = Names(time.monotonic, found.set)
    monkeypatch.setattr("p2pavg.membership.names.socket.getaddrinfo", slow)
    for number in range(10_000):
        assert not names.numeric(f"{number}.example.org")
    assert len(names._looking) <= 8
    assert asked <= MAX_LOOKUPS
    release.set()
    async with asyncio.timeout(30.0):
        while not names.numeric("0.example.org"):
            found.clear()
            await found.wait()
    assert names.numeric("0.example.org") == ["192.0.2.7"]
    for number in range(2 * MAX_NAMES):
        names._keep(f"{number}.example.net", ["192.0.2.8"])
    assert len(names._known) <= MAX_NAMES
    assert names.numeric("192.0.2.9") == ["192.0.2.9"]


# ------------------------------------------------------------------------------------------- a key of a run


def test_a_key_that_strangers_fill_has_room_for_others() -> None:
    """Records of one network that fill a key, or the whole store, give way to those of other networks."""
    for options in ({"max_records_per_key": 50}, {"max_records": 50}):
        store = RecordStore(**options)
        for n in range(80):
            record = record_at(Identity.generate(), value=b"%d" % n)
            store.offer(record, Refresh(0, record.anchor), 300.0, 0.0, proved_at=("198.51.100.7", n + 1))
        for n in range(40):
            record = record_at(Identity.generate(), value=b"%d" % n)
            outcome = store.offer(record, Refresh(0, record.anchor), 300.0, 0.0, proved_at=home(n))
            assert outcome is Outcome.NEW
        assert len(store) == 50
        own = [held for held in store.live(KEY, 1.0) if held.proved_at and held.proved_at[1] == PORT]
        assert len(own) == 40


def test_a_closed_key_under_attack() -> None:
    """With 8,192 strangers' records under a run's key, at members and at those who only keep the table, and
    20,000 identities ground to be closest to the members, newcomers and members see each other within ten
    seconds, and nobody of the members leaves a view.
    """

    async def scenario() -> None:
        net = network(50)
        authority = Authority.new(RUN)
        made = await swarm(net, 6, authority)
        run_of = ClosedRun(authority.member())
        key = key_of("closed run", RUN, run_of.run_key)
        bystanders = [await net.start([f"{home(1)[0]}:{PORT}"], address=home(100 + n)) for n in range(2)]
        await asyncio.sleep(10.0)
        junk = []
        for _ in range(8192):
            identity = Identity.generate()
            junk.append(
                sign_record(
                    identity, key, b"x" * 100, incarnation=1, sequence=1, lifetime=300.0, anchor=bytes(10)
                )
            )
        for node in [made[0][0], made[3][0], *bystanders]:
            taken = Counter(
                node.node.store.offer(
                    record,
                    Refresh(0, record.anchor),
                    300.0,
                    node.clock(),
                    proved_at=(f"198.51.{n % 32}.7", n + 1),
                )
                for n, record in enumerate(junk)
            )
            assert taken[Outcome.FOREIGN] == (0 if node in bystanders else 8192)
        roster = made[0][1]._roster
        for number in range(20_000):  # each would have the best place in a sample
            sealed = b"s" * 12 + number.to_bytes(4, "big") * 20
            record = SignedRecord(
                key, bytes(32), number.to_bytes(20, "big"), 1, 1, 300.0, bytes(10), sealed, b""
            )
            assert not made[0][1]._is_ours(record)
        assert len(roster) == 5
        for number, way in ((60, 2), (61, 100)):
            newcomer, view = await join(net, number, [way], credentials=authority.member())
            peer_id = newcomer.identity.peer_id
            everybody = {dht.identity.peer_id for dht, _ in made}
            await until(lambda: everybody <= view.peers.keys(), 10.0)  # noqa: B023
            await until(lambda: all(peer_id in other.peers for _, other in made), 10.0)  # noqa: B023
            made.append((newcomer, view))
        assert all(len(view.peers) == len(made) - 1 for _, view in made)

    run(scenario())


@pytest.mark.parametrize("vouched", [True, False])
def test_a_view_holds_whom_the_authority_vouches_for(vouched: bool) -> None:
    """Somebody who has the run key, and not the authority's word for its identity, is in no view."""

    async def scenario() -> None:
        net = network(51)
        authority = Authority.new(RUN)
        made = await swarm(net, 3, authority)
        member = authority.member()
        if not vouched:
            member = type(member)(
                RUN, Identity.generate(), member.certificate, member.authority, member.run_key, member.word
            )
        other, _ = await join(net, 8, [1], credentials=member)
        await asyncio.sleep(30.0)
        for _, view in made:
            assert (other.identity.peer_id in view.peers) == vouched

    run(scenario())


# -------------------------------------------------------------------------------------------- revocation


def test_a_revoked_member_leaves_every_view_within_seconds() -> None:
    """Whom the authority revokes at one member is in nobody's view after two seconds, is told so itself, and
    stays out, also of the views of members that come later; nobody else can revoke.
    """

    async def scenario() -> None:
        net = network(52)
        authority = Authority.new(RUN)
        made = await swarm(net, 8, authority)
        told: dict[int, list[bytes]] = {n: [] for n in range(8)}
        for n, (_, view) in enumerate(made):
            view.on_revoked = told[n].extend
        gone = made[5][0].identity.peer_id
        forged = Authority.new(RUN).revoke([gone]).revoked
        await made[1][1].revoke(forged)
        await asyncio.sleep(5.0)
        assert all(gone in view.peers for n, (_, view) in enumerate(made) if n != 5)
        revoked = authority.revoke([gone])
        assert await made[1][1].revoke(revoked.revoked) == 7
        await until(lambda: all(gone not in view.peers for n, (_, view) in enumerate(made) if n != 5), 2.0)
        await until(lambda: told[5] == [gone], 2.0)
        for _ in range(60):
            await asyncio.sleep(1.0)
            assert all(gone not in view.peers for n, (_, view) in enumerate(made) if n != 5)
        _, late = await join(net, 9, [3], credentials=authority.member())
        await until(lambda: late.is_revoked(gone), 5.0)
        assert gone not in late.peers

    run(scenario())


def test_a_long_list_of_former_members_travels_in_pages() -> None:
    """Eighty revocations, of which a datagram holds eleven, reach a member that joins after them."""

    async def scenario() -> None:
        net = network(53)
        authority = Authority.new(RUN)
        made = await swarm(net, 2, authority)
        ids = [Identity.generate().peer_id for _ in range(80)]
        statements = authority.revoke(ids).revoked
        assert len(authority.revoke(ids).revoke(ids).revoked) == len(statements) > 7 * PAGE_BYTES
        await made[0][1].revoke(statements)
        _, late = await join(net, 9, [2], credentials=authority.member())
        await until(lambda: all(late.is_revoked(peer_id) for peer_id in ids), 5.0)
        assert all(made[1][1].is_revoked(peer_id) for peer_id in ids)

    run(scenario())
