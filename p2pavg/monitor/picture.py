"""Picture: the state of a run, put together from records, links and messages. Pure: time is a parameter."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from p2pavg.identity import short_id, told_apart
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.monitor import heard
from p2pavg.monitor.epochs import Epochs
from p2pavg.monitor.health import RECENT_S, Signs, verdict
from p2pavg.monitor.seen import Seen
from p2pavg.monitor.shown import LinkShown, PeerShown, Shown
from p2pavg.monitor.story import LEFT, Story, text_of
from p2pavg.printable import counted
from p2pavg.report import is_number
from p2pavg.report.compact import CompactReport
from p2pavg.report.distance import Distance
from p2pavg.report.prices import PriceTable, per_hour, per_million
from p2pavg.report.status import Other, Status

STALE_S = 2.5  # seconds after which a status counts no more; members send one each second
KEPT_S = 30.0  # seconds for which a peer that is gone is still shown
HEARSAY_DELAY_S = 0.3  # seconds after a link closed from which on other members' words of its peer count
FINDING_S = 3.0  # seconds: a peer that comes into view so soon was in the run before
EVENTS_SHOWN = 32


class Picture:
    """The state of a run. A watcher feeds it, and `show` returns what people see."""

    def __init__(self, run_id: str, prices: PriceTable | None = None) -> None:
        self.run_id = run_id
        self.story = Story(self._called)
        self.epochs = Epochs()
        self._prices = prices
        self._told_of_regions = False
        self._peers: dict[bytes, Seen] = {}
        self._found_at: float | None = None

    # ------------------------------------------------------------------------------------ what is heard

    def listed(self, peers: Mapping[bytes, PeerInfo], now: float) -> None:
        """Take the records of the run that are in view now."""
        for peer, info in peers.items():
            if info.role != "trainer":
                continue
            seen = self._peers.get(peer)
            if seen is None:
                there = [other.epoch for other in self._peers.values() if other.gone_at is None]
                seen = self._peers[peer] = Seen(info, heard_at=now)
                if self._found_at is not None and now - self._found_at > FINDING_S:
                    self.story.came(peer, info.epoch, there, now)
            if seen.info != info:
                seen.heard_at = now
                if seen.gone_at is not None and (
                    seen.info is None or info.incarnation > seen.info.incarnation
                ):
                    seen.gone_at = None
            seen.info = info
            report = CompactReport.decode(info.report) if info.report and not seen.linked else None
            if report is not None:
                self._reported(peer, seen, report, now)
        for peer, seen in self._peers.items():
            if peer not in peers and not seen.linked and seen.gone_at is None:
                self._gone(peer, seen, LEFT, now)
        if self._found_at is None and peers:
            self._found_at = now

    def linked(self, peer: bytes, now: float) -> None:
        """Take note that a link to the peer is up."""
        seen = self._peers.setdefault(peer, Seen())
        seen.linked, seen.gone_at, seen.silent, seen.heard_at = True, None, False, now
        seen.forget_reports()

    def unlinked(self, peer: bytes, reason: str, now: float) -> None:
        """Take note that the link to the peer is gone."""
        seen = self._peers.get(peer)
        if seen is not None and seen.linked:
            seen.linked = False
            self._gone(peer, seen, reason, now)

    def told(self, by: bytes, message: Mapping[str, Any], now: float) -> None:
        """Take a member's message. A malformed one, or one of an unknown kind, changes nothing."""
        seen = self._peers.get(by)
        if seen is None:
            return
        match message.get("t"):
            case "status":
                status = Status.from_message(message)
                if status is not None:
                    seen.status, seen.status_at, seen.heard_at = status, now, now
            case "report":
                report = CompactReport.decode(message.get("report"))
                if report is not None:
                    self._reported(by, seen, report, now)
                    seen.heard_at = now
            case "event":
                event = heard.event(message)
                if event is not None:
                    self._event(by, event, now)

    def _reported(self, peer: bytes, seen: Seen, report: CompactReport, now: float) -> None:
        if seen.add(report, now):
            self.epochs.add(peer, report, now)
            if report.samples_discarded:
                what = counted(report.samples_discarded, "sample")
                self.story.say(
                    f"{self._called(peer)} discarded {what} in epoch {report.epoch}", now, report.epoch
                )

    def _event(self, by: bytes, event: heard.MemberEvent, now: float) -> None:
        about = None if event.peer is None else self._peers.get(event.peer)
        if about is not None and event.kind in ("silent", "heard again"):
            about.silent = event.kind == "silent"
        if about is not None and event.kind == "down" and not about.linked and about.gone_at is None:
            about.gone_at, about.gone_why = now, event.why
        self.story.told(by, event, now)

    def _gone(self, peer: bytes, seen: Seen, why: str, now: float) -> None:
        seen.gone_at, seen.gone_why = now, why
        self.story.gone(peer, seen.epoch, why, now)

    def _names(self) -> dict[bytes, str]:
        return told_apart({p: "" if s.info is None else s.info.name for p, s in self._peers.items()})

    def _called(self, peer: bytes) -> str:
        """The peer's name as the subject of a sentence."""
        seen = self._peers.get(peer)
        if seen is None or seen.info is None or not seen.info.name:
            return f"peer {short_id(peer)}"
        return self._names()[peer]

    # ----------------------------------------------------------------------------------- what is shown

    def show(self, now: float) -> Shown:
        """The whole state as of `now`, as plain data."""
        for peer in [p for p, s in self._peers.items() if s.gone_at is not None and now - s.gone_at > KEPT_S]:
            del self._peers[peer]
        names = self._names()
        states = {peer: self._state(peer, seen, now) for peer, seen in self._peers.items()}
        here = {peer: self._peers[peer] for peer, state in states.items() if state not in ("gone", "silent")}
        leader = self._leader(here, now)
        epoch = max((seen.epoch for seen in here.values()), default=0)
        target = max((seen.status.target for seen in here.values() if seen.status is not None), default=0)
        pace = self._pace(here, now)
        live = sum(seen.rate for seen in here.values())
        samples = self._counted(here, leader, epoch, live, target, now)
        dollars = self._dollars(here)
        self._look_at_regions(now)
        left = max(0.0, target - samples)
        total_pace = sum(seen.pace for seen in here.values())
        rows = tuple(
            self._row(peer, names[peer], seen, states[peer], total_pace, now)
            for peer, seen in sorted(self._peers.items())
        )
        told = [seen.status for seen in here.values() if seen.status is not None]
        loss = _mean_loss(told)
        level, why = verdict(self._signs(rows, loss, now))
        return Shown(
            at=now,
            run_id=self.run_id,
            epoch=epoch,
            target=target,
            samples=samples,
            eta_s=left / live if target and live > 0 else None,
            samples_per_second=pace,
            granularity=_granularity(here.values()),
            dollars_per_hour=dollars,
            dollars_per_million_samples=None if dollars is None else per_million(dollars / 3600, pace),
            leader="" if leader is None else leader.hex(),
            peers=rows,
            links=tuple(self._links(here)),
            events=tuple(
                (line.number, now - line.at, text_of(line)) for line in list(self.story.lines)[-EVENTS_SHOWN:]
            ),
            level=level,
            verdict=why,
            rounds=self.epochs.rounds(),
            usual_epoch_s=self.epochs.usual_seconds(),
            epoch_age_s=self._epoch_age(now),
            egress_bytes_per_hour=3600 * sum(seen.sent_per_s for seen in here.values()),
            egress_by_distance=_by_distance(here.values()),
            told=any(seen.reports for seen in here.values()) or any(status.plan for status in told),
            loss=loss if loss is not None and is_number(loss) else None,
            loss_text="" if loss is None else f"{loss:.4g}",
            passes=max((status.passes for status in told), default=0.0),
            blocks_consumed=max((status.blocks_consumed for status in told), default=0),
            memory_bytes=sum(status.memory for status in told),
            device_memory_bytes=sum(status.device_memory for status in told),
            plan=next((status.plan for status in told if status.plan), ""),
            bytes_by_stage=_by_stage(told),
            egress_dollars=max((status.egress_dollars for status in told), default=0.0),
            egress_dollars_flat=max((status.egress_dollars_flat for status in told), default=0.0),
            epochs_ended=self.epochs.ended,
            samples_counted=self.epochs.samples,
            samples_discarded=self.epochs.discarded,
            attempts_failed=self.epochs.failed_attempts,
        )

    def _epoch_age(self, now: float) -> float | None:
        return None if self.epochs.ended_at is None else max(0.0, now - self.epochs.ended_at)

    def _signs(self, rows: Sequence[PeerShown], loss: float | None, now: float) -> Signs:
        downloading = sum(row.state == "downloading" for row in rows)
        silent = [row.name for row in rows if row.state == "silent"]
        return Signs(
            here=sum(row.state not in ("gone", "silent", "downloading") for row in rows),
            downloading=downloading,
            silent=silent,
            lost=[row.name for row in rows if row.state == "gone" and not row.left],
            usual_s=self.epochs.usual_seconds(),
            age_s=self._epoch_age(now),
            discarded=sum(one.discarded for one in self.epochs.rounds() if now - one.at <= RECENT_S),
            loss=loss,
        )

    def _state(self, peer: bytes, seen: Seen, now: float) -> str:
        others = self._by_others(peer, max(now - STALE_S, (seen.gone_at or 0.0) + HEARSAY_DELAY_S))
        if seen.gone_at is not None and others is None:
            return "gone"
        if seen.silent or (seen.linked and seen.status is not None and now - seen.status_at > STALE_S):
            return "silent"
        if seen.status is not None and now - seen.status_at <= STALE_S:
            return seen.status.state
        if others is None:
            return "no link"
        return "downloading" if seen.info is not None and seen.info.joining else "training"

    def _by_others(self, peer: bytes, since: float) -> Other | None:
        """The peer as seen by the member with the newest status since then; None: no member hears it."""
        told = [other for key, other in self._peers.items() if key != peer and other.gone_at is None]
        for other in sorted(told, key=lambda other: -other.status_at):
            if other.status is None or other.status_at < since:
                break
            for row in other.status.peers:
                if row.peer == peer and not row.silent:
                    return row
        return None

    def _row(
        self, peer: bytes, name: str, seen: Seen, state: str, total_pace: float, now: float
    ) -> PeerShown:
        if seen.status is not None:
            epoch, samples, pace = seen.epoch, seen.status.samples, seen.status.rate
        else:
            others = self._by_others(peer, now - STALE_S)
            epoch = max(seen.epoch, 0 if others is None else others.epoch)
            samples = 0 if others is None else others.samples
            pace = seen.rate if others is None else others.rate
        last = seen.reports[-1] if seen.reports else None
        sent = 0 if last is None else sum(last.sent.values())
        return PeerShown(
            peer=peer.hex(),
            name=name,
            region=seen.region,
            epoch=epoch,
            samples=samples,
            samples_per_second=seen.pace,
            rate=pace,
            upload_bps=8 * sent / last.seconds_total if last is not None and last.seconds_total > 0 else 0.0,
            state=state,
            last_seen_s=max(0.0, now - seen.heard_at),
            relayed_bytes=0 if seen.status is None else seen.status.relayed,
            reach=seen.reach,
            version="" if seen.status is None else seen.status.version,
            share=seen.pace / total_pace if total_pace > 0 and state not in ("gone", "silent") else 0.0,
            memory_bytes=0 if seen.status is None else seen.status.memory,
            device_memory_bytes=0 if seen.status is None else seen.status.device_memory,
            left=seen.gone_why == LEFT,
            label="" if seen.info is None else seen.info.name,
            bytes_sent=seen.sent,
            bytes_received=seen.received,
            samples_discarded=seen.discarded,
            phase_seconds=tuple(seen.phases.values()),
        )

    def _links(self, here: Mapping[bytes, Seen]) -> list[LinkShown]:
        return [
            LinkShown(
                peer.hex(),
                link.peer.hex(),
                str(link.distance),
                link.rtt_s,
                link.streams,
                link.rate_bps,
                link.bytes_sent,
                link.bytes_received,
            )
            for peer, seen in sorted(here.items())
            if seen.status is not None
            for link in seen.status.links
            if link.peer in self._peers
        ]

    def _leader(self, here: Mapping[bytes, Seen], now: float) -> bytes | None:
        """The leader that most members with a fresh status follow."""
        votes: dict[bytes, int] = {}
        for seen in here.values():
            if seen.status is not None and now - seen.status_at <= STALE_S and seen.status.leader:
                votes[seen.status.leader] = votes.get(seen.status.leader, 0) + 1
        return max(votes, key=lambda peer: (votes[peer], peer), default=None)

    def _counted(
        self,
        here: Mapping[bytes, Seen],
        leader: bytes | None,
        epoch: int,
        live: float,
        target: int,
        now: float,
    ) -> int:
        """Samples of the epoch so far: the last count, carried on to now at the run's rate."""
        seen = None if leader is None else here.get(leader)
        if seen is not None and seen.status is not None and seen.status.counted is not None:
            counted, at = seen.status.counted, seen.status_at
            if seen.status.epoch < epoch:
                counted, at = 0, max(at, seen.reported_at)
        else:
            told = [s for s in here.values() if s.status is not None and s.status.epoch == epoch]
            counted = sum(s.status.samples for s in told if s.status is not None)
            at = max((s.status_at for s in told), default=now)
        return min(int(counted + live * min(now - at, STALE_S)), target) if target else counted

    def _pace(self, here: Mapping[bytes, Seen], now: float) -> float:
        """The run's samples/s: samples over wall clock, in the epochs of the peer that reported most."""
        known = max(here.values(), key=lambda seen: (seen.seconds, seen.reported_at), default=None)
        if known is None or known.seconds <= 0:
            return sum(seen.rate for seen in here.values())
        longest = max(report.seconds_total for report in known.reports)
        overdue = max(0.0, now - known.reported_at - 2 * longest)
        return sum(report.samples for report in known.reports) / (known.seconds + overdue)

    def _dollars(self, here: Mapping[bytes, Seen]) -> float | None:
        """Dollars per hour of all peers."""
        if self._prices is None:
            return None
        total = 0.0
        for seen in here.values():
            region = seen.region
            if not seen.reports:
                total += self._prices.hourly(region)
                continue
            sent = seen.sent_by_distance
            spent = self._prices.dollars(region, seen.seconds, sent, self._sent_to_regions(seen, sent))
            total += per_hour(spent, seen.seconds)
        return total

    def _look_at_regions(self, now: float) -> None:
        """Say once when no peer is in a region of the price table."""
        there = [seen for seen in self._peers.values() if seen.gone_at is None]
        found = self._found_at is not None and now - self._found_at > FINDING_S
        if self._prices is None or self._told_of_regions or not there or not found:
            return
        self._told_of_regions = True
        told = self._prices.unmatched({seen.region for seen in there})
        if told is not None:
            self.story.say(told, now, max(seen.epoch for seen in there))

    def _sent_to_regions(
        self, seen: Seen, sent: Mapping[Distance, int]
    ) -> Iterator[tuple[str, Distance, float]]:
        """Where the bytes of each class of link went: they are shared out as those of the last epoch were."""
        links = () if seen.status is None else seen.status.links
        last = Counter[Distance]()
        for link in links:
            last[link.distance] += link.bytes_sent
        for link in links:
            other = self._peers.get(link.peer)
            if other is not None and other.region and link.bytes_sent:
                share = link.bytes_sent / last[link.distance]
                yield other.region, link.distance, share * sent.get(link.distance, 0)


