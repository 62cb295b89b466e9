"""`python -m bench.input_bars [NAME ...]`: what `p2pavg bench input` predicts, beside what a pass takes.

Each split of each made pipeline is predicted, as `p2pavg bench input` does it, and then made: its shards are
written, and whole passes over them are timed. A prediction and the passes of its split follow each other at
once, a few times, so that both see the same load of the machine; the time of a pass in which others had the
cores is left out. Then a trainer that takes 0.8 and 1.25 times
what one worker is predicted to feed runs beside a DataLoader, and is to keep up, or not, as the verdict says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils.data import IterableDataset

from bench.input_bars.pipelines import Made, available, write
from p2pavg.bench.input import shards, verdict
from p2pavg.bench.input.compression import Compression
from p2pavg.bench.input.compression import available as compressions
from p2pavg.bench.input.feeding import BATCH, PREFETCH, Endless, feeding, loader_of
from p2pavg.bench.input.loops import LEAST_S, PATIENCE
from p2pavg.bench.input.measure import Split, splits
from p2pavg.bench.input.source import Source
from p2pavg.bench.input.steps import Pipeline, unpacked
from p2pavg.bench.machine import environment
from p2pavg.bench.undisturbed import undisturbed

TURNS = 3  # predictions, and passes, of each split
LEAST_PASS_S = 0.05  # shorter passes are not judged
CLOSE, NEARLY_BEST = 0.10, 0.95
MOST_S = 60.0  # for four steps and three codecs
DISK_MBPS = 200.0  # of the storage in the published order
SHARES = (0.8, 1.25)  # of what is fed: what trainers take
KEEPS_UP = 0.95  # of what a trainer takes
LEAST_PASSES = 2
LEAST_BATCHES, TRAINER_S = 8, 0.6  # of a trainer's run

Key = tuple[int, str]  # steps beforehand, codec


class Passes(IterableDataset[Any]):
    """A split of a pipeline, read from its shards and computed."""

    def __init__(self, pipeline: Pipeline, source: Source, split: Split, way: Compression) -> None:
        self.pipeline, self.source, self.split, self.way = pipeline, source, split, way

    def __iter__(self) -> Iterator[Any]:
        first, end = self.split.offline, len(self.pipeline.steps)
        for sample in self.source:
            value = unpacked(self.way.decompress(sample.data)) if first else sample.data
            yield self.pipeline.run(value, first, end, sample.name)

    def seconds(self) -> float:
        begun = undisturbed()
        for _ in self:
            pass
        return undisturbed() - begun

    def usual_seconds(self) -> float:
        """Of the median pass of some."""
        found: list[float] = []
        until = time.monotonic() + PATIENCE * LEAST_S
        while len(found) < LEAST_PASSES or (sum(found) < LEAST_S and time.monotonic() < until):
            found.append(self.seconds())
        return median(found)


def splits_of(made: Made, folder: Path) -> dict[str, Any]:
    """The figures of all splits of one pipeline."""
    pipeline, source = Pipeline(made.steps), Source.of(write(made, folder))
    ways = {way.name: way for way in compressions()}
    predicted: dict[Key, list[Split]] = {}
    true: dict[Key, list[float]] = {}  # samples/s
    fed: dict[Key, list[float]] = {}  # samples/s of one worker of a DataLoader
    passes: dict[Key, Passes] = {}
    trained: list[dict[str, Any]] = []
    took: list[float] = []
    for _ in range(TURNS):
        turn = splits(pipeline, source, list(ways.values()), 1)
        begun, beside = time.perf_counter(), 0.0
        for split in turn:
            paused = time.perf_counter()
            key = split.offline, split.codec
            if key not in passes:
                stored = _written(made, folder, pipeline, source, split, ways[split.codec])
                passes[key] = Passes(pipeline, stored, split, ways[split.codec])
                passes[key].seconds()  # warm
            predicted.setdefault(key, []).append(split)
            true.setdefault(key, []).append(source.count / passes[key].usual_seconds())
            fed.setdefault(key, []).append(median(feeding(lambda _, one=passes[key]: iter(one), 1)))
            if not split.offline:
                trained += trainers(passes[key], split)
            beside += time.perf_counter() - paused
        took.append(time.perf_counter() - begun - beside)
    rows = [
        {
            "split": key[0],
            "codec": key[1],
            "predicted": median(each.sps for each in predicted[key]),
            "true": median(true[key]),
            "ratio": median(each.sps / sps for each, sps in zip(predicted[key], true[key], strict=True)),
            "fed": median(fed[key]),
            "fed_ratio": median(
                each.sps_workers / sps for each, sps in zip(predicted[key], fed[key], strict=True)
            ),
        }
        for key in predicted
    ]
    judged = [row for row in rows if source.count / row["true"] >= LEAST_PASS_S]
    usual = [sorted(each, key=lambda split: split.sps_workers)[len(each) // 2] for each in predicted.values()]
    chosen = verdict.best(usual, source.count, verdict.MachineLimits())
    feed = {key: median(rates) for key, rates in fed.items()}
    return {
        "pipeline": made.name,
        "steps": pipeline.names,
        "seconds": median(took),
        "rows": rows,
        "judged": len(judged),
        "close": sum(abs(row["ratio"] - 1) <= CLOSE for row in judged),
        "best_over_fastest": feed[chosen.offline, chosen.codec] / max(feed.values()),
        "trainers": [_judged(share, [one for one in trained if one["share"] == share]) for share in SHARES],
        "order": order(usual, source.count) if made.name == "jpeg" else None,
    }


def _written(
    made: Made, folder: Path, pipeline: Pipeline, source: Source, split: Split, way: Compression
) -> Source:
    """The dataset of a split."""
    if not split.offline:
        return source
    target = folder / f"{made.name}-{split.offline}-{split.codec}"
    shards.write(target, pipeline, source, split, way, lambda _: None)
    return Source.of(str(target / "*.tar"))


def trainers(online: Passes, split: Split) -> list[dict[str, Any]]:
    """Trainers that take less and more than what is fed: what the verdict says, and what they got."""
    found = []
    names, count, limits = online.pipeline.names, online.source.count, verdict.MachineLimits()
    for share in SHARES:
        need = share * split.sps_workers
        said = verdict.verdict([split], names, count, limits, need)
        batches = iter(loader_of(Endless(lambda _: iter(online)), 1))
        for _ in range(PREFETCH + 1):
            next(batches)
        taken, begun = 0, time.perf_counter()
        due = begun
        while taken < LEAST_BATCHES * BATCH or time.perf_counter() - begun < TRAINER_S:
            next(batches)  # while the device computes the one before
            taken += BATCH
            now = time.perf_counter()
            begins = max(due, now)
            due = begins + BATCH / need
            time.sleep(begins - now)
        got = taken / (time.perf_counter() - begun)
        found.append({"share": share, "need": need, "got": got, "says": "leave all online" in said})
    return found


def _judged(share: float, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """By the medians of all turns: one of a few may meet another load than its prediction did."""
    got = median(one["got"] / one["need"] for one in turns)
    says = sum(one["says"] for one in turns) * 2 > len(turns)
    return {
        "share": share,
        "got_of_need": got,
        "says": says,
        "right": (got >= KEEPS_UP) == says,
        "turns": turns,
    }


def order(splits: list[Split], count: int) -> dict[str, float]:
    """Samples/s of a pipeline of pictures on a disk that reads DISK_MBPS, without compression."""
    limits = verdict.MachineLimits(DISK_MBPS)
    return {
        name: verdict.rate(
            next(s for s in splits if (s.offline, s.codec) == (offline, "none")), count, limits
        )
        for offline, name in ((0, "fully online"), (1, "decoded"), (2, "resized"), (3, "fully offline"))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pipelines (default: all that can be made)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for made in available():
            if given.names and made.name not in given.names:
                continue
            found.append(one := splits_of(made, Path(folder)))
            told = ", ".join(f"{row['ratio']:.2f} {row['fed_ratio']:.2f}" for row in one["rows"])
            print(
                f"{made.name}: {one['close']} of {one['judged']} splits within {CLOSE:.0%} ({told}); best "
                f"of them: {one['best_over_fastest']:.0%} of the fastest; {one['seconds']:.0f} s; trainers "
                f"{[(round(each['got_of_need'], 2), each['right']) for each in one['trainers']]}",
                flush=True,
            )
            if one["order"]:
                print(f"   {', '.join(f'{name} {sps:,.0f}/s' for name, sps in one['order'].items())}")
    judged, close = sum(one["judged"] for one in found), sum(one["close"] for one in found)
    bars = {
        "predicted within 10% for 90% of splits": close >= 0.9 * judged,
        "the best split is within 5% of the fastest": all(
            one["best_over_fastest"] >= NEARLY_BEST for one in found
        ),
        "verdicts are true": all(each["right"] for one in found for each in one["trainers"]),
        "at most 60 s": all(one["seconds"] <= MOST_S for one in found),
    }
    for one in found:
        if one["order"]:
            pictures = one["order"]
            bars["resized beats fully online and fully offline"] = pictures["resized"] == max(
                pictures.values()
            )
    for bar, met in bars.items():
        print(f"{'met' if met else 'NOT MET':8} {bar}")
    if given.json is not None:
        told = {"pipelines": found, "bars": bars, "environment": environment()}
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(not all(bars.values()))


if __name__ == "__main__":
    raise SystemExit(main())
