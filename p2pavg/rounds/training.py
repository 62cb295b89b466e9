"""What the training thread sees of the rounds: count samples, arrive at a boundary, get an outcome.

The training thread owns the gradients and the parameters. The event-loop thread decides. They meet here:
`count` is
O(1) and touches no network; when it returns True the training thread calls `arrive`, which blocks until the
loop
thread has an `Outcome` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.encoded import EncodedResult
from p2pavg.allreduce.encoding import DeviceGradient
from p2pavg.codecs import Codec
from p2pavg.errors import StateError
from p2pavg.rounds.protocol.ballot import Note, PeerId
from p2pavg.rounds.protocol.roles import Generation

if TYPE_CHECKING:
    from p2pavg.rounds.state.files.saver import Saving

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

PIECE_BYTES = 1 << 22  # of a snapshot, copied at a time


@dataclass(frozen=True, slots=True)
class Contribution:
    """What this peer brings to a round: the mean over its samples is `gradient * scale`, over `samples`
    samples.

    gradient: flat float32[numel], or one that is encoded elsewhere; unchanged until the outcome. None:
    nothing to contribute (weight 0).
    """

    gradient: F32 | DeviceGradient | None
    scale: float
    samples: int
    weight: float | None = None  # what the mean counts in the average; None: its samples
    note: Note = b""  # for the step of all members, if this peer leads the round; at most 64 KiB


@dataclass(slots=True)
class State:
    """A snapshot at an epoch boundary: small metadata that msgpack can carry, and named flat byte buffers."""

    epoch: int
    lineage: bytes
    meta: dict[str, Any]
    buffers: dict[str, U8] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """A named part of a snapshot: its size, and how to copy it into uint8[nbytes], piece by piece: whoever
    copies may stop between two.
    """

    nbytes: int
    copy_to: Callable[[U8], Iterator[None]]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Section:
        """The bytes of a contiguous array."""
        flat = array.reshape(-1).view(np.uint8)

        def copy_to(out: U8) -> Iterator[None]:
            for at in range(0, flat.nbytes, PIECE_BYTES):
                out[at : at + PIECE_BYTES] = flat[at : at + PIECE_BYTES]
                yield

        return cls(flat.nbytes, copy_to)


Snapshot = tuple[dict[str, Any], dict[str, Section]]


def copied(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, U8]]:
    """(meta, buffers) as `StateSource.load` takes them."""
    meta, sections = snapshot
    buffers = {name: np.empty(section.nbytes, np.uint8) for name, section in sections.items()}
    for name, section in sections.items():
        for _ in section.copy_to(buffers[name]):
            pass
    return meta, buffers


class SwappedError(StateError):
    """Right now the live state is not the one that the last step left; it will be again."""


class StateSource(Protocol):
    """The optimizer's side of joining: how a snapshot is taken and loaded."""

    def snapshot(self) -> Snapshot:
        """(meta, sections). Called on a background thread while the training thread is not applying; the
        sections are copied before it applies again, or not at all. Copying may raise SwappedError.
        """

    def load(self, meta: Mapping[str, Any], buffers: Mapping[str, U8]) -> None:
        """Replace the training state, on the training thread. Raises StateError when it does not fit."""


@dataclass(frozen=True, slots=True)
class KeepGoing:
    """Nothing to apply: go on computing, gradients and samples are kept."""


@dataclass(frozen=True, slots=True)
class Average:
    """A committed average for `epoch`: decode it, step, then call `Training.applied`.

    late: the round went on without this peer's samples (weight 0): its own gradient buffer is not part of
    the result
    and must be kept for the next epoch, so decode into another buffer.
    """

    epoch: int
    samples: int  # all members' samples
    members: int
    late: bool
    result: EncodedResult  # decoded into bits that are equal on all peers
    note: Note  # of the leader, or of another member when that computed on: the same on all peers
    rank: int = -1  # of this peer among the members; -1: the others made it without this peer
    hindered: bool = False  # somebody was left out who could not be averaged with, or did wrong


@dataclass(frozen=True, slots=True)
class Heal:
    """This peer is behind or on another lineage: load `state` (its accumulated samples are discarded and
    reported).
    """

    state: State
    history: tuple[Generation, ...] = ()  # of this very state: another download may have begun since


@dataclass(frozen=True, slots=True)
class Inheritance:
    """A peer that leaves gave what it accumulated to this one: add `result * samples` to the own sums.

    Then call `Training.inherited(samples)`, and `arrive` again.
    """

    samples: int
    result: EncodedResult  # the mean over its samples
    note: Note = b""  # that went with them


Outcome = KeepGoing | Average | Heal | Inheritance


