"""Joining: one way from where this peer stands to where the swarm does. On the loop thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult
from p2pavg.errors import StateError
from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.protocol import wire
from p2pavg.rounds.protocol.messages import CatchUp
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.session import Session
from p2pavg.rounds.state.downloader import Downloader
from p2pavg.rounds.state.following import Following
from p2pavg.rounds.state.inbox import Inbox
from p2pavg.rounds.state.projection import DownloadProgress, Projection, Wish
from p2pavg.rounds.state.results import ResultHead
from p2pavg.rounds.state.telling import Joined, Telling
from p2pavg.rounds.state.trust.record import ABSENT
from p2pavg.rounds.training import Average, Heal
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.state")

ASK_S = 0.5  # between two words to those that are to wait, unless something changed
HAVE_S = 1.0  # and to donors, which need not keep what is here
LEVEL_S = 0.02  # between two looks whether it is level
MOST_AHEAD = 8  # results that wait for the training thread: it applies them as fast as it can
LEFT_ALONE_S = 1.5  # others are said to be ahead, and nobody gives their results


class Joining:
    """A download of the state and of all results since, until the training thread has applied them all."""

    def __init__(
        self,
        action: act.StartHeal,
        engine: Engine,
        inbox: Inbox,
        downloader: Downloader,
        links: Mapping[bytes, Link],
        machine: Machine,
        session: Session,
        deliveries: Deliveries,
        numel: int,
        codec: codecs.Codec,
        deliver: Callable[[], None],
        feed: Callable[[ev.Event], None],
    ) -> None:
        """links: by peer, a live view. codec: of the run's results. deliver(): there is something for the
        training thread.
        """
        self._action = action
        self._engine = engine
        self._downloader = downloader
        self._links = links
        self._machine = machine
        self._session = session
        self._deliveries = deliveries
        self._give = deliver
        self._feed = feed
        self.following = Following(engine, inbox, links, numel, codec, self._came, downloader.record)
        self._projection = Projection()
        self._began_at = time.monotonic()
        self._telling = Telling(self._began_at)
        self.joined: Joined | None = None  # once it is level
        self._donors: tuple[bytes, ...] = ()
        self._promised: Mapping[bytes, int] = {}  # results, by donor
        self._gone = set[bytes]()  # those of them that give nothing any more
        self._needs_state = False  # results alone are not enough
        self._has_state = False  # the training thread has it, or is given it next
        self._applied = asyncio.Event()
        self._asked_at = 0.0
        self._asked: tuple[int, int] | None = None  # from which epoch on, and what may be lacking
        self._told_at = 0.0  # the donors, what is here

    async def run(self) -> None:
        """Raises StateError when nobody can give what is missing."""
        have = self._session.standing if self._action.results_do else None
        offers = await self._downloader.offers(self._candidates, self._links, have)
        self._donors, self._promised = offers.donors, offers.promised
        self._feed(ev.Donors(self._donors))
        rtts = [self._links[donor].rtt_min for donor in self._donors if donor in self._links]
        self._projection.swarm(offers.epoch_s, max(rtts, default=0.0))
        following: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        try:
            if not offers.manifests:
                self._deliveries.unloaded, self._has_state = False, True
                self.following.begin(self._session.standing)
                following = loop.create_task(self.following.run())
            else:
                manifest, history = self._downloader.chosen(offers)
                self._telling.begins(manifest.epoch, manifest.total_bytes, len(offers.manifests))
                self.following.begin((manifest.epoch, manifest.lineage))
                self.following.modest = True
                following = loop.create_task(self.following.run())
                self._needs_state = True
                state = await self._downloader.fetch(manifest, offers, self._links)
                self._has_state, self.following.modest = True, False
                self._deliveries.put_state(Heal(state, history))
                self._give()
            await self._level(following)
        finally:
            if following is not None:
                following.cancel()
            for donor in self._donors:
                if donor in self._links:
                    self._links[donor].send({"t": "state-done"})

    def _candidates(self) -> list[bytes]:
        """Who may give the state: those that were there when it was asked for, and whoever has come since."""
        epoch, lineage = self._action.epoch, self._action.lineage
        came = [peer for peer in self._links if self._machine.has_reached(peer, epoch, lineage)]
        return list(dict.fromkeys([*self._action.donors, *came]))

    async def _came(self, head: ResultHead, result: EncodedResult) -> None:
        """The next result is here. Once there is a state that they can be applied to, the training thread is
        not buried under them: it may have stopped. Raises StateError when it averages what waits here.
        """
        if not self._needs_state and self._machine.healing.counts_again(head.epoch, head.transfer):
            raise StateError("the others have averaged samples that wait here; their whole state is needed")
        while self._has_state and self._deliveries.following >= MOST_AHEAD:
            await self._moved()
        average = Average(
            head.epoch, sum(head.samples), len(head.members), late=True, result=result, note=head.note
        )
        self._deliveries.put(average, head.to_commit())
        self._give()

    async def _level(self, following: asyncio.Task[None]) -> None:
        """Until everything that there is has been applied."""
        stuck_since: float | None = None
        while True:
            error = following.exception() if following.done() else None
            if error is not None and not self._machine.alone:
                raise error  # alone, this peer goes on with what it has
            applied = not self._deliveries.unloaded and self._session.standing == self.following.standing
            if applied and (error is not None or not self.following.lacking()):
                if self._machine.level:
                    break
                if self._gone.issuperset(self._donors):
                    self._note_promises()
                    raise StateError("others are ahead, and the donors give their results no more")
                stuck_since = stuck_since or time.monotonic()
                if time.monotonic() - stuck_since > LEFT_ALONE_S:
                    self._note_promises()
                    raise StateError("others are ahead, and none of the donors has their results")
            else:
                stuck_since = None
            await self._moved()
        at, now = self._at(), time.monotonic()
        self._telling.ends(now, self._machine.epoch, at, self.following.fetched)
        self.joined = Joined(
            self._machine.epoch, now - self._began_at, at.total, at.results, self.following.fetched
        )

    def _note_promises(self) -> None:
        """Donors that offered more results than they told of are trusted less when these are asked for."""
        for donor, count in self._promised.items():
            if self.following.tellings[donor] < count:
                self._downloader.record.failed(donor, time.monotonic(), ABSENT)

    async def _moved(self) -> None:
        """The training thread has applied something, or a little time has passed."""
        self._applied.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEVEL_S):
                await self._applied.wait()

    def applied(self) -> None:
        """The training thread has applied something."""
        self._applied.set()

    def told(self, donor: bytes, message: Mapping[str, Any]) -> None:
        """A donor keeps a result for us; who was not asked for the state is none. Raises StateError when it
        describes it wrongly.
        """
        if donor in self._downloader.asked:
            self.following.told(donor, message)

    def lost(self, donor: bytes) -> None:
        """It gives nothing any more, or its link is gone."""
        self._gone.add(donor)
        self.following.lost(donor)

    def look(self) -> None:
        """A beat: tell where we are, and ask for what it takes."""
        now, at, times = time.monotonic(), self._at(), self.following.times
        epochs, span = (len(times) - 1, times[-1] - times[0]) if len(times) > 1 else (0, 0.0)
        links = [self._links[donor].id for donor in self._donors if donor in self._links]
        received = sum(self._engine.traffic(link)[1] for link in links)
        self._projection.observe(now, at, received, epochs, span)
        self._telling.look(now, at, self._projection)
        standing = self.following.standing
        if standing is None:
            return
        if now >= self._told_at + HAVE_S:
            self._told_at = now
            loaded = not self._deliveries.unloaded
            self._tell_donors({"t": "state-have", "epoch": standing[0], "loaded": loaded})
        wish = self._projection.wish(now, loaded=not self._deliveries.unloaded)
        asked = None if wish is None else (standing[0], wish.spare)
        if asked != self._asked or (wish is not None and now >= self._asked_at + ASK_S):
            self._asked_at, self._asked = now, asked
            self._ask(standing[0], wish or Wish(0, 0.0), at)

    def _ask(self, epoch: int, wish: Wish, at: DownloadProgress) -> None:
        link_bps = 8 * self._projection.bytes_per_second
        asked = CatchUp(epoch, wish.spare, wish.seconds, at.total, at.result, link_bps)
        message = wire.to_dict(asked)
        for link in list(self._links.values()):
            if link.hello.get("role") != Role.WATCHER.value:
                link.send(message)

    def _tell_donors(self, message: Mapping[str, Any]) -> None:
        for donor in self._donors:
            if donor in self._links:
                self._links[donor].send(message)

    def _at(self) -> DownloadProgress:
        state, total, _ = (self._needs_state and self._downloader.progress) or (0, 0, 0)
        following = self.following
        return DownloadProgress(
            state, total, following.fetched_bytes, following.lacking_bytes, following.result_bytes
        )


def followed(commit: act.Commit) -> ev.Followed:
    """The result of a round that this peer was not in is applied."""
    ballot, samples = commit.ballot, sum(commit.samples)
    return ev.Followed(ballot.epoch, commit.before, commit.lineage, commit.transfer, samples, ballot.leader)
