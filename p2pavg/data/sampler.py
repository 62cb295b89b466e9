"""Samplers for torch's DataLoader whose samples the swarm shares out: `SwarmSampler`, `SwarmShards`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch.utils.data import Sampler, get_worker_info

from p2pavg import kinds
from p2pavg.data.draws import Draws
from p2pavg.data.permutation import EvenBlocks, Shards
from p2pavg.data.runs import Run
from p2pavg.errors import ConfigurationError

MAX_LENGTH = 1 << 48
DEFAULT_BLOCK = 256
AT_A_TIME = 16  # positions that an iterator takes from what the peer holds


def _check_int(what: str, value: object, least: int, most: int) -> None:
    kinds.check_whole(f"{what} of a sampler", value, least, most)


class _Drawing:
    """What both samplers are for an optimizer: a part of the run's state, and a place in one run at a
    time.
    """

    draws: Draws
    _endless = False
    _iterator: object = None  # whoever draws now
    user: Any = None  # a weak reference to the optimizer that it draws for

    def terms(self) -> str:
        """What all peers of a run must have in common, in one word."""
        raise NotImplementedError

    def _runs(self) -> Iterator[Run]:
        """Positions to draw, to the end of the pass. Raises ConfigurationError where none can be counted."""
        if get_worker_info() is not None:
            raise ConfigurationError(
                "a DataLoader worker iterates the sampler, whose copies would all draw the same: pass it to "
                "the DataLoader as sampler=, or iterate it in the training process (num_workers=0)"
            )
        self.draws.begin()
        self._iterator = me = object()
        current: int | None = None
        while (run := self.draws.next_run(current, self._fitting)) is not None:
            current = None if self._endless else run[0] // self.draws.length
            yield run
            if self._iterator is not me:
                raise ConfigurationError(
                    "two loaders iterate one sampler in turns: end the first iteration before the next "
                    "begins, so that each step() counts what was drawn for it"
                )

    def _fitting(self, first: int) -> int:
        """How many positions from there on may be given out together."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Which samples are consumed and leased: the same on all peers of the run."""
        return self.draws.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned.

        Args:
            state_dict: of this peer or another one of the run.

        Raises:
            StateError: when it is malformed.
        """
        self.draws.load_state_dict(state_dict)


class SwarmSampler(_Drawing, Sampler[int]):
    """Indices of a dataset for a DataLoader, each in exactly one committed average per pass over the data.

    A pass is one permutation by (seed, pass), the same on all peers: blocks are permuted, and the indices in
    each. Peers lease positions of it through the rounds that they make anyway. A position is consumed when
    the average with its sample is committed, and returns to the pool otherwise: when a peer dies, discards,
    or leaves without a receiver. Iterating ends with the pass; iterate again for the next one. It has no
    length, since nobody knows beforehand which share of a pass will be this peer's.

    Args:
        length: samples of the dataset, the same on all peers.
        seed: of the permutations, the same on all peers.
        block: neighbouring indices that are drawn together, so that storage is read in runs. Where a dataset
            is sorted (by class, by length), a block is one kind of sample: use 1, or shuffle it once.
        endless: iterating goes on with the next pass, so that all batches have one size, as Trainer,
            Lightning and `drop_last=True` want them. Without it, a loader that drops a short last batch would
            draw the same samples for ever: iterating raises.

    Raises:
        ConfigurationError: arguments that cannot work; iterating before an optimizer has it as `sampler=`, in
            a worker of a DataLoader, or by two loaders in turns.
    """

    def __init__(
        self, length: int, seed: int = 0, block: int = DEFAULT_BLOCK, *, endless: bool = False
    ) -> None:
        _check_int("length", length, 1, MAX_LENGTH)
        _check_int("seed", seed, 0, (1 << 63) - 1)
        _check_int("block", block, 1, MAX_LENGTH)
        kinds.check("endless", endless, bool)
        self._blocks = EvenBlocks(length, min(block, length), seed)
        self._endless = endless
        self.draws = Draws(length, min(block, length))

    def terms(self) -> str:
        blocks = self._blocks
        return f"SwarmSampler({blocks.length}, seed={blocks.seed}, block={blocks.block})"

    def __iter__(self) -> Iterator[int]:
        for run in self._runs():
            yield from map(self._blocks.index, range(*run))

    def _fitting(self, first: int) -> int:
        """How many positions from there on are of the same pass, and few enough."""
        return min(AT_A_TIME, self.draws.length - first % self.draws.length)


class SwarmShards(_Drawing):
    """Shards of a dataset, each sample of them in exactly one committed average per pass; see `SwarmSampler`.

    Iterating yields (url, first, end): read the samples first .. end - 1 of that shard, in their order.
    Shards are permuted by (seed, pass), what is in a shard is not. A piece has at most `piece` samples, and a
    peer draws one shard to its end where it can.

    Args:
        urls: names of the shards, in the same order on all peers.
        lengths: how many samples each has.
        seed: of the permutations, the same on all peers.
        piece: most samples of one piece.

    Raises:
        ConfigurationError: arguments that cannot work; iterating before an optimizer has it as `sampler=`.
    """

    DEFAULT_PIECE: ClassVar[int] = 1 << 10

    def __init__(
        self, urls: Sequence[str], lengths: Sequence[int], seed: int = 0, piece: int = DEFAULT_PIECE
    ) -> None:
        kinds.check("urls", urls, Sequence[str])
        kinds.check("lengths", lengths, Sequence[Any])
        urls, lengths = list(urls), list(lengths)
        if not urls or len(urls) != len(lengths):
            raise ConfigurationError(
                f"SwarmShards needs a length for each url: {len(urls)} urls, {len(lengths)} lengths"
            )
        for url, length in zip(urls, lengths, strict=True):
            _check_int(f"the length of {url!r}", length, 1, MAX_LENGTH)
        _check_int("seed", seed, 0, (1 << 63) - 1)
        _check_int("piece", piece, 1, MAX_LENGTH)
        self._urls = urls
        self._shards = Shards(lengths, seed)
        self._piece = piece
        self.draws = Draws(self._shards.length, max(lengths))

    def terms(self) -> str:
        names = hashlib.sha256(repr((self._urls, self._shards.lengths)).encode()).hexdigest()[:16]
        return f"SwarmShards({len(self._urls)} shards {names}, seed={self._shards.seed})"

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        for begins, ends in self._runs():
            shard, first, end = self._shards.piece(begins, ends - begins)
            yield self._urls[shard], first, end

    def _fitting(self, first: int) -> int:
        """How many positions from there on are of one piece."""
        _, begin, end = self._shards.piece(first, self._piece)
        return end - begin
