"""Strangers with hundreds of free identities, in virtual time: what they cannot make a member believe."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from p2pavg.bench.dht.simulation import Network, simulate
from p2pavg.credentials import Authority, Credentials
from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View, key_of
from p2pavg.membership.table.address import Address, pack_address
from p2pavg.membership.table.record import Chain, Refresh, SignedRecord, sign_record, to_store
from p2pavg.membership.table.records.entries import Outcome
from p2pavg.membership.table.records.store import RecordStore
from p2pavg.membership.table.whereabouts import Whereabouts
from p2pavg.membership.table.wire import Contact, Flag, Message, RequestKind, decode, encode

RUN, KEY = "r", key_of("run", "r")
ONE_WAY = 0.02
PORT = 31330
FORGED = "203.0.113.66"


def run(work: Coroutine[Any, Any, None]) -> None:
    simulate(work)


def network(seed: int) -> Network:
    made = Network(seed=seed)
    made.delay = lambda source, destination: ONE_WAY
    return made


async def until(condition: Callable[[], bool], limit: float) -> float:
    """Virtual seconds until `condition` holds; fails after `limit`."""
    time = asyncio.get_running_loop().time
    start = time()
    while not condition():
        assert time() - start < limit, "still not so"
        await asyncio.sleep(0.01)
    return time() - start


def home(number: int) -> Address:
    """Where the node of this number lives: in a public network of its own."""
    return f"192.1.{number}.1", PORT


async def join(
    net: Network, number: int, ways_in: Sequence[int] = (), *, credentials: Credentials | None = None
) -> tuple[DHT, View]:
    """A member that does not know its address, in its run."""
    identity = None if credentials is None else credentials.identity
    names = [f"{home(way)[0]}:{PORT}" for way in ways_in]
    dht = await net.start(names, address=home(number), host="0.0.0.0", identity=identity)
    view = View(dht, RUN, credentials=credentials)
    await view.refresh_now()
    await view.announce(PeerInfo(dht.identity.peer_id, ((home(number)[0], PORT),)))
    return dht, view


async def swarm(net: Network, count: int, authority: Authority | None = None) -> list[tuple[DHT, View]]:
    """Members 1 to `count`, who have links with each other: each joined through the first."""
    made: list[tuple[DHT, View]] = []
    for number in range(1, count + 1):
        credentials = None if authority is None else authority.member()
        made.append(await join(net, number, [1] if made else [], credentials=credentials))
    ids = [dht.identity.peer_id for dht, _ in made]
    for dht, view in made:
        dht.observers = lambda view=view: view.contacts(ids)  # type: ignore[misc]
    await until(lambda: all(len(view.peers) == count - 1 for _, view in made), 10.0)
    return made


class Stranger(asyncio.DatagramProtocol):
    """Many identities at one socket. To who asks it, it proves each in turn, and says that it sees a forged
    address.
    """

    def __init__(self, net: Network, address: Address, identities: int = 1) -> None:
        self.identities = [Identity.generate() for _ in range(identities)]
        self.net, self.address = net, address
        self.tokens: dict[Address, bytes] = {}
        self.turn = deque(self.identities)
        self.received: list[Message] = []
        net.plug(address, self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing to do."""

    def ask(
        self, target: Address, kind: RequestKind, body: list[Any], identity: Identity | None = None
    ) -> None:
        """One request, with the token that the target gave, if it did."""
        sender = (identity or self.identities[0]).peer_id
        token = self.tokens.get(target, bytes(8))
        data = encode(kind, 0, b"t" * 8, sender, token, body, pad_to=0 if any(token) else 400)
        self.net.send(data, self.address, target)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Answer what asks for a proof, as the next of the identities."""
        message = decode(data)
        if message is None:
            return
        self.received.append(message)
        if message.flags & Flag.ANSWER:
            self.tokens[addr] = message.token
        elif message.kind == RequestKind.PING:
            self.answer(message, addr, self.turn[0], [pack_address((FORGED, PORT))])
            self.turn.rotate(-1)
        elif message.kind == RequestKind.DIAL:
            self.answer(message, addr, self.turn[0], [1])

    def answer(self, message: Message, addr: Address, identity: Identity, body: list[Any]) -> None:
        """With a proof, where one is asked for."""
        bare = encode(message.kind, Flag.ANSWER, message.transaction, identity.peer_id, b"k" * 8, body)
        told = cast(Message, decode(bare))
        flags, proof = Flag.ANSWER | message.flags & Flag.TRY, b""
        if message.flags & Flag.PROVE:
            proof = identity.public_key + identity.sign(told.to_prove(message.asked, message.sender))
            flags |= Flag.PROOF
        data = encode(message.kind, flags, message.transaction, identity.peer_id, b"k" * 8, body, proof=proof)
        self.net.send(data, self.address, addr)


# ------------------------------------------------------------------------------------- where a member is


@pytest.mark.parametrize("closed", [False, True])
def test_strangers_do_not_change_what_a_member_announces(closed: bool) -> None:
    """64 identities from one socket that knock, prove themselves, and say that they see a member at a forged
    address, change nothing that anybody announces; nobody writes to the forged address.
    """

    async def scenario() -> None:
        net = network(1)
        made = await swarm(net, 5, Authority.new(RUN) if closed else None)
        forged_at: list[float] = []
        deliver = net.send

        def spy(data: bytes, source: Address, destination: Address) -> None:
            if destination[0] == FORGED:
                forged_at.append(asyncio.get_running_loop().time())
            deliver(data, source, destination)

        net.send = spy  # type: ignore[method-assign]
        stranger = Stranger(net, ("198.51.100.7", 4000), 64)
        for _ in range(3):
            for identity, (dht, _) in itertools.product(stranger.identities, made):
                stranger.ask(home(_number(dht)), RequestKind.FIND, [KEY], identity)
                await asyncio.sleep(0.005)
        for dht, _ in made:
            dht.review_address()
        await asyncio.sleep(90.0)
        for dht, view in made:
            assert dht.external_addresses() == [home(_number(dht))]
            assert all(info.addresses == (home(_number_of(info)),) for info in view.peers.values())
        assert not forged_at
        assert not any(destination[0] == FORGED for _, destination in net.dials)
        newcomer, _ = await join(net, 9, [2])
        assert newcomer.external_addresses() == [home(9)]

    run(scenario())


def _number(dht: DHT) -> int:
    return int(dht.node.whereabouts.hosts[0].split(".")[2]) if dht.node.whereabouts.hosts else 1


def _number_of(info: PeerInfo) -> int:
    return int(info.addresses[0][0].split(".")[2])


def test_a_member_whose_address_changes_announces_the_new_one() -> None:
    """A machine that gets another address, where others reach it, is announced there within ten seconds."""

    async def scenario() -> None:
        net = network(2)
        made = await swarm(net, 5)
        dht, view = made[3]
        net.unplug(home(4))
        net.plug(home(44), dht.node.rpc)
        dht.review_address()
        await until(lambda: dht.external_addresses() == [home(44)], 10.0)
        seen = dht.identity.peer_id
        announced = lambda other: other.peers[seen].addresses == (home(44),)  # noqa: E731
        view._own = PeerInfo(seen, (home(4),))
        view._found_addresses = (home(4),)
        await until(lambda: all(announced(other) for _, other in made if other is not view), 10.0)

    run(scenario())


def test_an_address_that_others_cannot_reach_is_not_announced() -> None:
    """Where most see a member counts only once they opened a connection there."""

    async def scenario() -> None:
        net = network(3)
        made = await swarm(net, 5)
        dht, _ = made[3]
        net.unplug(home(4))
        net.plug(home(44), dht.node.rpc)

        async def refused(source: Address, host: str, port: int) -> bool:
            return host != home(44)[0]

        for other, _ in made:
            other._dialler._connect = lambda host, port: refused(home(1), host, port)
        before = dht.external_addresses()
        dht.review_address()
        await asyncio.sleep(10.0)
        assert dht.external_addresses() == before

    run(scenario())


def liars(net: Network, dht: DHT, count: int) -> list[Stranger]:
    """Strangers of so many networks with links to a member: all say that it is at a forged address, and that
    they reach it there.
    """
    made = [Stranger(net, (f"198.51.{number}.7", PORT)) for number in range(1, count + 1)]
    honest = dht.observers()
    contacts = [Contact(each.identities[0].peer_id, each.address) for each in made]
    for each in made:
        dht.node.rpc.ledger.proved(each.address)
    dht.observers = lambda: [*honest, *contacts]
    return made


@pytest.mark.parametrize("led_back", [True, False])
def test_strangers_of_most_networks_give_no_address_to_who_reaches_itself(led_back: bool) -> None:
    """Voices of more networks than the honest ones', which also say that they reach a member at a forged
    address, change nothing while that member's own questions come back to it from its true one. Where its
    router does not lead them back, its true address stays announced.
    """

    async def scenario() -> None:
        net = network(11)
        made = await swarm(net, 4)
        dht, _ = made[1]
        net.reaches = lambda source, destination: led_back or source != destination
        await until(lambda: len(dht.node.whereabouts.voices) >= 2, 30.0)
        made_up = liars(net, dht, 9)
        dht.review_address()
        await asyncio.sleep(20.0)
        assert len(dht.node.whereabouts.witnesses(FORGED)) == len(made_up)
        assert home(2) in dht.external_addresses()
        assert ((FORGED, PORT) in dht.external_addresses()) is not led_back

    run(scenario())


def test_a_member_with_two_addresses_announces_both() -> None:
    """Who reaches itself where two networks see it, and where three do, is announced at both."""

    async def scenario() -> None:
        net = network(12)
        made = await swarm(net, 6)
        dht, _ = made[1]
        both, deliver = (home(2), home(44)), net.send
        net.plug(home(44), dht.node.rpc)
        net.send = lambda data, source, destination: deliver(  # type: ignore[method-assign]
            data, destination if source in both and destination in both else source, destination
        )
        for number, (other, _) in enumerate(made, 1):
            if other is not dht:
                await dht.node.ping(home(number))
                seen = home(2 if number <= 3 else 44)[0]
                dht.node.whereabouts.silent(other.identity.peer_id)
                dht.node.whereabouts.heard(Contact(other.identity.peer_id, home(number)), seen)
        assert dht.node.whereabouts.confirmed() == [home(2)[0]]
        dht.is_dialled = lambda: True
        await dht._adopt_candidate()
        assert set(dht.external_addresses()) == {home(2), home(44)}

    run(scenario())


def test_voices_are_counted_by_network_and_kept_by_who_answers() -> None:
    """Whoever comes second from a network has no voice till the first is silent; half of them change nothing;
    an address over which links come in stays beside a new one.
    """
    where = Whereabouts()
    observers = [Contact(bytes([n]) * 20, (f"192.1.{n}.1", PORT)) for n in range(4)]
    for observer in observers:
        where.heard(observer, "9.9.9.9")
    for n in range(100, 200):
        where.heard(Contact(bytes([n]) * 20, (f"192.1.0.{n}", PORT)), FORGED)
    assert not where.witnesses(FORGED)
    for observer in observers[:2]:
        where.heard(observer, FORGED)
    assert where.candidate([]) is None
    assert where.candidate([FORGED]) == FORGED  # this machine has it
    where.heard(observers[2], FORGED)
    assert where.candidate([]) == FORGED
    where.adopt(FORGED, keep=True)
    assert where.hosts == ["9.9.9.9", FORGED]
    where.silent(observers[3].id)
    assert len(where.voices) == 3
    where.adopt(FORGED, keep=False)
    assert where.hosts == [FORGED]


# ---------------------------------------------------------------------------------------------- relays


class Relay(asyncio.DatagramProtocol):
    """Passes what it is asked on to who owns an identity, and the answers back: it stands in for them."""

    def __init__(self, net: Network, address: Address) -> None:
        self.net, self.address = net, address
        self.asked: dict[bytes, Address] = {}
        self.target: Address = ("", 0)
        net.plug(address, self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing to do."""

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Answers go back to who asked, all else on to the target."""
        message = decode(data)
        if message is not None and message.flags & Flag.ANSWER and message.transaction in self.asked:
            self.net.send(data, self.address, self.asked[message.transaction])
        elif message is not None:
            self.asked[message.transaction] = addr
            self.net.send(data, self.address, self.target)


@pytest.mark.parametrize("public", [False, True])
def test_a_relay_moves_no_contact(public: bool) -> None:
    """A relay that knocks in the name of each of a node's contacts, and passes its questions on to them,
    moves none of them to its own address; to a newcomer it does not stand in for those that know theirs.
    """

    async def scenario() -> None:
        net = network(4)
        place = (lambda n: home(n)) if public else (lambda n: (f"10.0.0.{n}", PORT))
        nodes = [await net.start(address=place(1))]
        nodes += [await net.start([f"{place(1)[0]}:{PORT}"], address=place(n)) for n in range(2, 18)]
        await asyncio.sleep(30.0)
        victim = nodes[4]
        before = {contact.id: contact.address for contact in victim.node.contacts}
        assert len(before) >= victim.node.k  # a bucket, which is split when one more is met
        relay = Relay(net, place(100))
        there = {dht.identity.peer_id: place(n) for n, dht in enumerate(nodes, 1)}
        for peer_id in before:
            relay.target = there[peer_id]
            await victim.node.meet(relay.address)
            await victim.node.meet(relay.address, expected=peer_id)
            await asyncio.sleep(5.0)
        after = {contact.id: contact.address for contact in victim.node.contacts}
        assert before.items() <= after.items()
        assert relay.address not in after.values()
        newcomer = await net.start(address=place(101))
        for peer_id in before:
            relay.target = there[peer_id]
            newcomer.node.rpc.ledger.proved(relay.address)
            await newcomer.node.meet(relay.address, expected=peer_id)
        taken = [contact for contact in newcomer.node.contacts if contact.address == relay.address]
        assert len(taken) <= (0 if public else 1)

    run(scenario())


@pytest.mark.parametrize("announced", ["198.51.100.1", "peer.example.org", ""])
def test_a_node_signs_for_the_address_that_it_announces(announced: str) -> None:
    """A node that two networks see at one public address is met at another if it announces that, or a name,
    and is not met there when it announces neither.
    """

    async def scenario() -> None:
        net = network(9)
        other = ("198.51.100.1", PORT)
        node = await net.start(address=other, host="0.0.0.0")
        for n in (1, 2):
            node.node.whereabouts.heard(Contact(bytes([n]) * 20, home(n)), home(3)[0])
        node.node.announced = frozenset([announced] if announced else [])
        asker = await net.start(address=home(4))
        asker.node.rpc.ledger.proved(other)
        assert (await asker.node.ping(other) is not None) == bool(announced)

    run(scenario())


def test_a_contact_that_is_gone_is_found_where_it_went() -> None:
    """Who answers at its old place no more, and proves itself at a new one, is listed there soon."""

    async def scenario() -> None:
        net = network(5)
        first = await net.start(address=home(1))
        second = await net.start([f"{home(1)[0]}:{PORT}"], address=home(2))
        await until(lambda: first.contacts == 1, 5.0)
        net.unplug(home(2))
        net.plug(home(22), second.node.rpc)
        second.node.bound = home(22)
        await second.node.ping(home(1))
        await second.node.find(second.identity.peer_id)
        await until(lambda: [c.address for c in first.node.contacts] == [home(22)], 10.0)

    run(scenario())


@pytest.mark.parametrize("from_where", ["asked", "elsewhere"])
def test_an_answer_counts_from_where_it_was_asked(from_where: str) -> None:
    """Whoever sees a question, and answers it from another address, is not believed."""

    async def scenario() -> None:
        net = network(6)
        asker, answerer = await net.start(address=home(1)), await net.start(address=home(2))
        asker.node.rpc.ledger.proved(home(2))
        deliver = net.send

        def rewrite(data: bytes, source: Address, destination: Address) -> None:
            elsewhere = source == home(2) and from_where == "elsewhere"
            deliver(data, home(3) if elsewhere else source, destination)

        net.send = rewrite  # type: ignore[method-assign]
        found = await asker.node.ping(home(2))
        assert (found is None) == (from_where == "elsewhere")
        assert found is None or found.id == answerer.identity.peer_id

    run(scenario())


# --------------------------------------------------------------------------------------------- replays


def _record(publisher: Identity, value: bytes = b"v") -> SignedRecord:
    return sign_record(publisher, KEY, value, incarnation=1, sequence=1, lifetime=15.0, anchor=Chain().anchor)


@pytest.mark.parametrize("who", ["publisher", "stranger"])
def test_only_its_publisher_brings_a_record(who: str) -> None:
    """A right record that somebody else sends, with a token and a signature of its own, is not taken by a
    node that never saw it.
    """

    async def scenario() -> None:
        net = network(7)
        holder = await net.start(address=home(1))
        publisher, other = Identity.generate(), Identity.generate()
        record = _record(publisher)
        token = holder.node.rpc.token_for(home(2))
        signed = to_store(holder.identity.peer_id, token, KEY)
        by, sender = (publisher, publisher) if who == "publisher" else (other, publisher)
        body = [record.encoded, 0, record.anchor, 15000, by.sign(signed)]
        stranger = Stranger(net, home(2))
        stranger.tokens[home(1)] = token
        stranger.ask(home(1), RequestKind.STORE, body, sender)
        await asyncio.sleep(1.0)
        assert len(holder.known(KEY)) == (1 if who == "publisher" else 0)

    run(scenario())


def test_a_dead_peer_is_not_shown_on_the_word_of_a_stranger() -> None:
    """A node that serves the record of a peer that died long ago brings it into no view, old or new."""

    async def scenario() -> None:
        net = network(8)
        made = await swarm(net, 3)
        dead, view = await join(net, 7, [1])
        held = dead.node.store.lookup(KEY, dead.identity.peer_id[:8])
        assert held is not None
        record, refresh = held.record, held.refresh
        view.close()
        await dead.stop()
        gone = dead.identity.peer_id
        await until(lambda: all(gone not in other.peers for _, other in made), 20.0)
        await asyncio.sleep(700.0)  # tombstones are forgotten
        liar = await net.start([f"{home(1)[0]}:{PORT}"], address=home(8))
        liar.node.store.offer(record, refresh, 300.0, liar.clock(), proved_at=home(7))
        for other, _ in made:
            await other.node.ping(home(8))
        newcomer, seen = await join(net, 9, [8])
        for _ in range(20):
            await asyncio.sleep(1.0)
            assert gone not in seen.peers
            assert all(gone not in other.peers for _, other in made)
        assert {dht.identity.peer_id for dht, _ in made} <= seen.peers.keys()
        await newcomer.stop()

    run(scenario())


@pytest.mark.parametrize("way_in", ["member", "other"])
def test_a_peer_that_answers_no_stranger_is_shown_to_each_newcomer(way_in: str) -> None:
    """Members vouch for one behind a NAT, whichever word comes first: theirs of it, or theirs of themselves;
    also where the way in belongs to no member.
    """

    async def scenario() -> None:
        net, hidden, asked = network(9), home(7), set[Address]()

        def reaches(source: Address, destination: Address) -> bool:
            if source == hidden:
                asked.add(destination)
            return destination != hidden or source in asked

        net.reaches = reaches
        other = await net.start([], address=home(6))
        made = [await join(net, 1, [6])]
        made += [await join(net, number, [1]) for number in (2, 3)]
        behind = await net.start([f"{home(1)[0]}:{PORT}"], address=hidden, host="0.0.0.0", client_only=True)
        view = View(behind, RUN)
        await view.refresh_now()
        await view.announce(PeerInfo(behind.identity.peer_id, (hidden,), client_only=True))
        everybody = {dht.identity.peer_id for dht in (behind, *(dht for dht, _ in made))}
        await until(lambda: all(len(each.peers) == 3 for _, each in made), 20.0)
        net.delay = lambda source, destination: ONE_WAY * 10 ** net.rng.uniform(-1, 1)
        way = home(1) if way_in == "member" else other.node.bound
        for number in range(20, 100):
            watcher = await net.start([f"{way[0]}:{PORT}"], address=home(number), client_only=True)
            seen = View(watcher, RUN)
            await seen.refresh_now()
            await until(lambda: seen.peers.keys() == everybody, 4.5)  # noqa: B023
            seen.close()
            await watcher.stop()
            await asyncio.sleep(net.rng.random())

    run(scenario())


def test_a_captured_link_wakes_no_record() -> None:
    """A later link of the chain extends a record that lives; one that expired its publisher brings itself."""
    store, publisher, chain = RecordStore(), Identity.generate(), Chain()
    record = sign_record(publisher, KEY, b"v", incarnation=1, sequence=1, lifetime=15.0, anchor=chain.anchor)
    store.offer(record, chain.last, 15.0, 0.0, proved_at=home(1))
    prefix, first, second = publisher.peer_id[:8], chain.reveal(), chain.reveal()
    assert first is not None
    assert second is not None
    assert store.refresh(KEY, prefix, record.version, first, 15.0, 10.0) is Outcome.REFRESHED
    assert store.refresh(KEY, prefix, record.version, second, 15.0, 30.0) is Outcome.UNKNOWN
    assert store.offer(record, second, 15.0, 31.0) is Outcome.REFRESHED
    held = store.lookup(KEY, prefix)
    assert held is not None
    assert held.proved_at is None  # so that a view asks the peer before it shows it again
    assert Refresh(*second) == held.refresh


def test_a_captured_link_shows_no_dead_peer_on_an_old_word() -> None:
    """What members said of a peer before it died counts no more when a stranger brings a later link of it."""

    async def scenario() -> None:
        net = network(8)
        made = await swarm(net, 3)
        dead, view = await join(net, 7, [1])
        gone = dead.identity.peer_id
        watcher = await net.start([f"{home(1)[0]}:{PORT}"], address=home(20), client_only=True)
        seen = View(watcher, RUN)
        await seen.refresh_now()
        await until(lambda: gone in seen.peers, 5.0)
        publication = dead.publication(KEY)
        record = publication.record
        assert record is not None
        publication.advance(record.value, record.lifetime)
        later = publication.refresh  # nobody but the stranger has it
        view.close()
        await dead.stop()
        everybody = [*(other for _, other in made), seen]
        await until(lambda: all(gone not in other.peers for other in everybody), 40.0)
        await asyncio.sleep(5.0)
        liar = await net.start([f"{home(1)[0]}:{PORT}"], address=home(8))
        liar.node.store.offer(record, later, 300.0, liar.clock(), proved_at=home(7))
        for dht in (watcher, *(dht for dht, _ in made)):
            await dht.node.ping(home(8))
        for _ in range(60):
            await asyncio.sleep(1.0)
            assert all(gone not in other.peers for other in everybody)

    run(scenario())


def test_a_chain_of_strangers_that_vouch_for_each_other_holds_up_nothing() -> None:
    """Each of 700 strangers says that the next one has proven itself; at last the first one does."""

    async def scenario() -> None:
        net = network(1)
        dht, view = await join(net, 1)
        rank = view._roster._rank
        chain = sorted((Identity.generate() for _ in range(700)), key=lambda one: -rank(one.peer_id[:8]))
        store = dht.node.store
        for number, one in enumerate(chain):
            links, info = Chain(), PeerInfo(one.peer_id, (home(2 + number % 200),))
            record = sign_record(
                one, KEY, info.encode(), incarnation=1, sequence=1, lifetime=15.0, anchor=links.anchor
            )
            before = chain[number - 1].peer_id if number else b"?" * 20
            store.offer(record, links.last, 15.0, dht.clock(), told_at=home(2), told_by=before)
        first = store.lookup(KEY, chain[0].peer_id[:8])
        assert first is not None
        store.prove(first, home(2))
        assert len(view.peers) == 1
        await until(lambda: chain[1].peer_id in view.peers, 1.0)

    run(scenario())
