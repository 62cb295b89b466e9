"""One reduce job under way in the Python engine: between the streams, the reducer and the outboxes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from p2pavg.transport.engine import U8, EngineEvents, JobProgress, Missing, Start
from p2pavg.transport.frames import PACKED, Header, Kind
from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.landing import Landing
from p2pavg.transport.python.outbox import Item, Priority
from p2pavg.transport.python.packing import Packed
from p2pavg.transport.python.reducer import NonFiniteError, Reducer
from p2pavg.transport.python.stream import Destination, Fate, Stream

_LOCAL_WORK_S = 0.002  # the longest that work without I/O keeps the event loop


class Job:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        events: EngineEvents,
        pool: BufferPool,
        reducer: Reducer,
        put: Callable[[int, Sequence[Item]], None],
    ) -> None:
        """put(link, items): puts items into that link's outbox."""
        self.reducer = reducer
        self.spec = reducer.spec
        self._loop = loop
        self._events = events
        self._pool = pool
        self._put = put
        self._ledger = reducer.ledger
        ledger = self._ledger
        self._landing = Landing(
            pool, reducer.result_view, ledger.result_due, self._accept_result, self._is_sound
        )
        self._rank_of = {link: rank for rank, link in enumerate(self.spec.links) if rank != self.spec.rank}
        self._held: list[Stream] = []
        self._ready = 0  # chunks of this peer's contribution that are in place
        self._alone: Iterator[int] = iter(())  # chunks that this peer reduces and nobody else contributes to
        self._refused: set[int] = set()
        self._told_done = False
        self._over = False
        self._first_byte_at = self._last_byte_at = 0.0

    # -- from the engine

    def begin(self, start: Start) -> None:
        if self._ledger.begun:
            raise ValueError(f"transfer {self.spec.transfer} has begun already")
        self.reducer.begin(start)
        ledger = self._ledger
        self._alone = iter([number for number in ledger.reduced() if ledger.only_mine(number)])
        self.supply(len(ledger.chunks) if start.ready is None else start.ready)

    def supply(self, ready: int) -> None:
        """Note that the first `ready` chunks of this peer's contribution are in place."""
        ready += self._ledger.own_chunk
        if not self._ledger.begun:
            raise ValueError(f"transfer {self.spec.transfer} has not begun")
        ledger, before, self._ready = self._ledger, self._ready, max(ready, self._ready)
        if self.reducer.contributes:
            for rank in ledger.others():
                mine = [n for n in ledger.above(rank) if ledger.upward(n) > 0 and not ledger.reduces(n)]
                fresh = [n for n in mine if before <= n < self._ready]
                self._queue(Kind.CONTRIBUTION, rank, fresh)
        self._loop.call_soon(self._work_alone)
        self._resume_held()

    def end(self) -> None:
        """Release the sums of a cancelled or finished job, and let the streams go on that it held."""
        self._over = True
        self.reducer.release()
        self._resume_held()

    def _resume_held(self) -> None:
        held, self._held = self._held, []
        for stream in held:
            stream.resume()

    @property
    def begun(self) -> bool:
        return self._ledger.begun

    def progress(self) -> JobProgress:
        return self._ledger.progress(self._first_byte_at, self._last_byte_at)

    def missing(self, rank: int) -> Missing:
        return self._ledger.missing(rank)

    def resend(self, rank: int, missing: Missing) -> None:
        contributions, results = self._ledger.resendable(rank, missing)
        contributions = [number for number in contributions if number < self._ready]  # the others follow
        self._queue(Kind.CONTRIBUTION, rank, contributions, repeat=True)
        self._queue(Kind.RESULT, rank, results, repeat=True)

    def refuse(self, rank: int, why: str) -> None:
        """Refuse a member's contributions from now on, and report so once."""
        if rank not in self._refused:
            self._refused.add(rank)
            self._events.job_refused(self.spec.transfer, rank, why)

    # -- work

    def _work_alone(self) -> None:
        """Reduce chunks to which nobody else contributes, a few at a time."""
        until = time.monotonic() + _LOCAL_WORK_S
        while not self._over:
            number = next(self._alone, None)
            if number is None:
                self._check_done()
                return
            if number >= self._ready:
                self._alone = chain((number,), self._alone)
                return
            try:
                if self.reducer.add_own(number):
                    self._finish_chunk(number)
            except NonFiniteError as error:
                self.refuse(error.rank, str(error))
                return
            if time.monotonic() > until:
                self._loop.call_soon(self._work_alone)
                return

    def _finish_chunk(self, number: int) -> None:
        self.reducer.finish_chunk(number)
        receiver = self._ledger.receiver(number)
        if receiver is None:
            self._pass_on(number)
            return
        self._queue(Kind.CONTRIBUTION, receiver, (number,))
        self._unite(number)

    def _unite(self, number: int) -> None:
        """Make the result of a chunk that is swapped, once both partial means are here."""
        if self._ledger.result_due(number) and self.reducer.unite(number):
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Send a result that is in place down the tree."""
        for rank in self._ledger.children(number):
            self._queue(Kind.RESULT, rank, (number,))
        self._check_done()

    def _queue(self, kind: Kind, rank: int, numbers: Sequence[int], *, repeat: bool = False) -> None:
        if kind is Kind.CONTRIBUTION:
            priority = Priority.CONTRIBUTION
        else:
            priority = Priority.RESULT if self.spec.voters[rank] else Priority.JOINER
        transfer, reducer = self.spec.transfer, self.reducer
        turn = self._ledger.turn
        items = [
            Item(priority, kind, transfer, rank, number, reducer=reducer, turn=turn(number), repeat=repeat)
            for number in sorted(numbers, key=turn)
        ]
        self._put(self.spec.links[rank], items)

    def _check_done(self) -> None:
        if self._ledger.done and not self._told_done and not self._over:
            self._told_done = True
            self._events.job_done(self.spec.transfer, self._ledger.digests())

    def _touch(self) -> None:
        self._last_byte_at = time.monotonic()
        self._first_byte_at = self._first_byte_at or self._last_byte_at

    # -- sending

    def leaving(self) -> None:
        """Take note that a frame of this job is about to be handed to the kernel."""
        self._touch()

    def handed(self, item: Item) -> None:
        self._ledger.gone(item.kind, item.rank, item.number)
        self._touch()
        self._check_done()

    # -- receiving

    def expect(self, stream: Stream, header: Header) -> Destination | Fate:
        """The destination of a CONTRIBUTION or RESULT frame."""
        rank, ledger = self._rank_of.get(stream.link), self._ledger
        if rank is None or rank in self._refused:
            return Fate.DROP
        number = ledger.number(header.part, header.chunk)
        passed_on = number is not None and ledger.children(number)
        early = header.kind is Kind.CONTRIBUTION or passed_on or self.spec.plan.gathers
        if not ledger.begun and early:
            self._held.append(stream)
            return Fate.HOLD
        why = ledger.refusal(rank, header)
        if why is not None:
            self.refuse(rank, why)
            return Fate.DROP
        assert number is not None
        swapped = ledger.partner(number) == rank
        if (
            header.kind is Kind.CONTRIBUTION
            and self.reducer.contributes
            and number >= self._ready
            and not swapped
        ):
            self._held.append(stream)  # until this peer's own contribution is known, to which it is added
            return Fate.HOLD
        self._touch()
        packed = header.flags & PACKED
        if header.kind is Kind.RESULT:
            if ledger.result_due(number):
                whole: Destination = self._landing.expect(stream, number, aside=bool(packed))
                return self._unpacked(whole, rank, header) if packed else whole
        elif ledger.contribution_due(rank, number):
            chunk, partial = ledger.chunks[number], ledger.is_partial(rank, number)
            size = chunk.result_bytes if partial else chunk.contribution_bytes
            whole = _ContributionBuffer(self, rank, number, size, self._pool)
            return self._unpacked(whole, rank, header) if packed else whole
        return Fate.DROP

    def _unpacked(self, whole: Destination, rank: int, header: Header) -> Packed:
        return Packed(whole, header.length, self._pool, lambda why: self.refuse(rank, why))

    def contribution_landed(self, rank: int, number: int, body: U8) -> None:
        self._touch()
        if rank in self._refused or not self._ledger.contribution_due(rank, number):
            return
        try:
            if self._ledger.partner(number) == rank:
                self.reducer.keep(number, body)
                self._unite(number)
            elif self.reducer.add(rank, number, body):
                self._finish_chunk(number)
        except NonFiniteError as error:
            self.refuse(error.rank, str(error))

    def _is_sound(self, number: int, body: memoryview) -> bool:
        sound = self.reducer.is_sound(number, body)
        if not sound:
            self.refuse(self._ledger.giver(number), "its contribution is malformed or not finite")
        return sound

    def _accept_result(self, number: int, crc: int) -> None:
        self._ledger.take_result(number, crc)
        self._touch()
        self._pass_on(number)


class _ContributionBuffer:
    """A pooled buffer that holds one contribution until it is added."""

    def __init__(self, job: Job, rank: int, number: int, length: int, pool: BufferPool) -> None:
        self._job = job
        self._rank = rank
        self._number = number
        self._pool = pool
        self._buffer = pool.take(length)
        self._body = self._buffer[:length]
        self.view = self._body.data

    def landed(self, crc: int) -> None:
        self._job.contribution_landed(self._rank, self._number, self._body)
        self._pool.give(self._buffer)

    def lost(self) -> None:
        self._pool.give(self._buffer)
