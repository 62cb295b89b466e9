"""One node of the overlay: it answers requests, keeps its contacts, and finds the nodes closest to a key."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from p2pavg.identity import PEER_ID_BYTES, Identity, short_id
from p2pavg.membership.table.address import (
    Address,
    interface_addresses,
    is_loopback,
    is_numeric,
    pack_address,
    unpack_address,
)
from p2pavg.membership.table.beat import Beat, decode_beat
from p2pavg.membership.table.lookup import Shortlist
from p2pavg.membership.table.record import KEY_BYTES
from p2pavg.membership.table.records.answers import RecordAnswers
from p2pavg.membership.table.records.entries import ENTRY_BYTES, PREFIX_BYTES, Outcome
from p2pavg.membership.table.records.store import RecordStore
from p2pavg.membership.table.routing import Contacts
from p2pavg.membership.table.rpc import Rpc
from p2pavg.membership.table.whereabouts import Whereabouts
from p2pavg.membership.table.wire import (
    CONTACT_BYTES,
    Contact,
    Flag,
    Message,
    RequestKind,
    matches,
    pack_contacts,
    unpack_contacts,
)
from p2pavg.networks import is_private, network_of

logger = logging.getLogger("p2pavg.membership")

PARALLEL = 6  # questions of one lookup at once
PARALLEL_READS = 9  # of one that somebody waits for: the dead take a while each
MAX_PENDING_CHECKS = 256
MAX_CHECKS_OF_NETWORK = 16
FETCH_PREFIXES = 16
ENTRIES_BYTES = 28 * PREFIX_BYTES  # of prefixes whose entries fit one datagram
LONGEST_SHUN_SECONDS = 60.0
NOT_DEAD = (0.0, 2.0)
MAX_LOST = 64

OnBody = Callable[[Contact, list[Any]], bool]
"""Takes what a contact answered; False when no correct node answers so."""


class Node:
    """All that a DHT does except publishing and reading: contacts, lookups, and service to others."""

    def __init__(self, identity: Identity, *, k: int, client_only: bool, clock: Callable[[], float]) -> None:
        self.identity = identity
        self.k = k
        self.store = RecordStore()
        self.clock = clock
        self.rpc = Rpc(identity, self, client_only=client_only, clock=clock)
        self.contacts = Contacts(identity.peer_id, k, self._is_alive)
        ledger, token_for = self.rpc.ledger, self.rpc.token_for
        self.answers = RecordAnswers(identity, self.store, self.contacts, k, ledger, token_for, clock)
        self.whereabouts = Whereabouts()
        self.bound: Address | None = (
            None  # where the socket is, when that is no wildcard; else its port alone
        )
        self.announced: frozenset[str] = frozenset()  # hosts, or their names, that this node's records name
        self.lost: OrderedDict[bytes, Contact] = OrderedDict()  # contacts that stopped answering
        self.on_new_contact: set[Callable[[], None]] = set()
        self.on_beat: dict[bytes, Callable[[Beat, Address], None]] = {}  # run tag -> who listens
        self.dial: Callable[[str, int], int] | None = None  # dials back who asks for it
        self.on_revoked: dict[bytes, Callable[[bytes, bytes], list[Any]]] = {}  # key -> who keeps its list
        self._checking: dict[Address, str] = {}  # -> the network whose share of checks it is
        self._dead: OrderedDict[Address, tuple[float, float]] = OrderedDict()  # shun until, for how long

    # asking others

    async def ping(
        self, address: Address, *, expected: bytes | None = None, tries: int = 4
    ) -> Contact | None:
        """The proven contact that answers at `address`, which becomes one of ours; None when nobody does."""
        return (await self.meet(address, expected=expected, tries=tries))[0]

    async def meet(
        self, address: Address, *, expected: bytes | None = None, tries: int = 4
    ) -> tuple[Contact | None, Address | None]:
        """Like `ping`; also where the contact says that it sees this node."""
        answer = await self.rpc.ask(address, RequestKind.PING, [], expected=expected, tries=tries)
        if answer is None or not matches(answer.body, bytes):
            return None, None
        contact = Contact(answer.sender, address)
        if contact.id != self.identity.peer_id:
            self._heard_from(contact)
        return contact, unpack_address(answer.body[0])

    async def ask_where(
        self, address: Address, *, expected: bytes | None = None, tries: int = 4
    ) -> Contact | None:
        """Ping an observer that this node chose; where it sees this node counts."""
        contact, seen_at = await self.meet(address, expected=expected, tries=tries)
        if contact is None:
            if expected is not None:
                self.whereabouts.silent(expected)
        elif contact.id != self.identity.peer_id and seen_at is not None:
            self.whereabouts.heard(contact, seen_at[0])
        return contact

    async def find(self, target: bytes, *, via: Iterable[Contact] = ()) -> list[Contact]:
        """The k live nodes closest to `target`, closest first; this node is not among them."""
        return await self.lookup(target, RequestKind.FIND, [target], lambda contact, body: True, via=via)

    async def lookup(
        self,
        target: bytes,
        kind: RequestKind,
        request: list[Any],
        on_body: OnBody,
        *,
        via: Iterable[Contact] = (),
    ) -> list[Contact]:
        """Ask the nodes closest to `target`, closer and closer; each answer ends with contacts closer to
        it.
        """
        parallel = PARALLEL if kind == RequestKind.FIND else PARALLEL_READS
        shortlist = Shortlist(target, self.identity.peer_id, self.k, parallel)
        shortlist.add([*self.contacts.nearest(target, 2 * self.k), *via])
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        asked_at: dict[bytes, float] = {}
        slowest_s = 0.0

        def advance(answered: bytes | None = None) -> None:
            nonlocal slowest_s
            if done.done():
                return
            if answered is not None:
                slowest_s = max(slowest_s, loop.time() - asked_at[answered])
            for contact in shortlist.next_to_ask():
                asked_at[contact.id] = loop.time()
                self._ask_in_lookup(contact, kind, request, shortlist, on_body, advance)
            if shortlist.finished and not done.done():
                done.set_result(None)
            elif answered is not None:
                for contact in shortlist.waits_for():
                    waited = loop.time() - asked_at[contact.id]
                    loop.call_later(self.rpc.hurry(contact.address, slowest_s) - waited, slow, contact.id)

        def slow(peer_id: bytes) -> None:
            if not done.done():
                shortlist.slow(peer_id)
                advance()

        advance()
        await done
        return shortlist.closest()

    def _ask_in_lookup(
        self,
        contact: Contact,
        kind: RequestKind,
        request: list[Any],
        shortlist: Shortlist,
        on_body: OnBody,
        advance: Callable[[bytes | None], None],
    ) -> None:
        def answered(message: Message | None) -> None:
            found = self._closer_contacts(message, contact)
            if message is None or found is None or not on_body(contact, message.body):
                shortlist.failed(contact.id)
                self.failed(contact)
                advance(None)
            else:
                shortlist.answered(contact.id)
                self._heard_from(contact)
                shortlist.add(found)
                advance(contact.id)

        def slow() -> None:
            shortlist.slow(contact.id)
            advance(None)

        self.rpc.call(contact.address, kind, request, answered, expected=contact.id, on_slow=slow)

    def _closer_contacts(self, message: Message | None, source: Contact) -> list[Contact] | None:
        if message is None or not message.body or type(message.body[-1]) is not bytes:
            return None
        contacts = unpack_contacts(message.body[-1], self.k)
        if contacts is None:
            return None
        now = self.clock()
        found = []
        for contact in contacts:
            self.rpc.ledger.told(contact.address, message.size / len(contacts))
            if is_loopback(contact.address[0]) and not is_loopback(source.address[0]):
                # "on my own machine", says a node that we see at another address
                contact = Contact(contact.id, (source.address[0], contact.address[1]))
            if self._dead.get(contact.address, NOT_DEAD)[0] <= now:
                found.append(contact)
        return found

    # contacts

    def failed(self, contact: Contact) -> None:
        """A contact did not answer any of several tries."""
        now = self.clock()
        shun = min(2 * self._dead.get(contact.address, NOT_DEAD)[1], LONGEST_SHUN_SECONDS)
        self._dead[contact.address] = (now + shun, shun)
        self._dead.move_to_end(contact.address)
        while len(self._dead) > 1024:
            self._dead.popitem(last=False)
        known = self.contacts.get(contact.id)
        if known is not None and known.address == contact.address:
            self.contacts.remove(contact.id)
            self.lost[contact.id] = contact
            if len(self.lost) > MAX_LOST:
                self.lost.popitem(last=False)
            logger.debug("lost contact %s at %s:%d", short_id(contact.id), *contact.address)

    def heard_late(self, contact: Contact) -> None:
        """A contact answered after all, when nobody waited for it any more."""
        self._heard_from(contact)

    def _heard_from(self, contact: Contact) -> None:
        """A contact proved itself at its address."""
        self._dead.pop(contact.address, None)
        self.lost.pop(contact.id, None)
        rivals = self.contacts.rivals(contact)
        if rivals:
            self._check(contact.address, self._replace(contact, rivals))
        elif self.contacts.add(contact):
            for listener in tuple(self.on_new_contact):
                listener()

    async def _replace(self, contact: Contact, rivals: list[Contact]) -> None:
        """Who moved is known at its old place while that answers: else anybody between could move it."""
        answers = await asyncio.gather(
            *(self.rpc.ask(rival.address, RequestKind.PING, [], expected=rival.id) for rival in rivals)
        )
        for rival, answer in zip(rivals, answers, strict=True):
            if answer is None and self.contacts.get(rival.id) == rival:
                self.contacts.remove(rival.id)
        if not self.contacts.rivals(contact) and self.contacts.add(contact):
            for listener in tuple(self.on_new_contact):
                listener()

    async def _is_alive(self, contact: Contact) -> bool:
        if await self.ping(contact.address, expected=contact.id) is None:
            self.failed(contact)
            return False
        return True

    def _check_sender(self, message: Message, address: Address) -> None:
        """A request came from somebody new, or from a new address: ask for a proof before listing it."""
        if message.sender == self.identity.peer_id:
            return
        known = self.contacts.get(message.sender)
        if message.flags & Flag.CLIENT_ONLY:
            if known is not None and known.address == address:
                self.contacts.remove(known.id)
            return
        if known is not None and known.address == address:
            return
        if self.rpc.is_proven(message.sender, address):
            self._heard_from(Contact(message.sender, address))
        else:
            self._check(address, self.ping(address, expected=message.sender))

    def _check(self, address: Address, work: Coroutine[Any, Any, object]) -> None:
        """Do a check of an address, unless there is one, or its network has its share of them under way."""
        network = network_of(address[0])
        share = MAX_PENDING_CHECKS if is_private(address[0]) else MAX_CHECKS_OF_NETWORK
        taken = Counter(self._checking.values())
        if address in self._checking or taken[network] >= share or taken.total() >= MAX_PENDING_CHECKS:
            work.close()
            return
        self._checking[address] = network
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._checking.pop(address, None))

    def lives_at(self, asked: Address, asker: Address) -> bool:
        """Whether this node may be at `asked`, where somebody asked it: else what it signs would help a relay
        to stand in for it. Behind a NAT it cannot know; it says no only when it does.
        """
        host, port = asked
        if is_loopback(host) and is_loopback(asker[0]):
            return self.bound is None or port == self.bound[1]
        if is_private(host) or host in self.announced or not all(map(is_numeric, self.announced)):
            return True
        known = [host for host in self._public_hosts() if (":" in host) == (":" in asked[0])]
        return not known or host in known or host in interface_addresses()

    def _public_hosts(self) -> list[str]:
        bound = [self.bound[0]] if self.bound is not None and self.bound[0] not in ("0.0.0.0", "::") else []
        return [host for host in bound or self.whereabouts.confirmed() if not is_private(host)]

    # answering others

    def handle(self, message: Message, address: Address, returnable: bool, room: int) -> list[Any] | None:
        """Answer one request; None for what no correct node sends."""
        answer = self._answer(message, address, returnable, room)
        if returnable:  # and what it asked may have proven who it is
            self._check_sender(message, address)
        return answer

    def _answer(self, message: Message, address: Address, returnable: bool, room: int) -> list[Any] | None:
        body = message.body
        match message.kind:
            case RequestKind.PING if not body:
                return [pack_address(address)]
            case RequestKind.FIND if matches(body, bytes) and len(body[0]) == PEER_ID_BYTES:
                return [self._contacts_for(body[0], message.sender, room)]
            case RequestKind.INDEX if matches(body, bytes, bytes, bytes) and len(body[0]) == KEY_BYTES:
                return self._index(body, message.sender, room)
            case RequestKind.FETCH if (
                matches(body, bytes, bytes) and len(body[1]) <= FETCH_PREFIXES * PREFIX_BYTES
            ):
                return self.answers.fetch(body[0], body[1], room)
            case RequestKind.ENTRIES if matches(body, bytes, bytes) and len(body[1]) <= ENTRIES_BYTES:
                return [self.answers.entries(body[0], body[1])]
            case RequestKind.DIAL if matches(body, int) and 0 < body[0] < 65536 and self.dial is not None:
                return [self.dial(address[0], body[0])] if returnable else None
            case RequestKind.STORE if matches(body, bytes, int, bytes, int, bytes):
                # a sender without our token may be anybody: it learns the token from this answer, and tries
                # again
                if not returnable:
                    return [int(Outcome.UNKNOWN), b""]
                return self.answers.store(*body, sender=message.sender, address=address)
            case RequestKind.REVOKED if matches(body, bytes, bytes, bytes) and body[0] in self.on_revoked:
                return self.on_revoked[body[0]](body[1], body[2]) if returnable else None
            case RequestKind.REFRESH if matches(body, bytes, bytes, int, int, int, bytes):
                return self.answers.refresh(*body)
            case _:
                return None

    def handle_beat(self, data: bytes, address: Address) -> None:
        """Pass a heartbeat on to whoever follows its run."""
        beat = decode_beat(data)
        listener = self.on_beat.get(beat.run) if beat is not None else None
        if beat is not None and listener is not None:
            listener(beat, address)

    def _contacts_for(self, target: bytes, sender: bytes, room: int) -> bytes:
        nearest = [c for c in self.contacts.nearest(target, self.k + 1) if c.id != sender]
        return pack_contacts(nearest[: max(0, min(self.k, room // CONTACT_BYTES))])

    def _index(self, body: list[bytes], sender: bytes, room: int) -> list[Any] | None:
        key, cursor, known = body
        contacts = b"" if cursor else self._contacts_for(key, sender, room - ENTRY_BYTES - 32)
        page = self.answers.index(key, cursor, known, room - len(contacts) - 32)
        return None if page is None else [*page, contacts]

    def close(self) -> None:
        self.rpc.close()

    def random_target(self) -> bytes:
        """An id in the range of a random bucket, to look for when refreshing the table."""
        low, high = random.choice(self.contacts.ranges())
        return random.randrange(low, max(low + 1, min(high, 2**160 - 1))).to_bytes(PEER_ID_BYTES, "big")