class Training(Protocol):
    """One optimizer's place in the run."""

    @property
    def epoch(self) -> int: ...

    def count(self, samples: int) -> bool:
        """Add a microbatch's samples. O(1), no network. True: `arrive` must be called now."""

    @property
    def leads(self) -> bool:
        """Whether this peer leads the rounds, as far as it knows."""

    @property
    def catching_up(self) -> bool:
        """Whether more results come that the others made without this peer: no step is worth its while."""

    def samples(self) -> int:
        """What was counted since the last average that included it."""

    def unaveraged(self) -> int:
        """Those of them that are not in an average which was given and is not applied yet, either."""

    def arrive(self, contribution: Contribution) -> Outcome:
        """At a step boundary: hand in what was accumulated and wait for what to do. Raises P2PAvgError."""

    def withdraw(self) -> Outcome:
        """After something interrupted `arrive`: what became of it, which is to be followed as always."""

    def leave(self, contribution: Contribution, notice_s: float) -> Outcome:
        """Like `arrive`, for the last time: hand it over to somebody, within `notice_s` seconds.

        KeepGoing: it is over. What was an Average or Inheritance is to be applied first, then called again.
        """

    @property
    def standing(self) -> tuple[int, bytes]:
        """(epoch, lineage) of the parameters."""

    def history(self) -> tuple[Generation, ...]:
        """The generations that led there, and perhaps some that are yet to be applied."""

    def inherited(self, samples: int) -> None:
        """The last Inheritance is in the sums."""

    def refused(self, samples: int, why: str) -> None:
        """Samples that were never counted here are not used, such as those of the last Inheritance: they are
        named in the next report.
        """

    def applying(self) -> AbstractContextManager[None]:
        """Held while parameters or optimizer state change, so that snapshots are taken of whole epochs."""

    def applied(
        self, seconds_update: float, *, extra: Mapping[str, float] | None = None, waited: float | None = None
    ) -> None:
        """The last Average or Heal was applied; reports go out, the next epoch begins.

        waited: seconds that training waited while round and update ran behind it; None: it waited for all of
        them.
        """

    def discard(self, why: str, since: int = 0) -> None:
        """Drop the samples counted so far, except the last `since`; they are named in the next report."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """Where a run goes on after a checkpoint was loaded."""

    epoch: int
    lineage: bytes
    history: tuple[Generation, ...] = ()


class Figures(Protocol):
    """What a report says of the data in a round."""

    @property
    def consumed(self) -> Sequence[tuple[int, int, int]]:
        """(pass, first, end) of positions, of all members."""

    @property
    def passes(self) -> float:
        """Passes over the data, as far as they are consumed."""

    @property
    def blocks_consumed(self) -> int: ...

    @property
    def blocks_returned(self) -> int:
        """That this peer drew, and whose samples are in no average."""


class Drawing(Protocol):
    """Which samples this peer draws, where a sampler of the swarm decides. Any thread may ask."""

    def combine(
        self, said: Mapping[PeerId, Note], members: Sequence[PeerId], leader: PeerId
    ) -> tuple[Note, frozenset[PeerId]]:
        """As the leader: the round's note from those of contributions, and whose cannot be counted."""

    def claims(self) -> list[int]:
        """What this peer draws without a lease."""

    def heard(self, peer: PeerId, claims: Any) -> None:
        """Another peer told its claims. Raises ValueError for what is none."""

    def figures(self, note: Note) -> Figures:
        """Of the round with this note."""


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """What all peers of a run must agree on, and what this one brings."""

    target_batch_size: int
    numel: int  # elements of the flat gradient
    schema: (
        bytes  # 32 bytes: sha256 over names, shapes and dtypes of the parameters, and the optimizer's class
    )
    initial_digest: bytes  # 32 bytes: sha256 of the initial parameters and buffers
    compression: str | Codec
    state: StateSource
    saving: Saving | None = None  # checkpoints; None: none are written
    state_upload_bps: float | None = None  # most bit/s that all newcomers together get of the state
    egress_usd_per_hour: float | None = None  # the most that the swarm's rounds may cost; None: no limit
    start: RunStart | None = None  # None: at epoch 0, from the initial parameters
    lockstep: bool = False  # one step() of each peer present makes an epoch, not target_batch_size samples
    weighted: bool = False  # contributions have weights of their own; else each weighs as much as its samples
    inherits: bool = False  # takes over what peers that leave have accumulated
    describe: Sequence[str] = ()  # words for error messages, e.g. the model's class and parameter count
    outline: Sequence[str] = ()  # a line for each thing that `schema` is made of, to name what differs
    terms: Mapping[str, int | str] = field(default_factory=dict)  # what else all peers must share, by name
    # Epoch -> elements of the vector when it goes uncompressed, state behind the gradient; 0: it does not.
    exact: Callable[[int], int] = lambda epoch: 0
    allocate: Callable[[int], U8] | None = None  # host memory for results: uint8[n]; None: ordinary memory
    keeps_results: bool = False  # of the last rounds, for members that miss one: epochs are long
    drawing: Drawing | None = None  # a sampler shares the data out between the peers
    # Vectors that take turns, epoch by epoch: what a coarse codec took from a contribution is added to the
    # next one of the same vector. 0: it is lost.
    feedback: int = 0
    device: str = ""  # what calculates, as its driver names it; for reports
