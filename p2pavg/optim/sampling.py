"""The sampler that an optimizer draws for, or none: what of it goes into contributions, and comes back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from typing import Any

from p2pavg.data.notes import understand
from p2pavg.data.sampler import SwarmSampler, SwarmShards
from p2pavg.errors import ConfigurationError
from p2pavg.rounds.training import Average, Inheritance

log = logging.getLogger("p2pavg.optim")

SPOILED = "drawn by another peer too"


class Sampling:
    """Samples of a `SwarmSampler` or `SwarmShards`; without one, every method leaves things as they are."""

    def __init__(self, sampler: SwarmSampler | SwarmShards | None) -> None:
        if sampler is not None and not isinstance(sampler, SwarmSampler | SwarmShards):
            raise ConfigurationError(
                f"sampler must be a p2pavg.SwarmSampler or p2pavg.SwarmShards, not {type(sampler).__name__}"
            )
        self.sampler = sampler
        self.draws = None if sampler is None else sampler.draws

    def claim(self, optimizer: Any) -> None:
        """Raises ConfigurationError when another optimizer draws from the sampler."""
        if self.sampler is None:
            return
        before = None if self.sampler.user is None else self.sampler.user()
        if before is not None and before is not optimizer and not before._closed:
            raise ConfigurationError(
                f"sampler draws for another optimizer, of run {before.run_id!r}: build one for each, "
                "or close() that one first"
            )
        self.sampler.user = weakref.ref(optimizer)

    @property
    def terms(self) -> str:
        """What all peers of the run must have in common."""
        return "None" if self.sampler is None else self.sampler.terms()

    def enter(self, me: bytes, peers: Callable[[], Collection[bytes]], tell: Callable[[], None]) -> None:
        """The optimizer enters a run, with nothing accumulated; see `Draws.attach`."""
        if self.draws is not None:
            self.draws.dropped()
            self.draws.attach(me, peers, tell)

    def trained(self, samples: int) -> str:
        """A step() counts so many. Returns why they must be dropped with all that were not handed in yet, if
        so. Raises ConfigurationError when the sampler did not give out as many.
        """
        if self.draws is None:
            return ""
        self.draws.trained(samples)
        if lost := self.draws.yielded:
            self._tell(lost)
        return SPOILED if lost else ""

    def dropped(self, since: int = 0) -> None:
        """All that was accumulated but the last `since` samples is gone."""
        if self.draws is not None:
            self.draws.dropped(since)

    def is_spoiled(self, samples: int) -> bool:
        """Whether what was accumulated, of so many samples, must not be handed in; told if so."""
        if self.draws is None or not self.draws.spoiled:
            return False
        self._tell(samples)
        return True

    @staticmethod
    def _tell(samples: int) -> None:
        log.warning("%d samples of this peer were drawn by another peer too, and are discarded", samples)

    def note(self, inner: bytes, samples: int) -> bytes:
        """What goes with a contribution."""
        return inner if self.draws is None else self.draws.say(inner, samples)

    def inner(self, average: Average) -> bytes:
        """The optimizer's part of what came with an average."""
        return average.note if self.draws is None else understand(average.note)[0]

    def committed(self, average: Average, counted: bool) -> None:
        """The average is in the parameters. counted: with what this peer handed in."""
        if self.draws is not None:
            self.draws.committed(average.note, average.epoch, counted)

    def takes(self, inheritance: Inheritance) -> bool:
        """Whether the samples of a peer that leaves are new here."""
        if self.draws is None or self.draws.inherited(inheritance.note):
            return True
        log.warning("a peer that left gave samples that are known here already; they are not used")
        return False
