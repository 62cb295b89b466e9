"""Donor: serves this peer's state to newcomers, from one snapshot at a time that all of them share."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg.errors import StateError
from p2pavg.rounds.machine.rules.deadlines import MOST_BEHIND
from p2pavg.rounds.state import snapshot
from p2pavg.rounds.state.download import IDLE_S, Download, Piece
from p2pavg.rounds.state.manifest import Manifest, chunk_bytes
from p2pavg.rounds.state.projection import EpochTimes
from p2pavg.rounds.state.results import ResultHead
from p2pavg.rounds.state.retained import RetainedResults
from p2pavg.rounds.state.snapshot import Live
from p2pavg.rounds.state.yielding import Yielding
from p2pavg.rounds.training import StateSource, SwappedError
from p2pavg.transport.engine import Engine
from p2pavg.transport.limiter import Limiter

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

LOOK_S = 0.005  # how often it looks whether a round's gradients are through
BUSY_WAIT_S = 2.0  # how long a newcomer waits here before it is told to ask again
SNAPSHOT_PAUSE = 2.0  # times as long as the last snapshot took: before that no new one is taken
MOST_TIMES = 4  # that a newcomer may ask for all chunks
MAX_CHUNKS_ASKED = 4096
OLD = 0.25  # of the state's bytes: with more results to follow on it, a newcomer gets a newer snapshot
ALIGNED_S = 0.3  # donors of one newcomer whose requests arrive within this take their snapshots at one epoch


@dataclass(frozen=True, slots=True)
class StateOffer:
    """What a newcomer is given: a state, or only results that follow on its own."""

    manifest: Manifest | None
    results: tuple[ResultHead, ...]


class Donor:
    """The snapshot, the results since, and who downloads them. Runs on the loop thread; copying and hashing
    run beside it.
    """

    def __init__(
        self,
        engine: Engine,
        source: StateSource,
        live: Live,
        sign: Callable[[bytes], bytes],
        background: Executor,
        moving: Callable[[], bool],
        committed: Callable[[], Sequence[tuple[ResultHead, U8]]],
        tell: Callable[[int, dict[str, Any]], None],
        *,
        upload_bps: float | None = None,
        directory: Path | None = None,
        keeps: int = 0,
    ) -> None:
        """moving(): whether a round's gradients are on their way. committed(): results that are yet to be
        applied. tell(link, message). upload_bps: bit/s that all downloads together may take; None: what
        gradients leave of the links. directory: for results that wait. keeps: how many of the last results
        wait for whoever missed them, though nobody has asked, and though nobody was left out lately.
        """
        self._engine = engine
        self._source = source
        self._live = live
        self._sign = sign
        self._background = background
        self._moving = moving
        self._committed = committed
        self._tell = tell
        self._yielding = Yielding(time.monotonic())
        self._snapshot: tuple[Manifest, U8] | None = None
        self._retained = RetainedResults(background, directory)
        self._keeps = keeps
        self._downloads: dict[int, Download] = {}
        self._bucket = None if upload_bps is None else Limiter(upload_bps / 8, time.monotonic())
        self._waking: asyncio.TimerHandle | None = None
        self._taking: asyncio.Task[None] | None = None  # a snapshot
        self._kept_until = 0.0  # the last snapshot, for whoever asked and was told to ask again
        self._work = snapshot.Work()
        self._rests_until = 0.0
        self._done_at = 0.0  # the last download
        self._missed_at = -IDLE_S  # the last round that somebody was left out of
        self._ended = asyncio.Event()  # a download
        self._moved = asyncio.Event()  # the training thread has applied an average
        self._epochs = EpochTimes()

    # What is offered.

    async def offer(
        self, link: int, *, have: tuple[int, bytes] | None = None, root: bytes = b"", aligned: bool = False
    ) -> StateOffer | None:
        """What a newcomer needs, all that is committed meanwhile included; None: busy, ask again.

        have: (epoch, lineage) of its own state, where results that follow on it are enough: it gets them when
        they are few, or less than the state. root: of a state of which it has a part. aligned: it asks other
        donors, too.
        """
        deadline = time.monotonic() + BUSY_WAIT_S
        while True:
            self.prune()
            self._break_off()  # since the last average this peer may have loaded a state itself
            if have is not None and self._retained.spares_state(*have):
                return self._begin(link, None, have[0])
            if self._taking is not None and self._taking.done():
                taken, self._taking = self._taking, None
                try:
                    taken.result()
                except SwappedError:
                    return None
            usable = self._usable(root)
            if usable is not None:
                return self._begin(link, usable, usable.epoch)
            now = time.monotonic()
            if self._taking is None and now >= self._rests_until:
                self._snapshot = None  # its memory goes before the next one is taken
                self._taking = asyncio.get_running_loop().create_task(self._renew(aligned))
            if self._taking is not None:
                done, _ = await asyncio.wait((self._taking,), timeout=max(0.0, deadline - now))
                if done:
                    continue
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(max(LOOK_S, min(deadline, self._rests_until) - time.monotonic()))

    def busy(self) -> dict[str, Any]:
        """What whoever has to ask again is told: bytes of the state, those that were copied or hashed since
        this peer began, and seconds before the next snapshot.
        """
        rest = max(0.0, self._rests_until - time.monotonic())
        return {"bytes": self._work.total, "done": self._work.done, "rest": rest}

    def _begin(self, link: int, manifest: Manifest | None, epoch: int) -> StateOffer:
        now = time.monotonic()
        if manifest is not None:
            self._kept_until = 0.0
        root = None if manifest is None else manifest.root
        self._downloads[link] = Download(epoch, now, now, root)
        return StateOffer(manifest, tuple(self._retained.since(epoch)))

    def _usable(self, root: bytes) -> Manifest | None:
        if self._snapshot is None:
            return None
        manifest = self._snapshot[0]
        if not self._retained.reaches(manifest.epoch, manifest.lineage):
            return None
        old = self._retained.bytes_since(manifest.epoch) > OLD * manifest.total_bytes
        in_use = any(download.root == manifest.root for download in self._downloads.values())
        kept = time.monotonic() < self._kept_until
        return manifest if not old or in_use or kept or manifest.root == root else None

    async def _renew(self, aligned: bool) -> None:
        behind = self._retained and not self._downloads and not self._retained.reaches(*self._live.standing)
        if behind or not self._retained:
            self._retained.begin(self._live.standing, self._committed())
        if aligned:
            await self._aligned()
        began = time.monotonic()
        taken = await asyncio.get_running_loop().run_in_executor(self._background, self._take)
        ended = time.monotonic()
        self._rests_until = ended + SNAPSHOT_PAUSE * (ended - began)
        self._snapshot = taken
        self._retained.state_bytes = taken[0].total_bytes
        self._kept_until = ended + IDLE_S
        asyncio.get_running_loop().call_later(IDLE_S, self._trim)

    @property
    def _takes(self) -> bool:
        """A snapshot is taken, or was just now, for somebody."""
        taking = self._taking is not None and not self._taking.done()
        return taking or time.monotonic() < self._kept_until

    @property
    def spared(self) -> int:
        """Bytes of results that were left out on the disk."""
        return self._retained.spool.spared

    @property
    def epoch_s(self) -> float:
        """Of an epoch lately, those in which rounds waited for somebody left out; 0.0: not known."""
        return self._epochs.usual_s

    async def _aligned(self) -> None:
        """Wait for an epoch whose number all donors of a newcomer wait for, though they were asked a little
        apart: one in so many that they are further apart than that.
        """
        epoch_s = self.epoch_s
        if not epoch_s:
            return
        every = 1 << max(0, math.ceil(math.log2(ALIGNED_S / epoch_s)))
        try:
            async with asyncio.timeout(2 * every * epoch_s):
                while self._live.standing[0] % every:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            logger.debug("no epoch to align the snapshot with came in time")

    def _take(self) -> tuple[Manifest, U8]:
        manifest, blob = snapshot.take(self._source, self._live, self._work)
        return manifest.signed(self._sign), blob

    # What happens meanwhile.

    def applied(self) -> None:
        """The training thread has applied an average."""
        self._epochs.add(time.monotonic())
        self._break_off()
        self._moved.set()

    def _break_off(self) -> None:
        """If no result of the chain led to where the training thread stands, the chain is broken: nobody gets
        further with it.
        """
        if self._retained and not self._retained.leads_by(*self._live.standing):
            self.stop("this peer went on by the results of others")

    @property
    def _kept(self) -> int:
        """How many of the last results wait for whoever missed them."""
        return MOST_BEHIND if time.monotonic() < self._missed_at + IDLE_S else self._keeps

    def committed(self, head: ResultHead, data: U8, *, missed: bool = False) -> None:
        """A round was committed: whoever downloads will need its result, and who missed the round. missed: it
        is known that somebody did, who comes back at once if its link was lost for a moment.
        """
        self.prune()
        if missed:
            self._missed_at = time.monotonic()
        idle = not self._downloads and not self._takes
        if idle and time.monotonic() > self._done_at + IDLE_S:
            self._snapshot = None
            self._retained.leave(self._kept - 1, data.nbytes)
        if not self._retained and self._kept and self._retained.has_room(data.nbytes):
            self._retained.begin((head.epoch, head.before), ())
        if not self._retained:
            return
        if not self._retained.add(head, data):
            self.stop("the results that follow on its state are gone")
            return
        message = {"t": "result", **head.to_message()}
        for link in self._downloads:
            self._tell(link, message)

    def close(self) -> None:
        """Take no snapshot any more."""
        if self._taking is not None:
            self._taking.cancel()

    def stop(self, why: str) -> None:
        """This peer's state is another one now, or goes: nobody can go on with what it downloads."""
        for link in list(self._downloads):
            self._tell(link, {"t": "state-gone", "why": why})
        self._downloads.clear()
        self._forget()

    def _forget(self) -> None:
        self._snapshot = None
        self._retained.clear()

    @property
    def serves(self) -> bool:
        """Somebody downloads."""
        self.prune()
        return bool(self._downloads)

    async def idle(self) -> None:
        """Wait until nobody downloads any more."""
        while self.serves:
            self._ended.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._ended.wait()

    def prune(self) -> None:
        """Forget downloads that are over."""
        now = time.monotonic()
        for link in [link for link, download in self._downloads.items() if download.is_over(now)]:
            self.done(link)

    def done(self, link: int) -> None:
        """A newcomer has what it needs. The results stay a while: it may be late for its first round."""
        if self._downloads.pop(link, None) is not None:
            self._done_at = time.monotonic()
            self._ended.set()
            self._trim()

    def lost(self, link: int) -> None:
        """The link to a newcomer is gone. What it downloaded stays a while: it may come back."""
        if self._downloads.pop(link, None) is not None:
            self._done_at = time.monotonic()
            self._ended.set()
            asyncio.get_running_loop().call_later(IDLE_S, self._trim)

    def has(self, link: int, epoch: int, *, loaded: bool) -> None:
        """A newcomer is at it, and has all results before `epoch`. loaded: the state, too."""
        download = self._downloads.get(link)
        if download is None:
            return
        download.moved_at = max(download.moved_at, time.monotonic() - IDLE_S / 2)
        download.position = max(download.position, epoch)
        if loaded:
            download.root = None
        self._trim()

    def _trim(self) -> None:
        """Keep what those need that still download. Results that follow on a state stay as long as that:
        whoever comes back to it needs them again.
        """
        downloads = self._downloads.values()
        if not self._takes and all(download.root is None for download in downloads):
            self._snapshot = None
            if downloads:
                needed = min(download.position for download in downloads)
                self._retained.forget(min(needed, self._retained.last - self._kept + 1))

    # What goes out.

    def send(self, link: int, request: dict[str, Any]) -> None:
        """Queue the chunks that a newcomer asks for. Raises StateError when they are gone."""
        download = self._downloads.get(link)
        lineage, transfer = request.get("lineage"), request.get("transfer")
        if download is None:
            raise StateError("that snapshot is gone; ask for the manifest again")
        if lineage is None:
            if self._snapshot is None or request.get("root") != self._snapshot[0].root:
                raise StateError("that snapshot is gone; ask for the manifest again")
            manifest, data = self._snapshot
            size, name = manifest.chunk_bytes, manifest.root
        else:
            found = self._retained.get(lineage) if isinstance(lineage, bytes) else None
            if found is None:
                raise StateError("that result is gone; ask for the manifest again")
            data, size, name = found, chunk_bytes(found.nbytes), lineage
        count = -(-data.nbytes // size)
        chunks = _chunks(request.get("chunks"), count)
        if type(transfer) is not int or not 0 <= transfer < 2**63 or chunks is None:
            raise StateError("a chunk was asked for that there is not")
        download.asked[name] += len(chunks)
        if download.asked[name] > MOST_TIMES * count:
            raise StateError("that snapshot is gone; ask for the manifest again")
        view = memoryview(data)
        pieces = [Piece(transfer, chunk, view[chunk * size : (chunk + 1) * size]) for chunk in chunks]
        download.moved_at = time.monotonic()
        if lineage is None:
            download.ask_state(pieces)
        else:
            download.ask_result(pieces)
        self._feed(link, download)

    def sent(self, link: int, transfer: int) -> None:
        """The engine handed a chunk to the kernel."""
        download = self._downloads.get(link)
        if download is not None and download.gone(transfer, time.monotonic()):
            self._feed(link, download)

    def _wake(self) -> None:
        """The cap, or the round, may let something through again."""
        self._waking = None
        for link, download in list(self._downloads.items()):
            if download.waits:
                download.moved_at = time.monotonic()
                self._feed(link, download)

    def _feed(self, link: int, download: Download) -> None:
        while download.waits:
            if (wait := self._wait_s(time.monotonic())) > 0:
                if self._waking is None:
                    self._waking = asyncio.get_running_loop().call_later(wait, self._wake)
                return
            piece = download.take()
            if piece is None:
                return
            if self._bucket is not None:
                self._bucket.spend(len(piece.data))
                self._downloads[link] = self._downloads.pop(link)  # the others come first next time
            self._engine.send_blob(link, piece.transfer, piece.chunk, piece.data)

    def _wait_s(self, now: float) -> float:
        """How long nothing may go out. Within one link gradients pass state by themselves; here they do on
        the way out of this peer, whoever they go to.
        """
        held = self._yielding.waits(now, self._moving())
        capped = 0.0 if self._bucket is None else self._bucket.wait_s(now)
        return max(capped, LOOK_S if held else 0.0)


def _chunks(value: object, count: int) -> list[int] | None:
    """The asked chunks, or None when there are not so many."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_CHUNKS_ASKED:
        return None
    sound = all(type(chunk) is int and 0 <= chunk < count for chunk in value)
    return list(value) if sound else None