def _by_distance(here: Iterable[Seen]) -> dict[str, float]:
    """Bytes an hour that all peers send, by class of link, nearest first."""
    total = dict.fromkeys(Distance, 0.0)
    for seen in here:
        for where, sent in seen.sent_by_distance.items():
            total[where] += 3600 * sent / seen.seconds
    return {str(where): sent for where, sent in total.items() if sent}


def _by_stage(told: Sequence[Status]) -> dict[str, int]:
    """Bytes that all peers sent in their last rounds, by stage of the plan."""
    total: dict[str, int] = {}
    for status in told:
        for stage, sent in status.bytes_by_stage:
            total[stage] = total.get(stage, 0) + sent
    return total


def _mean_loss(told: Sequence[Status]) -> float | None:
    """The mean of the losses that were logged; of one that is no number, or too large a sum, that."""
    losses = [status.loss for status in told if status.loss is not None]
    strange = [loss for loss in losses if not is_number(loss)]
    if strange:
        return strange[0]
    return statistics.fmean(losses) if losses else None


def _granularity(peers: Any) -> float | None:
    last = [seen.reports[-1] for seen in peers if seen.reports]
    calculation = sum(report.seconds_calculation for report in last)
    communication = sum(
        r.seconds_waiting + r.seconds_matchmaking + r.seconds_transfer + r.seconds_commit for r in last
    )
    return calculation / communication if communication > 0 else None
