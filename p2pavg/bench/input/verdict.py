"""The meaning of an input pipeline's figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.bench.input.measure import Split
from p2pavg.printable import counted

WIDE = 2.0  # rates of one split that differ by more than this factor tell of a busy machine
NEARLY = 0.1  # within this share of the needed samples/s, the verdict is "borderline"
MUCH = 1.05  # a split with more offline work is better only when faster by this factor


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The storage and the memory of the machine that feeds the trainers."""

    disk_mbps: float | None = None  # MB/s that its storage reads; None: no limit
    memory_gb: float | None = None  # a dataset of this size is read from storage once; None: none is


def rate(split: Split, count: int, limits: MachineLimits) -> float:
    """Samples/s that reach training: the roofline min(workers / time, storage / size)."""
    size = split.kb_per_sample * 1e3
    in_memory = limits.memory_gb is not None and size * count <= limits.memory_gb * 1e9
    if limits.disk_mbps is None or in_memory or not size:
        return split.sps_workers
    return min(split.sps_workers, limits.disk_mbps * 1e6 / size)


def binds(split: Split, names: Sequence[str], count: int, limits: MachineLimits) -> str:
    """The limit of the rate: storage, reading, a step by its number and name, or the way to the trainer."""
    if rate(split, count, limits) < split.sps_workers:
        return "storage"
    times = [split.read_seconds, *split.step_seconds]
    slowest = times.index(max(times))
    if split.handing_seconds > times[slowest]:
        return "handing batches to the trainer"
    if slowest == 0:
        return "reading"
    number = split.offline + slowest - 1
    return f"step {number + 1} ({names[number]})"


def best(splits: Sequence[Split], count: int, limits: MachineLimits) -> Split:
    """The fastest split; of nearly equal ones, the split with the least work and fewest bytes beforehand."""
    fastest = max(rate(split, count, limits) for split in splits)
    near = [split for split in splits if rate(split, count, limits) * MUCH >= fastest]
    return min(near, key=lambda split: (split.offline, split.offline_bytes))


def verdict(
    splits: Sequence[Split], names: Sequence[str], count: int, limits: MachineLimits, need: float | None
) -> str:
    """One sentence for people. need: samples/s that one trainer takes; None: not known."""
    now, top = splits[0], best(splits, count, limits)
    has, may = rate(now, count, limits), rate(top, count, limits)
    said = f"{binds(now, names, count, limits)} binds at {has:,.0f} samples/s"
    if top is not now:
        done = ", ".join(names[: top.offline])
        said += (
            f"; {done} offline with {top.codec} ({in_bytes(top.offline_bytes)}, "
            f"{_minutes(top.offline_seconds)} once) gives {may:,.0f}/s"
        )
    if need is None:
        return said
    said += f"; you need {need:,.0f}/s for a trainer: "
    if (enough := keeps_up(has, need)) is True:
        return said + f"leave all online{_peers(has, need)}"
    if enough is None:
        return said + "all online is borderline"
    if top is now or may < need * (1 - NEARLY):
        return said + "no split keeps up; use more workers, or fewer and cheaper steps"
    if may < need * (1 + NEARLY):
        return said + "that is borderline"
    return said + f"do that{_peers(may, need)}"


def doubt(splits: Sequence[Split]) -> str:
    """What to add to a verdict on these splits that other load on the machine may have made; else nothing."""
    if all(split.workers_high <= WIDE * split.workers_low for split in splits):
        return ""
    return (
        "; but the rates of one split differ by more than a factor of two between loops, as where something "
        "else is running: measure again on a quiet machine before you act"
    )


def keeps_up(has: float, need: float) -> bool | None:
    """Whether a trainer gets the samples/s that it takes; None: that is borderline."""
    if has >= need * (1 + NEARLY):
        return True
    return None if has >= need * (1 - NEARLY) else False


def as_it_is(low: float, has: float, high: float, need: float | None) -> str:
    """One sentence for people on a dataset or loader whose parts are not looked into."""
    said = f"as it is, it feeds {has:,.0f} samples/s ({low:,.0f} to {high:,.0f})"
    if need is None:
        return said
    words = {
        True: f"it keeps up{_peers(has, need)}",
        None: "that is borderline",
        False: "it does not keep up",
    }
    return f"{said}; you need {need:,.0f}/s for a trainer: {words[keeps_up(has, need)]}"


def _peers(has: float, need: float) -> str:
    most = int(has / need)
    return f", and it keeps up with {counted(most, 'such trainer')}, not with {most + 1}"


def in_bytes(size: float) -> str:
    """A size for people."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.0f} min" if seconds >= 90 else f"{seconds:,.1f} s"
