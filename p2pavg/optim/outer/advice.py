"""What a user is told once, when rounds of outer steps take longer than computation hides."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from p2pavg import codecs
from p2pavg.report import RoundReport

log = logging.getLogger("p2pavg.optim")

ADVISED = 4  # averages after which links are known
WORTH_TELLING = 0.05  # of the time of the local steps
LEAST_S = 0.1  # a shorter round is a matter of the local steps, which are few and short, or of chance
CHUNK = 1 << 17


@dataclass(frozen=True, slots=True)
class CodecAdvice:
    """After so many local steps a round with this codec takes no longer than they do."""

    codec: str
    steps: int


def choices(steps: int, calculation: float, communication: float, codec: str) -> list[CodecAdvice]:
    """For the codec in use and for coarser ones. steps: local steps that took `calculation` s, beside a round
    of `communication` s. A round's time counts as proportional to its bytes.
    """
    names = [name for name in codecs.WIRE_IDS if name != "bf16"]
    coarser = names[names.index(codec) + 1 :] if codec in names else []
    return [
        CodecAdvice(
            name, max(1, math.ceil(steps * communication * _bytes(name) / _bytes(codec) / calculation))
        )
        for name in (codec, *coarser)
    ]


def advise(report: RoundReport, steps: int, overlap: int) -> str | None:
    """One sentence with the ways out; None: the round was hidden, or too little is known. steps: local ones
    of this peer in that epoch. Waiting for slower peers is not what the advice is about.
    """
    calculation = report.seconds_calculation
    communication = report.seconds_matchmaking + report.seconds_transfer + report.seconds_commit
    known = report.codec in codecs.WIRE_IDS or report.codec in codecs.SPARSE_IDS
    if calculation <= 0 or steps < 1 or len(report.members) < 2 or not known:
        return None
    if communication < LEAST_S or communication <= (1.0 if overlap else WORTH_TELLING) * calculation:
        return None
    ways = ", ".join(
        f"{one.steps} with {one.codec}" for one in choices(steps, calculation, communication, report.codec)
    )
    behind = "" if overlap else "with Outer(overlap=1) or more "
    return (
        f"a round of outer steps took {communication:.1f} s beside {calculation:.1f} s of {steps} local "
        f"steps: {behind}it hides behind the computation where a peer takes at least so many local steps "
        f"between two averages: {ways} (set by target_batch_size or Outer(sync_every=), and compression)"
    )


class Advisor:
    """Counts local steps and averages, and advises once, when links have been measured."""

    def __init__(self, overlap: int) -> None:
        self._overlap = overlap
        self._steps = 0
        self._averages = 0

    def step(self, ended: bool, report: Callable[[], RoundReport | None]) -> None:
        """A local step was made. ended: an average came with it, which report() tells of."""
        self._steps += 1
        if not ended:
            return
        steps, self._steps = self._steps, 0
        self._averages += 1
        found = report() if self._averages == ADVISED else None
        told = None if found is None else advise(found, steps, self._overlap)
        if told:
            log.warning("%s", told)


def _bytes(codec: str) -> float:
    """Of a value, there and back."""
    there = codecs.get(codec)
    return (there.encoded_size(CHUNK) + codecs.for_results(there).encoded_size(CHUNK)) / CHUNK
