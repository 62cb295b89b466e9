"""Downloader: fetches the state of the swarm from several members at once, and goes on where it was."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg.errors import P2PAvgError, StateError
from p2pavg.printable import printable, size
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.collecting import Collecting
from p2pavg.rounds.state.fetching import Fetching, choose, same
from p2pavg.rounds.state.generation_rows import Generations, from_rows
from p2pavg.rounds.state.inbox import Inbox
from p2pavg.rounds.state.manifest import Manifest
from p2pavg.rounds.state.trust.patience import Patience
from p2pavg.rounds.state.trust.record import ABSENT, WRONG, Record
from p2pavg.rounds.training import State
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

MAX_DONORS = 4
MOST_ASKED = 12  # in place of those that gave nothing, before it begins anew
ASK_AGAIN_S = 1.0  # between two questions to a donor that is busy, at least
GRACE_S = 0.3  # how much longer than the first manifest the others may take, at least
LOOK_S = 0.25  # between two looks whether those that were asked are still heard
HEARD_S, HEARD_TRIPS = 2.0, 4  # pings come each second: who is not heard for longer is not waited for
NOBODY_S = 3.0  # how long it waits though it hears nobody that was asked
MOST_WORDS = 200  # of a donor, why it does not give its state


@dataclass(frozen=True, slots=True)
class Offers:
    """What the donors offer: states, or, where results on top of our own are enough, nothing but those."""

    donors: tuple[bytes, ...]
    manifests: Mapping[bytes, Manifest]
    histories: Mapping[bytes, Any]
    epoch_s: float  # of an epoch, as most donors know it; 0.0: they do not
    promised: Mapping[bytes, int]  # by donor that has results on top of our own state: how many of them


@dataclass(slots=True)
class _Partial:
    """A download that did not end."""

    manifest: Manifest
    blob: U8
    have: bytearray


class Downloader:
    """Fetches states. One at a time."""

    def __init__(self, engine: Engine, inbox: Inbox, numel: int) -> None:
        """numel: of the gradient."""
        self._engine = engine
        self._numel = numel
        self._inbox = inbox
        self.asked = set[bytes]()  # whom the download under way has asked for what they have
        self.record = Record()
        self._partial: _Partial | None = None
        self._fetching: tuple[Manifest, Fetching, int] | None = None

    @property
    def progress(self) -> tuple[int, int, int] | None:
        """(verified bytes, all bytes, donors) of the last download; None: there was none."""
        if self._fetching is None:
            return None
        manifest, fetching, donors = self._fetching
        total = manifest.total_bytes
        return max(0, total - fetching.left * manifest.chunk_bytes), total, donors

    def doubts(self, donor: bytes) -> int:
        """How little it is trusted now; 0: no less than anybody."""
        return self.record.doubts(donor, time.monotonic())

    # ---------------------------------------------------------------------------------- offers

    async def offers(
        self,
        donors: Callable[[], Sequence[bytes]],
        links: Mapping[bytes, Link],
        have: tuple[int, bytes] | None,
    ) -> Offers:
        """Ask some donors at once; go on with those that answer about as fast as the first. Until one does,
        others are asked in place of those that are not heard any more, and when they come.

        donors: who may have it, the best first, as it is now. have: (epoch, lineage) of our own state, where
        results on top of it are enough. Raises StateError when no donor has anything.
        """
        self.asked = set()
        asked: dict[bytes, asyncio.Task[dict[str, Any]]] = {}
        asked_at: dict[bytes, float] = {}
        answered: dict[bytes, dict[str, Any]] = {}

        def ask_more() -> None:
            there = [donor for donor in donors() if donor in links and donor not in asked]
            heard = sum(donor not in answered and _is_heard(links.get(donor)) for donor in asked)
            there = sorted(there, key=lambda donor: (not _is_heard(links[donor]), self.doubts(donor)))
            there = there[: max(0, min(MAX_DONORS - heard, MOST_ASKED - len(asked)))]
            request = {
                "t": "state",
                "have": None if have is None else list(have),
                "root": b"" if self._partial is None else self._partial.manifest.root,
                "aligned": len(there) > 1,
            }
            self.asked.update(there)
            for donor in there:
                asked[donor] = asyncio.ensure_future(self._ask(links[donor], request))
                asked_at[donor] = time.monotonic()

        def patient_until() -> float | None:
            """How long others may answer; None: nobody has, or somebody is heard that is trusted more."""
            willing = [donor for donor, answer in answered.items() if answer]
            least = min(map(self.doubts, willing), default=0)
            waited_for = (donor for donor in asked if donor not in answered and _is_heard(links.get(donor)))
            if not willing or any(self.doubts(donor) < least for donor in waited_for):
                return None
            took = min(took_s[donor] for donor in willing if self.doubts(donor) <= least)
            return time.monotonic() + GRACE_S + took

        took_s: dict[bytes, float] = {}
        manifests: dict[bytes, Manifest] = {}
        whys: list[str] = []
        deadline: float | None = None
        heard_at = time.monotonic()
        ask_more()
        try:
            while pending := [d for d in asked if d not in answered]:
                timeout = LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
                done, _ = await asyncio.wait(
                    [asked[d] for d in pending], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and deadline is not None:
                    break
                if not done:
                    ask_more()
                if done or any(_is_heard(links.get(donor)) for donor in asked if donor not in answered):
                    heard_at = time.monotonic()
                elif time.monotonic() > heard_at + NOBODY_S:
                    whys.append("nobody that was asked is heard any more")
                    break
                for donor in [d for d in pending if asked[d] in done]:
                    answered[donor] = {}
                    try:
                        answer = asked[donor].result()
                        if answer.get("results") is not True:
                            manifest = Manifest.from_message(answer)
                            manifest.check(links[donor].hello["key"])
                            manifests[donor] = manifest
                        answered[donor] = answer
                        took_s[donor] = time.monotonic() - asked_at[donor]
                    except (P2PAvgError, TimeoutError, KeyError) as error:
                        whys.append(str(error) or type(error).__name__)
                        self.record.failed(donor, time.monotonic(), ABSENT)
                deadline = deadline or patient_until()
                if done and deadline is None:
                    ask_more()
        finally:
            for task in asked.values():
                task.cancel()
        if not any(answered.values()):
            raise StateError(f"no member could give its state ({'; '.join(whys) or 'nobody is there'})")
        willing = tuple(donor for donor, answer in answered.items() if answer)
        epoch_s = statistics.median(_seconds(answered[donor].get("epoch_s")) for donor in willing)
        promised = {
            donor: _count(answered[donor].get("count")) for donor in willing if donor not in manifests
        }
        trusted = min(map(self.doubts, manifests), default=None)  # who offers a whole state
        with_results = tuple(d for d in promised if trusted is None or self.doubts(d) <= trusted)
        if any(promised[donor] for donor in with_results) or not manifests:
            # These have the results that we lack, or stand here, too.
            return Offers(with_results, {}, {}, epoch_s, promised)
        histories = {donor: answer.get("history") for donor, answer in answered.items()}
        return Offers(willing, manifests, histories, epoch_s, {})

    async def _ask(self, link: Link, request: Mapping[str, Any]) -> dict[str, Any]:
        now = time.monotonic()
        patience = Patience(now, self._numel)
        while (left := patience.left(now)) > 0:
            try:
                answer = await link.request(request, left)
            except TimeoutError:
                break
            if "error" in answer:
                raise StateError(printable(str(answer["error"])[:MOST_WORDS]))
            if not answer.get("busy"):
                return answer
            asked_at, now = now, time.monotonic()
            patience.busy(now, answer)
            await asyncio.sleep(max(0.0, min(asked_at + ASK_AGAIN_S - now, patience.left(now))))
            now = time.monotonic()
        raise StateError("a donor gave no answer for too long, or was busy")

    # ------------------------------------------------------------------------------------- chunks

    def chosen(self, offers: Offers) -> tuple[Manifest, Generations]:
        """The state to download, and the history that led there. Raises StateError."""
        primary = choose(offers.manifests, self.doubts)
        try:
            return offers.manifests[primary], from_rows(offers.histories[primary])
        except StateError:
            self.record.failed(primary, time.monotonic(), WRONG)
            raise

    async def fetch(self, manifest: Manifest, offers: Offers, links: Mapping[bytes, Link]) -> State:
        """The whole, verified state. Chunks that an earlier download brought, and that are still the same,
        are not downloaded again. Raises StateError when the donors are gone before all is here.
        """
        partial = self._resumed(manifest)
        promise = [donor for donor, made in offers.manifests.items() if made.root == manifest.root]
        most = min(map(self.doubts, promise), default=0) + WRONG / 2  # not who sent wrong bytes beside others
        serving = {
            donor: same(manifest, offers.manifests[donor])
            for donor in sorted(offers.manifests, key=self.doubts)
            if self.doubts(donor) < most
        }
        fetching = Fetching(manifest.chunks, manifest.chunk_bytes, serving, partial.have)
        partial.have = fetching.have
        self._partial, self._fetching = partial, (manifest, fetching, len(serving))
        loop = asyncio.get_running_loop()

        async def broken(chunks: Sequence[int]) -> Sequence[int]:
            return await loop.run_in_executor(None, _broken, manifest, partial.blob, chunks)

        collecting = Collecting(
            fetching,
            partial.blob,
            manifest.chunk_bytes,
            links,
            self._engine,
            lambda donor: {"t": "state-chunks", "root": offers.manifests[donor].root},
            broken,
            self.record,
        )
        await collecting.run(self._inbox)
        self._partial = None
        try:
            return await loop.run_in_executor(None, state.unpack, manifest, partial.blob)
        except StateError:
            for donor in promise:
                self.record.failed(donor, time.monotonic(), WRONG)
            raise

    def _resumed(self, manifest: Manifest) -> _Partial:
        """What there is of this state already."""
        partial, self._partial = self._partial, None
        if partial is not None and partial.manifest.total_bytes == manifest.total_bytes:
            equal = same(manifest, partial.manifest)
            have = bytearray(a & b for a, b in zip(partial.have, equal, strict=True))
            if any(have):
                kept = size(sum(have) * manifest.chunk_bytes)
                logger.info("%s of the state are here from an earlier download", kept)
            return _Partial(manifest, partial.blob, have)
        try:
            blob = np.empty(manifest.total_bytes, np.uint8)
        except MemoryError:
            raise StateError(
                f"the state has {size(manifest.total_bytes)}, for which there is no memory; free some"
            ) from None
        return _Partial(manifest, blob, bytearray(manifest.chunks))


def _is_heard(link: Link | None) -> bool:
    return link is not None and link.quiet_s < HEARD_S + HEARD_TRIPS * link.rtt_min


def _count(value: object) -> int:
    """Of results that a donor has; 0: it tells of none."""
    return value if type(value) is int and value > 0 else 0


def _seconds(value: object) -> float:
    """That a donor tells; 0.0: it is none."""
    return value if isinstance(value, float) and math.isfinite(value) and value > 0 else 0.0


def _broken(manifest: Manifest, blob: U8, chunks: Sequence[int]) -> list[int]:
    """Those of `chunks` whose hash is wrong."""
    view = memoryview(blob)
    broken, courtesy = [], state.Courtesy()
    for chunk in chunks:
        if state.chunk_hash(view[manifest.span(chunk)]) != manifest.hash_of(chunk):
            broken.append(chunk)
        courtesy.worked(manifest.chunk_bytes)
    return broken
