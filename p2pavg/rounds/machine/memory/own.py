"""What the training thread of this peer told last, and what was told to the training thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from p2pavg.rounds.machine.events import LocalProgress
from p2pavg.rounds.machine.rules.pace import UNKNOWN, Pace
from p2pavg.rounds.protocol.ballot import Note, PeerId
from p2pavg.rounds.protocol.roles import LinkFacts


@dataclass(slots=True)
class OwnThread:
    """The properties of the training thread on which rounds depend."""

    samples: int = 0  # samples that are counted, and in no average yet
    weight: float | None = None  # of the contribution; None: the number of its samples
    note: Note = b""  # the note for the coming step
    rate: float = 0.0  # samples per second
    pace: Pace = UNKNOWN
    upload_bps: float = 0.0  # bit/s that this machine sends; 0.0: not measured yet
    download_bps: float = 0.0
    links: Mapping[PeerId, LinkFacts] = field(default_factory=dict)  # links to other peers, where measured
    wait: int = 0  # the number of the wait at a boundary that lasts; 0: the training thread computes
    boundary_at: float = 0.0  # when that wait began
    waits_at: int | None = None  # samples of the others that the training thread was told of
    told_to_stop: bool = False
    offered: dict[int, int] = field(default_factory=dict)  # transfer -> how many of `samples` are in it
    _waits: int = 0

    @property
    def boundary(self) -> bool:
        """Whether the training thread waits at a boundary."""
        return self.wait > 0

    def begin_wait(self, now: float) -> None:
        """The training thread begins to wait, with a contribution that does not change."""
        self._waits += 1
        self.wait, self.boundary_at = self._waits, now

    def end_wait(self) -> None:
        """The training thread computes again, or gets something to apply."""
        self.wait = 0

    def serve(self) -> None:
        """The training thread gets an outcome, whether or not the outcome includes its samples."""
        self.wait = 0
        self.told_to_stop = False

    def forget_stop(self) -> None:
        """The round for which the training thread was to stop is over, or the training thread is at its
        boundary.
        """
        self.told_to_stop = False

    def measured(self, event: LocalProgress) -> None:
        """Take over what this peer measured of itself."""
        self.upload_bps, self.download_bps = event.upload_bps, event.download_bps
        self.rate = event.samples_per_second

    def measured_links(self, links: Mapping[PeerId, LinkFacts]) -> None:
        """Take over what was measured of the links to other peers."""
        self.links = links

    def declares(self, event: LocalProgress) -> bool:
        """The training thread counted so much. Returns whether it waited already, with the same
        contribution.
        """
        declared = event.samples, event.weight, event.note
        same = self.boundary and declared == (self.samples, self.weight, self.note)
        self.samples, self.weight, self.note = declared
        return same

    def offer(self, transfer: int, samples: int) -> None:
        """So many of the training thread's samples went into this transfer."""
        self.offered[transfer] = samples

    def inherit(self, transfer: int, samples: int) -> None:
        """So many of the samples that a departing peer handed over went into this transfer."""
        self.offered[transfer] = self.offered.get(transfer, 0) + samples

    def take_off(self, samples: int) -> None:
        """So many of the training thread's samples are averaged."""
        self.samples -= samples

    def drop(self) -> None:
        """The training thread's samples are gone: overwritten by a state, handed over, or discarded."""
        self.samples = 0

    def step(self, pace: Pace) -> None:
        """A step ended: the next step is expected to take as long."""
        self.pace = pace

    def begin_step(self, now: float) -> None:
        """The next step begins only now: an average was applied before."""
        self.pace = replace(self.pace, since=now)
