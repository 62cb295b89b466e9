"""Gauges, read at every beat: the links' health, the rates of the network, how far a job is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from p2pavg.allreduce.jobs import JobInProgress, Jobs
from p2pavg.allreduce.rates import LEAST_BYTES, RateMeter
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.measure.acknowledged import Acknowledged
from p2pavg.rounds.measure.link_pace import LinkPace
from p2pavg.rounds.protocol.roles import LinkFacts
from p2pavg.transport.engine import Engine, JobProgress, StreamStats
from p2pavg.transport.links.link import Link

# Control messages are few: when one is lost, and its copy too, the next copy goes out so much later.
STUCK_S = 1.0


class Gauges:
    """Reads links, engine and jobs, and makes events of their figures. On the loop thread."""

    def __init__(self, engine: Engine, links: Mapping[bytes, Link], jobs: Jobs) -> None:
        """links: by peer, a live view."""
        self._engine = engine
        self._links = links
        self._jobs = jobs
        self._upload, self._download = RateMeter(), RateMeter()
        self._from: dict[bytes, RateMeter] = {}
        self._paces: dict[int, LinkPace] = {}  # by link
        self._before: dict[bytes, int] = {}  # bytes that had come from a peer when the round began
        self._told_links: Mapping[bytes, LinkFacts] = {}
        self._known_links: set[tuple[bytes, bool]] = set()  # and whether it is known what they bring
        self._acknowledged: dict[int, Acknowledged] = {}  # by link

    @property
    def upload_bps(self) -> float:
        """Bit/s that the network has taken; 0.0: not known yet."""
        return 8 * self._upload.bytes_per_second

    @property
    def download_bps(self) -> float:
        """Bit/s that the network has brought; 0.0: not known yet."""
        return 8 * self._download.bytes_per_second

    @property
    def links(self) -> dict[bytes, LinkFacts]:
        """What each link has brought while its peer had more to send, now or in an earlier run, and its round
        trip.
        """
        found = {}
        for peer, link in self._links.items():
            earlier = 0.0 if link.prior is None else link.prior.brings_bps
            found[peer] = LinkFacts(link.brings_bps or earlier, link.rtt_min)
        return found

    def fresh_links(self) -> ev.LinksMeasured | None:
        """`links`, unless they are as this told them last."""
        links = self.links
        if links == self._told_links:
            return None
        self._told_links = links
        return ev.LinksMeasured(links)

    def new_links(self) -> ev.LinksMeasured | None:
        """`fresh_links`, as soon as something is known of another link, not only after a round."""
        known = {(peer, link.bps > 0) for peer, link in self.links.items()}
        if known == self._known_links:
            return None
        self._known_links = known
        return self.fresh_links()

    def health(self) -> ev.Health:
        """How long ago each link was last known to work, in both directions."""
        now = time.monotonic()
        healths = []
        known = self._acknowledged
        self._acknowledged = {}
        for peer, link in self._links.items():
            health, streams = self._engine.health(link.id), self._engine.stats(link.id)
            acknowledged = self._acknowledged[link.id] = known.get(link.id) or Acknowledged(now)
            unheard = acknowledged.age(now, streams)
            silent = max(0.0, now - max(health.last_heard_at, link.last_heard))
            # Heartbeats wait behind chunks, the first of a link perhaps for seconds; control messages do not.
            loop = min(health.loop_age_s, max(0.0, now - link.last_heard))
            # What the kernel measures leaves out how long a cut lasted.
            rtt = min((s.rtt_s for s in streams if s.rtt_s > 0), default=link.rtt or health.rtt_s)
            heard = max(silent, unheard, link.stuck_s - STUCK_S)
            healths.append(ev.PeerHealth(peer, heard, loop, health.trainer_age_s, rtt))
        return ev.Health(tuple(healths))

    def measure_rates(self, *, downloading: bool = False) -> None:
        """What the network takes and brings while gradients flow; bytes count once they are acknowledged.

        downloading: a state comes, which tells a newcomer what its links bring before its first round.
        """
        self._from = {peer: self._from.get(peer) or RateMeter() for peer in self._links}
        if not self._jobs.running():
            for meter in (self._upload, self._download):
                meter.round_over()
            for peer, link in self._links.items():
                if downloading:
                    self._observe(peer, link, self._engine.traffic(link.id)[1], busy=True)
                else:
                    self._from[peer].round_over()
            for number, pace in self._paces.items():
                self._pace(number, pace.round_over())
            self._before.clear()
            return
        self._keep_paces()
        members, waiting, coming = self._contributions()
        full = True  # more waits for every member: what goes out is all that can
        sent = received = 0
        now = time.monotonic()
        for peer, link in self._links.items():
            out, into = self._engine.traffic(link.id)
            streams = self._engine.stats(link.id)
            self._hold_back(link, out, streams)
            unsent = sum(stream.unsent_bytes for stream in streams)
            out -= unsent + sum(stream.unacked_bytes for stream in streams)
            sends = into > self._before.setdefault(peer, into) + LEAST_BYTES  # it has begun, too
            more = sends and link.id in coming
            self._observe(peer, link, into, busy=more)
            full = full and (unsent > 0 or link.id in waiting or link.id not in members)
            sent += out
            received += into
        self._upload.observe(now, sent, busy=full)
        self._download.observe(now, received)

    def _observe(self, peer: bytes, link: Link, into: int, *, busy: bool) -> None:
        meter = self._from[peer]
        meter.observe(time.monotonic(), into, busy=busy, least_s=2 * link.rtt_min)
        link.brings_bps = 8 * meter.bytes_per_second

    def hold_back(self) -> None:
        """Gradients are about to flow: pace the streams of full paths."""
        self._keep_paces()
        for link in self._links.values():
            self._hold_back(link, self._engine.traffic(link.id)[0], self._engine.stats(link.id))

    def _keep_paces(self) -> None:
        known = self._paces
        self._paces = {link.id: known.get(link.id) or LinkPace() for link in self._links.values()}

    def _hold_back(self, link: Link, sent: int, streams: Sequence[StreamStats]) -> None:
        self._pace(link.id, self._paces[link.id].observe(sent, link.rtt_min, streams))

    def _pace(self, link: int, bytes_per_second: float | None) -> None:
        if bytes_per_second is not None:
            self._engine.pace(link, bytes_per_second)

    def _contributions(self) -> tuple[set[int], set[int], set[int]]:
        """The links to members; those to which contributions wait to go out; those from which some have not
        come.
        """
        members, waiting, coming = set[int](), set[int](), set[int]()
        for transfer in self._jobs.running():
            job = self._jobs.get(transfer)
            if job is None:
                continue
            progress = self._jobs.progress(transfer)
            for rank, link in enumerate(job.links):
                members.add(link)
                if progress.contributions_sent[rank] < job.owed(rank):
                    waiting.add(link)
                if progress.contributions_received[rank] < job.expected(rank)[0]:
                    coming.add(link)
        return members, waiting, coming

    def jobs(self) -> list[ev.JobProgressed]:
        """How far each transfer is that runs."""
        running = [(transfer, self._jobs.get(transfer)) for transfer in self._jobs.running()]
        return [self._job(transfer, job) for transfer, job in running if job is not None]

    def _job(self, transfer: int, job: JobInProgress) -> ev.JobProgressed:
        progress = self._jobs.progress(transfer)
        return ev.JobProgressed(transfer, self.ranks(job, progress), progress.first_byte_at)

    def _arrived(self, link: int) -> int:
        """Bytes that have come from a peer. A busy machine reads late what has come, and a chunk of a short
        path is read at once when it is whole.
        """
        unread = sum(stream.unread_bytes for stream in self._engine.stats(link))
        return self._engine.traffic(link)[1] + unread

    def ranks(self, job: JobInProgress, progress: JobProgress) -> tuple[ev.RankProgress, ...]:
        """How far the exchange with each member is."""
        ranks = []
        for rank, link in enumerate(job.links):
            contributions, results = job.expected(rank)
            received = 0 if rank == job.rank else self._arrived(link)
            ranks.append(
                ev.RankProgress(
                    progress.contributions_received[rank],
                    progress.results_received[rank],
                    contributions,
                    results,
                    received,
                )
            )
        return tuple(ranks)
