"""A training job without a model: steps that sleep, and contributions that show who is in an average.

Every peer owns one slot of the vector, found from its id, and contributes 1.0 there and 0.0 elsewhere. In the
weighted mean, the slot then holds the peer's share of the total weight: a result shows, by itself, exactly
whose contributions it holds and with which weights.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pavg.errors import StateError
from p2pavg.peer.peer import Peer
from p2pavg.report import RoundReport
from p2pavg.rounds.training import (
    Average,
    Contribution,
    Heal,
    KeepGoing,
    Outcome,
    Section,
    Snapshot,
    TrainingSpec,
)

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
TOLERANCE = 2e-3  # the most by which a share may differ after fp16


def slot(peer_id: bytes, numel: int) -> int:
    """The index of the vector's element that holds a peer's share."""
    return int.from_bytes(peer_id[:8], "big") % numel


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch, as a toy trainer saw it."""

    epoch: int
    late: bool
    seconds_in_step: float  # duration of the step() that ended the epoch
    result: str  # hash of the averaged vector
    parameters: str  # hash of the parameters after the epoch
    wrong: str  # how the result differs from the mean of the announced members; empty: not at all
    samples: int  # counted, but not in an average yet
    counted_at: tuple[float, ...]  # time.monotonic() of every step that counted towards the epoch
    report: RoundReport | None


class ToyTrainer:
    """Counts one sample per step, averages, and adds every average to its parameters."""

    def __init__(
        self,
        peer: Peer,
        *,
        target: int,
        step_seconds: float,
        numel: int,
        on_epoch: Callable[[Epoch], None],
        extra: U8 | None = None,
        noise: bool = False,
    ) -> None:
        """extra: uint8[bytes], state beside the parameters, like a user's own state. noise: contributions
        stand on noise that is the same for all peers, and that no packing makes smaller.
        """
        self.peer = peer
        self.numel = numel
        self.step_seconds = step_seconds
        self.on_epoch = on_epoch
        self.parameters: F32 = np.zeros(numel, np.float32)
        self._gradient: F32 = np.zeros(numel, np.float32)
        self._base: F32 = self._gradient.copy()
        if noise:
            self._base = np.random.default_rng(0).random(numel, np.float32) - np.float32(0.5)
            self._gradient[:] = self._base
        self._gradient[slot(peer.peer_id, numel)] += 1.0
        self._extra: U8 = np.empty(0, np.uint8) if extra is None else extra
        self.loaded_at = 0.0  # time.monotonic() when a downloaded state was loaded
        self._average: F32 = np.empty(numel, np.float32)
        self._counted_at: list[float] = []
        schema = hashlib.sha256(b"toy" + numel.to_bytes(8, "big")).digest()
        spec = TrainingSpec(target, numel, schema, b"\0" * 32, peer.compression, self)
        self.session = peer.training(spec)
        while not isinstance(outcome := self.session.arrive(Contribution(None, 1.0, 0)), KeepGoing):
            self._apply(outcome, time.monotonic())

    @classmethod
    def of(
        cls,
        peer: Peer,
        config: Mapping[str, Any],
        *,
        numel: int,
        on_epoch: Callable[[Epoch], None],
        extra: U8 | None = None,
        noise: bool = False,
    ) -> ToyTrainer:
        """The trainer of a bench's worker, with the target and the pace that its configuration names."""
        return cls(
            peer,
            target=config["target"],
            step_seconds=config["step_seconds"],
            numel=numel,
            on_epoch=on_epoch,
            extra=extra,
            noise=noise,
        )

    def step(self) -> None:
        """One microbatch: sleep as long as an accelerator would compute, then count."""
        time.sleep(self.step_seconds)
        start = time.monotonic()
        self._counted_at.append(start)
        if not self.session.count(1):
            return
        self._arrive(start)
        while self.session.catching_up:
            self._arrive(start)

    def _arrive(self, start: float) -> None:
        outcome = self.session.arrive(Contribution(self._gradient, 1.0, self.session.samples()))
        self._apply(outcome, start)

    def _apply(self, outcome: Outcome, start: float) -> None:
        if isinstance(outcome, Heal):
            with self.session.applying():
                self.load(outcome.state.meta, outcome.state.buffers)
            self.session.applied(0.0)
        elif isinstance(outcome, Average):
            begin = time.monotonic()
            with self.session.applying():
                outcome.result.decode_into(self._average)
                self.parameters += self._average
            self.session.applied(time.monotonic() - begin)
            seconds = time.monotonic() - start
            report = self.session.last_report
            if report is not None and report.epoch != outcome.epoch:
                report = self.session.last_report  # this process was stopped while it waited for the report
            counted = () if outcome.late else tuple(self._counted_at)
            if not outcome.late:
                self._counted_at.clear()
            self.on_epoch(
                Epoch(
                    epoch=outcome.epoch,
                    late=outcome.late,
                    seconds_in_step=seconds,
                    result=_hash(self._average),
                    parameters=_hash(self.parameters),
                    wrong=_misfit(self._average, report, self._base),
                    samples=self.session.samples(),
                    counted_at=counted,
                    report=report,
                )
            )

    # -- the state that newcomers download

    def snapshot(self) -> Snapshot:
        """The parameters."""
        sections = {"parameters": Section.of(self.parameters), "extra": Section.of(self._extra)}
        return {"numel": self.numel}, sections

    def load(self, meta: Mapping[str, Any], buffers: Mapping[str, U8]) -> None:
        """Take over a downloaded state. Raises StateError when its size is another."""
        fresh = buffers["parameters"].view(np.float32)
        if meta.get("numel") != self.numel or fresh.size != self.numel:
            raise StateError("the downloaded state is of another size")
        self.parameters[:] = fresh
        if buffers["extra"].size != self._extra.size:
            raise StateError("the downloaded state is of another size")
        self._extra[:] = buffers["extra"]
        self.loaded_at = time.monotonic()


def _hash(vector: F32) -> str:
    return hashlib.blake2b(vector.tobytes(), digest_size=12).hexdigest()


def _misfit(average: F32, report: RoundReport | None, base: F32) -> str:
    """Compare a result with the members that the report announces."""
    if report is None:
        return ""
    total = sum(member.weight for member in report.members)
    expected = base.copy()
    for member in report.members:
        expected[slot(bytes.fromhex(member.peer), average.size)] += member.weight / total
    worst = int(np.argmax(np.abs(average - expected)))
    if abs(float(average[worst] - expected[worst])) > TOLERANCE:
        return f"element {worst} is {average[worst]:.4f} where the members make it {expected[worst]:.4f}"
    return ""
