"""The data that a monitor shows at one time, with its JSON and text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from p2pavg.monitor.epochs import Round
from p2pavg.monitor.health import NOBODY, duration
from p2pavg.printable import counted, figure, size

VERSION = 1
BAR = 24


@dataclass(frozen=True, slots=True)
class PeerShown:
    """One peer, as a monitor shows it."""

    peer: str  # hex
    name: str
    region: str
    epoch: int
    samples: int  # of the epoch so far
    samples_per_second: float  # over whole epochs, communication included
    rate: float  # samples per second while it computes
    upload_bps: float  # over its last epoch
    # computing, waiting, averaging, updating, downloading; training: only others tell of it; no link: nobody
    # does; silent; gone
    state: str
    last_seen_s: float
    relayed_bytes: int  # that it has passed on for peers that have no way to each other
    reach: str  # how others open connections to it, in words
    version: str  # of p2pavg; empty: not told
    share: float  # of the samples of all peers, over the last epochs
    memory_bytes: int
    device_memory_bytes: int
    left: bool  # gone, as it said that it leaves
    label: str  # its own name, which others may have too
    # since the watch began
    bytes_sent: int
    bytes_received: int
    samples_discarded: int
    phase_seconds: tuple[float, ...]  # as PHASES


@dataclass(frozen=True, slots=True)
class LinkShown:
    """One link, as its first end measures it."""

    peer: str
    other: str
    distance: str
    rtt_s: float
    streams: int
    rate_bps: float
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A run at one time. Seconds, bytes, bit/s; rates over the last epochs of about 30 seconds."""

    at: float
    run_id: str
    epoch: int
    target: int
    samples: int
    eta_s: float | None
    samples_per_second: float
    granularity: float | None
    dollars_per_hour: float | None
    dollars_per_million_samples: float | None
    leader: str
    peers: tuple[PeerShown, ...]
    links: tuple[LinkShown, ...]
    events: tuple[tuple[int, float, str], ...]  # (number, seconds ago, words), oldest first
    level: str  # of health.Level
    verdict: str  # why, in one sentence
    rounds: tuple[Round, ...]  # by epoch, the last ones
    usual_epoch_s: float | None  # how long an epoch usually takes
    epoch_age_s: float | None  # since the last one ended
    egress_bytes_per_hour: float
    egress_by_distance: Mapping[str, float]  # the same by class of link, nearest first
    told: bool  # a member has told of an epoch: until then nobody knows what is logged, or shared out
    loss: float | None  # the mean over the peers that logged one; None: nobody did, or it is no number
    loss_text: str  # also of what is no number
    passes: float  # over the data; 0.0: no sampler shares data out
    blocks_consumed: int
    memory_bytes: int
    device_memory_bytes: int
    # of the last round
    plan: str
    bytes_by_stage: Mapping[str, int]  # that all peers sent
    egress_dollars: float
    egress_dollars_flat: float
    # since the watch began
    epochs_ended: int
    samples_counted: int
    samples_discarded: int
    attempts_failed: int

    def to_dict(self, at: float) -> dict[str, Any]:
        """JSON data. at: time.time() now, from which the times of events and rounds are reckoned back."""
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            "version": VERSION,
            **data,
            "at": at,
            "peers": [asdict(peer) for peer in self.peers],
            "links": [asdict(link) for link in self.links],
            "events": [
                {"number": number, "at": at - ago, "words": words} for number, ago, words in self.events
            ],
            "rounds": [one.to_dict(at - (self.at - one.at)) for one in self.rounds],
        }


def run_line(shown: Shown) -> str:
    """The run in one line."""
    if not shown.peers:
        return f"run {shown.run_id}: {NOBODY}"
    parts = [f"run {shown.run_id}", f"epoch {shown.epoch}"]
    if shown.target:
        share = min(1.0, shown.samples / shown.target)
        full = round(BAR * share)
        parts.append(f"[{'#' * full}{'.' * (BAR - full)}] {shown.samples}/{shown.target}")
    if shown.eta_s is not None:
        parts.append(f"step in {duration(shown.eta_s)}")
    if shown.passes:
        parts.append(f"pass {int(shown.passes) + 1}, {shown.passes % 1:.0%}")
    parts.append(f"{figure(shown.samples_per_second, 4)} samples/s")
    if shown.granularity is not None:
        parts.append(f"granularity {figure(shown.granularity)} (calculation over communication)")
    if shown.dollars_per_hour is not None:
        parts.append(f"$ {shown.dollars_per_hour:.2f}/h")
        parts.append(f"$ {figure(shown.dollars_per_million_samples or 0.0)} per million samples")
    downloading = sum(peer.state == "downloading" for peer in shown.peers)
    here = sum(peer.state != "gone" for peer in shown.peers) - downloading
    parts.append(counted(here, "peer") + (f" and {downloading} downloading" if downloading else ""))
    return "  ".join(parts)


def figures_line(shown: Shown) -> str:
    """What else there is to know of the run, in one line: only what is known."""
    parts = [f"loss {shown.loss_text}"] if shown.loss_text else []
    classes = ", ".join(f"{size(sent)} {where}" for where, sent in shown.egress_by_distance.items())
    parts.append(f"egress {size(shown.egress_bytes_per_hour)}/h" + (f" ({classes})" if classes else ""))
    if shown.passes:
        parts.append(f"pass {shown.passes:.3f}, {counted(shown.blocks_consumed, 'block')}")
    device = f" + {size(shown.device_memory_bytes)}" if shown.device_memory_bytes else ""
    parts.append(f"memory {size(shown.memory_bytes)}{device}")
    if shown.samples_discarded:
        parts.append(f"{counted(shown.samples_discarded, 'sample')} discarded")
    if shown.attempts_failed:
        parts.append(counted(shown.attempts_failed, "failed attempt"))
    return "  ".join(parts)


def gradients_line(shown: Shown) -> str:
    """What the gradients of the last round were sent as, and what their plan spared; empty: nothing is
    known.
    """
    if not shown.bytes_by_stage:
        return ""
    stages = ", ".join(f"{size(sent)} {stage}" for stage, sent in shown.bytes_by_stage.items())
    if shown.egress_dollars_flat <= 0:
        return f"{shown.plan}: {stages}"
    spared = shown.egress_dollars_flat - shown.egress_dollars
    return f"{shown.plan}: {stages}; $ {figure(shown.egress_dollars)}, {figure(spared)} less than flat"


def rate(bps: float) -> str:
    """Bit/s in words."""
    return f"{bps / 1e9:.2f} Gb/s" if bps >= 1e9 else f"{bps / 1e6:.1f} Mb/s"
