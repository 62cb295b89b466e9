"""Watching: what a member tells those that look on. They are told, never asked, and no more than so much.

A watcher sends {"t": "watch"} once over its control link. From then on it gets a status each second, and
events and reports as they happen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from p2pavg import __version__
from p2pavg.report import LinkReport, RoundReport
from p2pavg.report.compact import CompactReport
from p2pavg.report.status import LinkSeen, Other, Status
from p2pavg.rounds.machine.actions import TraceKind
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.measure import memory
from p2pavg.transport.links.link import Link

WATCH = "watch"
INTERVAL_S = 1.0
MOST_WATCHERS = 16
MOST_EVENTS_PER_S = 50
MOST_ROWS = 128
MOST_TEXT = 200
EVENTS = frozenset(  # of these watchers are told
    {
        TraceKind.DOWN,
        TraceKind.SILENT,
        TraceKind.HEARD_AGAIN,
        TraceKind.EXCLUDED,
        TraceKind.ABORTED,
        TraceKind.BEGUN,
        TraceKind.LEADER,
        TraceKind.READMITTED,
        TraceKind.HEAL,
        TraceKind.HEALED,
    }
)


class Watching:
    """The watchers of one member. Runs on the loop thread, and does nothing while there are none."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._links: list[Link] = []
        self._timer: asyncio.TimerHandle | None = None
        self._since, self._told = 0.0, 0  # events of this second

    def watch(self, link: Link) -> None:
        """A peer wants to look on; beyond MOST_WATCHERS it is not heard."""
        if link in self._links or len(self._links) >= MOST_WATCHERS:
            return
        self._links.append(link)
        if self._timer is None:
            self._beat()
        else:
            link.send({"t": "status", **self._status().to_message()})

    def link_down(self, link: Link) -> None:
        """It is gone."""
        if link in self._links:
            self._links.remove(link)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something happened in the rounds."""
        if not self._links or kind not in EVENTS:
            return
        now = time.monotonic()
        if now - self._since >= 1.0:
            self._since, self._told = now, 0
        self._told += 1
        if self._told <= MOST_EVENTS_PER_S:
            plain = {name: _plain(value) for name, value in fields.items()}
            self._tell({"t": "event", "kind": kind, "fields": plain})

    def report(self, report: RoundReport) -> None:
        """An epoch was finished here."""
        if self._links:
            self._tell({"t": "report", "report": CompactReport.of(report).encode()})

    def close(self) -> None:
        """Stop."""
        self._links.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._timer = None
        if self._links:
            self._tell({"t": "status", **self._status().to_message()})
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._beat)

    def _tell(self, message: Mapping[str, Any]) -> None:
        for link in list(self._links):
            link.send(message)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, bytes)):
        return value
    return str(value)[:MOST_TEXT]


def status(
    machine: Machine,
    links: Sequence[LinkReport],
    last: RoundReport | None,
    *,
    region: str,
    reach: str,
    moving: bool,
    relayed: int,
) -> Status:
    """Where this member stands, whom it sees, and its links. last: its newest report. reach: how others open
    connections to it. moving: gradients flow. relayed: bytes that it has passed on for others.
    """
    loss = None if last is None else last.extra.get("loss")
    core = machine.core
    others = list(core.linked)[:MOST_ROWS]
    followers = sum(
        facts.samples for facts in core.linked.trainers() if core.stands_here(facts) and not facts.pending
    )
    own = 0 if core.here.pending else core.own.samples
    return Status(
        epoch=core.here.epoch,
        target=0 if core.config.lockstep else core.target,
        samples=own,
        counted=own + followers if core.leader() == core.me else None,
        rate=core.own.rate,
        state=_state(machine, moving),
        leader=core.leader() or b"",
        total=core.history.total,
        region=region,
        relayed=relayed,
        peers=tuple(Other(f.peer, f.epoch, f.samples, f.rate, f.silent) for f in others),
        links=tuple(
            LinkSeen(
                peer=bytes.fromhex(link.peer),
                distance=link.distance,
                rtt_s=link.rtt_s,
                streams=link.streams,
                rate_bps=link.rate_bps,
                bytes_sent=link.wire_bytes_sent,
                bytes_received=link.wire_bytes_received,
            )
            for link in links[:MOST_ROWS]
        ),
        version=__version__,
        reach=reach,
        memory=memory.resident_bytes(),
        device_memory=memory.device_bytes(),
        loss=None if loss is None else float(loss),
        passes=0.0 if last is None else last.passes,
        blocks_consumed=0 if last is None else last.blocks_consumed,
        plan="" if last is None else last.plan,
        bytes_by_stage=() if last is None else tuple(last.bytes_by_stage.items()),
        egress_dollars=0.0 if last is None else last.egress_dollars,
        egress_dollars_flat=0.0 if last is None else last.egress_dollars_flat,
    )


def _state(machine: Machine, moving: bool) -> str:
    core = machine.core
    if core.here.joining is not None or core.here.role.value != "trainer":
        return "downloading"
    if moving:
        return "averaging"
    if core.here.pending:
        return "updating"
    return "waiting" if core.own.boundary else "computing"
