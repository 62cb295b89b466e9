"""The traffic that keeps a view fresh: beats to all peers in view, questions about silent ones, reading from
others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from p2pavg.membership.places import Places
from p2pavg.membership.revoking import Revoking
from p2pavg.membership.roster import LARGE_VIEW, Roster, SeenPeer, prefixes
from p2pavg.membership.table.address import Address
from p2pavg.membership.table.beat import (
    AGES_PER_S,
    MOST_HEARD,
    NEWS,
    OLDEST,
    RUN_TAG_BYTES,
    SAMPLED,
    SENDER_BYTES,
    Beat,
    Heard,
)
from p2pavg.membership.table.dht import DHT
from p2pavg.membership.table.node import ENTRIES_BYTES
from p2pavg.membership.table.reading import Reading
from p2pavg.membership.table.records.entries import PREFIX_BYTES, Outcome, StoredRecord
from p2pavg.membership.table.wire import Contact

logger = logging.getLogger("p2pavg.membership")

TICK = 0.25
ENTRY_POINTS = 16  # members whose records stay in the table, for newcomers; the others' only expire there
READ_AT_JOIN = 12  # members of a large run that a newcomer reads to find its sample
SLEEP_SECONDS = 1.0
WAKE_SECONDS = 1.0  # in which those that slept too beat, and queued datagrams are read
ASK_SECONDS = 1.0
LARGE_ASK_SECONDS = 3.0  # in a view of many: of whom some are always late
SYNC_SECONDS = 0.5
QUARREL_SECONDS = 4.0
READ_SECONDS_PER_MEMBER = 2.0
LONGEST_READ_SECONDS = 120.0
TABLE_SECONDS = 600.0  # between reads of the table, whose few holders could not answer all of a large run
WATCH_SECONDS = 2.0
MERGE_SECONDS = 2.0
EARLY_LOOKS = 3  # so often
CALM_SECONDS = 30.0  # without a new node in the table: then early again
TOLD_AT_ONCE = 8
INTRODUCTION_SECONDS = 0.1
TOGETHER = 1 / 8  # of an interval: in which the beats of a circle's members come, before they are passed on
MOST_STEPS = 16  # of a chain, that a beat may be ahead: who missed more asks others


class Pulse:
    """The traffic of one view. `value` is what this peer publishes; None: it only watches."""

    def __init__(
        self,
        dht: DHT,
        key: bytes,
        lifetime: float,
        roster: Roster,
        places: Places,
        on_tick: Callable[[], None],
        revoking: Revoking | None = None,
    ) -> None:
        """revoking: of a closed run; beats that were not made with its key are ignored."""
        self.value: bytes | None = None
        self._dht = dht
        self._key = key
        self._lifetime = lifetime
        self._roster = roster
        self._places = places
        self._on_tick = on_tick
        self._revoking = revoking
        self._beat_key = None if revoking is None else revoking.closed_run.beat_key
        self._publication = dht.publication(key)
        self._ticked = dht.clock()
        self._awake_at = float("-inf")
        self._reveal_due = float("inf")
        self._news_until = float("-inf")
        self._tell_due = float("inf")
        self._pass_on_due = float("inf")
        self._passed_on = float("-inf")
        self._read_due = dht.clock() + 1.0
        self._table_grew_at = float("-inf")
        self._table_read_at = float("-inf")
        self._looks = 0  # into the table, since it began to grow
        self._asked = self._synced = self._published = self._introduced = self._read_at = float("-inf")
        self._disagree_since: float | None = None
        self._introducing: set[Address] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        dht.node.on_beat[key[:RUN_TAG_BYTES]] = self._on_beat
        dht.node.on_new_contact.add(self.table_grew)
        self._spawn(self._run())

    async def publish(self) -> None:
        """Sign and bring the record to the table and to everybody in view, now."""
        assert self.value is not None
        self._publication.advance(self.value, self._lifetime)
        self._published = self._dht.clock()
        self._reveal_due = self._published + self._roster.interval
        everybody = self._places.contacts(self._roster.members.values())
        await asyncio.gather(self._place(), self._publication.push(everybody))

    async def read(self) -> None:
        """Read the run's key from the table, then from members: they know more than the table keeps."""
        before = set(self._roster.members)
        ways_in = [contact for contact in self._dht.ways_in if not before]
        reading = Reading(self._dht.node, self._key, want=self._roster.wants)
        if self._revoking is not None:
            for contact in ways_in:
                self._spawn(self._revoking.ask(contact))
        holders = await reading.run(also=ways_in)
        self._publication.use_holders(holders)
        await self._places.proofs()
        asked = {contact.id for contact in (*holders, *ways_in)}
        first: list[Contact] = []
        if self._roster.members.keys().isdisjoint(asked):  # else these told all
            first = self._places.contacts(self._roster.fresh(self._dht.clock(), 2))
            await asyncio.gather(*(self._read_from(contact) for contact in first))
            await self._places.proofs()
        if self._roster.is_sample and not before:
            more = self._places.contacts(self._roster.fresh(self._dht.clock(), READ_AT_JOIN))
            await asyncio.gather(*(self._read_from(contact) for contact in more if contact not in first))
            await self._places.proofs()
        await self._greet(before)

    def grew(self) -> None:
        """Tell of a peer that came into view, with the next beats, and to a few peers soon."""
        now = self._dht.clock()
        if self._news_until < now:
            self._tell_due = now + TICK / 2
        self._news_until = now + self._roster.interval

    def table_grew(self) -> None:
        """The table has new nodes, perhaps those of a swarm that started apart: look there soon, and less and
        less often while it goes on growing. In a large run the regular reads are enough: what one peer finds,
        it tells those whom it keeps in view.
        """
        now = self._dht.clock()
        if now - self._table_grew_at > CALM_SECONDS:
            self._looks = 0
        self._table_grew_at = now
        if self._roster.is_sample:
            return
        pause = min(MERGE_SECONDS * 2 ** max(0, self._looks - EARLY_LOOKS), LONGEST_READ_SECONDS)
        self._read_due = min(self._read_due, max(now + 0.5, self._read_at + pause))

    def close(self) -> None:
        self._dht.node.on_new_contact.discard(self.table_grew)
        self._dht.node.on_beat.pop(self._key[:RUN_TAG_BYTES], None)
        for task in self._tasks:
            task.cancel()

    # time passes

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                self._tick(self._dht.clock())
            except Exception:  # a peer that stops beating is dead to all others: go on, whatever it was
                logger.exception("keeping the view fresh failed once")

    def slept(self, now: float) -> bool:
        """Whether this process was stopped or starved just now: what it missed says nothing about others."""
        return now - self._ticked > SLEEP_SECONDS or now < self._awake_at

    def _tick(self, now: float) -> None:
        if now - self._ticked > SLEEP_SECONDS:
            self._awake_at = now + WAKE_SECONDS
        self._ticked = now
        self._on_tick()
        if self.value is not None:
            revealed, due = self._stay_fresh(now), self._roster.due(now)
            if self._roster.is_in_circles:
                self._beat_in_circles(now, revealed=revealed)
            if now < self._news_until or not self._roster.is_in_circles:
                self._beat(due, now)
            if now >= self._tell_due:
                self._tell_due = float("inf")
                self._beat(self._roster.fresh(now, TOLD_AT_ONCE), now)
        self._ask_about_silent(now)
        self._read_sometimes(now)

    def _stay_fresh(self, now: float) -> bool:
        """Reveal the next link of the record when that is due; whether it was."""
        if now < self._reveal_due or self.value is None:
            return False
        record = self._publication.record
        spacing = 0.3 * len(self._roster)
        changed = record is not None and record.value != self.value
        value = self.value
        if changed and record is not None and now - self._published < spacing:
            value = record.value
        self._publication.advance(value, self._lifetime)
        self._reveal_due = now + self._roster.interval
        if self._publication.refresh.step == 0:
            self._published = now
            self._spawn(self._publication.push(self._places.contacts(self._roster.members.values())))
        if self._roster.is_among_closest(self._key, self._dht.identity.peer_id, ENTRY_POINTS):
            self._spawn(self._place())
        return True

    async def _place(self) -> None:
        await self._publication.place(except_at=set(self._roster.members))  # these keep it by push and beats

    def _beat_in_circles(self, now: float, *, revealed: bool) -> None:
        members, circle = self._roster.members, self._roster.circle
        if revealed:
            self._pass_on_due = now + TOGETHER * self._roster.interval
            self._beat((members[peer_id] for peer_id in circle.mates), now)
        if now >= self._pass_on_due:
            mates = [members[peer_id] for peer_id in circle.mates]
            heard = tuple(
                Heard(
                    mate.info.peer_id[:SENDER_BYTES],
                    mate.held.record.sequence,
                    mate.held.refresh,
                    min(OLDEST, math.ceil((now - mate.held.refreshed) * AGES_PER_S)),
                )
                for mate in mates
                if mate.held.refreshed > self._passed_on
            )
            self._pass_on_due, self._passed_on = float("inf"), now
            self._beat((members[peer_id] for peer_id in circle.charges), now, heard[:MOST_HEARD])

    def _beat(self, members: Iterable[SeenPeer], now: float, heard: tuple[Heard, ...] = ()) -> None:
        data = self._own_beat(now, heard)
        for contact in self._places.contacts(members) if data else ():
            self._dht.node.rpc.send_beat(data, contact.address)

    def _own_beat(self, now: float, heard: tuple[Heard, ...] = ()) -> bytes:
        """The beat to send now; empty when nothing was published yet."""
        record = self._publication.record
        if record is None or self.value is None:
            return b""
        own = self._dht.node.store.lookup(self._key, record.peer_id[:PREFIX_BYTES])
        flags = (NEWS if now < self._news_until else 0) | (SAMPLED if self._roster.is_sample else 0)
        return Beat(
            self._key[:RUN_TAG_BYTES],
            record.peer_id[:SENDER_BYTES],
            record.sequence,
            self._publication.refresh,
            flags,
            self._digest(own),
            heard,
        ).encode(self._beat_key)

    def _digest(self, own: StoredRecord | None) -> bytes:
        return self._roster.digest(
            own, 0 if self._revoking is None else self._revoking.closed_run.revoked.digest
        )

    def _ask_about_silent(self, now: float) -> None:
        if now - self._asked < (ASK_SECONDS if len(self._roster) <= LARGE_VIEW else LARGE_ASK_SECONDS):
            return
        silent = self._roster.overdue(now)
        others = self._places.contacts(self._roster.fresh(now, 1)) or self._places.contacts(silent[:1])
        if not silent or not others:
            return
        self._asked = now
        asked = random.sample(prefixes(silent), min(len(silent), ENTRIES_BYTES // PREFIX_BYTES))
        reading = Reading(self._dht.node, self._key, want=self._roster.wants)
        self._spawn(reading.read_entries(others[0], asked))

    def _read_sometimes(self, now: float) -> None:
        if now < self._read_due:
            return
        pause = min(READ_SECONDS_PER_MEMBER * (1 + len(self._roster)), LONGEST_READ_SECONDS)
        if self.value is None:
            pause = WATCH_SECONDS
        table = self.value is None or not self._roster.is_sample
        if not table and self._table_grew_at >= self._table_read_at:
            table = now - self._table_read_at >= TABLE_SECONDS
        self._table_read_at = now if table else self._table_read_at
        self._read_at = now
        self._looks = min(self._looks + 1, 2 * EARLY_LOOKS + 3)
        self._read_due = now + pause * random.uniform(0.8, 1.2)
        self._spawn(self._read_again(table=table))

    async def _read_again(self, *, table: bool) -> None:
        before = set(self._roster.members)
        if table:
            reading = Reading(self._dht.node, self._key, want=self._roster.wants)
            self._publication.use_holders(await reading.run(brief=self.value is not None))
        if self.value is None or self._roster.is_sample:
            for contact in self._places.contacts(self._roster.fresh(self._dht.clock(), 1)):
                await self._read_from(contact)
        await self._greet(before)

    # others speak

    def _on_beat(self, beat: Beat, address: Address) -> None:
        if self._beat_key is not None and not beat.is_authentic(self._beat_key):
            return
        now = self._dht.clock()
        known = self._roster.senders(beat.sender)
        for member in known:
            outcome = self._refresh(member, beat, self._lifetime, now)
            if outcome is Outcome.REFRESHED:
                self._places.hear(member.info.peer_id, address)
                self._keep_step(member, now)
                self._compare(beat, member, now)
            if member.held.refresh == beat.refresh:
                self._hear(beat.heard, now)
            if outcome is not None and outcome is not Outcome.REFUSED:
                return
        data = self._own_beat(now)
        if known or not self._roster.is_sample:
            self._introduce(address, now)
        elif (
            data
        ):  # there is no place for it here, but it has one for this peer: let it see that this one lives
            self._dht.node.rpc.send_beat(data, address)

    def _refresh(self, member: SeenPeer, said: Beat | Heard, remaining: float, now: float) -> Outcome | None:
        """What a beat makes of the record of a member; None when it is of another version."""
        record = member.held.record
        if record.sequence & 0xFFFF != said.sequence:
            return None
        if said.refresh.step - member.held.refresh.step > MOST_STEPS:
            return Outcome.STALE
        return self._dht.node.store.refresh(
            self._key, record.peer_id[:PREFIX_BYTES], record.version, said.refresh, remaining, now
        )

    def _hear(self, heard: Iterable[Heard], now: float) -> None:
        """A member passes on what others of its circle have said."""
        for said in heard:
            remaining = self._lifetime - said.age / AGES_PER_S
            for member in self._roster.senders(said.sender) if remaining > 0 else ():
                if self._refresh(member, said, remaining, now) is Outcome.REFRESHED:
                    break

    def _keep_step(self, member: SeenPeer, now: float) -> None:
        """Beat together with the others of the circle, so that what is passed on is young."""
        late = now > self._reveal_due - self._roster.interval / 2
        if late and self._roster.is_in_circles and member.info.peer_id in self._roster.circle.mates:
            self._reveal_due = now

    def _introduce(self, address: Address, now: float) -> None:
        """A beat of somebody, or of a record, not known: fetch the record. Anybody may send these."""
        if address in self._introducing or now - self._introduced < INTRODUCTION_SECONDS:
            return
        self._introduced = now
        self._introducing.add(address)
        work = Reading(self._dht.node, self._key).read_own(address)
        self._spawn(work).add_done_callback(lambda _: self._introducing.discard(address))

    def _compare(self, beat: Beat, member: SeenPeer, now: float) -> None:
        """Read what a peer sees when it sees something else: at once when it has news, else after a while."""
        if beat.flags & SAMPLED or self._roster.is_sample or self.value is None:
            return
        own = self._dht.node.store.lookup(self._key, self._dht.identity.peer_id[:PREFIX_BYTES])
        if beat.digest == self._digest(own):
            self._disagree_since = None
            return
        if self._disagree_since is None:
            self._disagree_since = now
        patient = not beat.flags & NEWS
        if patient and now - self._disagree_since < QUARREL_SECONDS:
            return
        if now - self._synced < (QUARREL_SECONDS if patient else SYNC_SECONDS):
            return
        self._synced = now
        for contact in self._places.contacts([member]):
            self._spawn(self._sync(contact))

    async def _sync(self, contact: Contact) -> None:
        before = set(self._roster.members)
        await self._read_from(contact)
        await self._greet(before)

    async def _read_from(self, contact: Contact) -> None:
        if self._revoking is not None:
            await self._revoking.ask(contact)
        await Reading(self._dht.node, self._key, want=self._roster.wants).read_from(contact)

    async def _greet(self, before: set[bytes]) -> None:
        """Hand the own record to the peers that came into view by reading."""
        if self.value is not None and self._publication.record is not None:
            new = [member for peer_id, member in self._roster.members.items() if peer_id not in before]
            await self._publication.push(self._places.contacts(new))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
