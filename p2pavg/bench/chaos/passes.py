"""Whether each index of the data was averaged once in each pass, recomputed from what the averages held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from p2pavg.bench.chaos.check import surviving_lineage
from p2pavg.data.permutation import EvenBlocks
from p2pavg.data.runs import difference, intersection, size, union

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Data:
    """What the peers of a run share out."""

    length: int  # samples of the data
    passes: int  # until so many are whole
    block: int
    seed: int
    batch: int  # samples of a step


def count_passes(events: Sequence[Event], data: Data) -> dict[str, Any]:
    """What of the surviving lineage's averages is not as promised; all are 0 but `indices_returned` and the
    wait.

    indices_missing: (pass, index) pairs of the first passes that no average holds. indices_doubled: that more
    than one holds. averages_misnamed: averages with other indices than their reports name. averages_unseen:
    nobody lived to tell of them. indices_untold: in none of the averages that somebody told of, and consumed.
    longest_draw_s: for which a training loop waited for its next batch.
    """
    chain = surviving_lineage(
        [e for e in events if e["t"] == "epoch"], [e for e in events if e["t"] == "finished"]
    )
    blocks = EvenBlocks(data.length, data.block, data.seed)
    told: dict[int, Event] = {}
    misnamed = 0
    for e in events:
        if e["t"] != "epoch" or chain.get(e["epoch"]) != e["lineage"]:
            continue
        told.setdefault(e["epoch"], e)
        misnamed += Counter(e["indices"]) != _indices(e, blocks, data.length)
    held: Counter[int] = Counter()
    for e in told.values():
        held.update(position for run in _runs(e, data.length) for position in range(*run))
    averaged = union((position, position + 1) for position in held)
    every = ((0, data.length * data.passes),)
    consumed = union(
        *([tuple(run) for run in e["consumed"]] for e in events if e["t"] == "finished"), averaged
    )
    return {
        "indices_missing": size(difference(every, consumed)),
        "indices_doubled": sum(count > 1 for count in held.values()),
        "indices_untold": size(intersection(every, difference(consumed, averaged))),
        "averages_misnamed": misnamed,
        "averages_unseen": len(set(range(max(told, default=-1) + 1)) - set(told)),
        "indices_returned": sum(e["discarded"] for e in events if e["t"] == "epoch"),
        "longest_draw_s": max((e["longest_draw_s"] for e in events if e["t"] == "finished"), default=0.0),
        "data": asdict(data),
    }


def is_exact(found: Mapping[str, Any]) -> bool:
    """Whether each index is in exactly as many averages as there were passes, as far as anybody could
    tell.
    """
    untold = found["indices_untold"] and not found["averages_unseen"]
    return not (found["indices_missing"] or found["indices_doubled"] or found["averages_misnamed"] or untold)


def _runs(e: Event, length: int) -> list[tuple[int, int]]:
    return [(number * length + first, number * length + end) for number, first, end in e["consumed"]]


def _indices(e: Event, blocks: EvenBlocks, length: int) -> Counter[int]:
    return Counter(blocks.index(position) for run in _runs(e, length) for position in range(*run))
