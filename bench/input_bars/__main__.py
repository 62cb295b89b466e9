"""`python -m bench.input_bars [NAME ...]`: what `p2pavg bench input` predicts, beside what a pass takes.

Each split of each made pipeline is predicted, as `p2pavg bench input` does it with one worker, and then made:
its shards are written, and whole passes over them are timed. Prediction and passes take turns, so that both
see the same load of the machine. Then a trainer that takes 0.8 and 1.25 times what all steps online feed runs
beside one worker of a DataLoader, and is to keep up, or not, as the verdict says.
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

from torch.utils.data import DataLoader, IterableDataset

from bench.input_bars.pipelines import Made, available, write
from p2pavg.bench.input import shards, verdict
from p2pavg.bench.input.compression import Compression
from p2pavg.bench.input.compression import available as compressions
from p2pavg.bench.input.measure import Split, measure
from p2pavg.bench.input.source import Source
from p2pavg.bench.input.steps import Pipeline, unpacked
from p2pavg.bench.machine import environment

TURNS = 3  # predictions, and passes, of each split
LEAST_PASS_S = 0.05  # shorter passes are not judged
CLOSE, NEARLY_BEST = 0.10, 0.95
MOST_S = 60.0  # for four steps and three codecs
DISK_MBPS = 200.0  # of the storage in the published order
BATCH = 8
KEEPS_UP = 0.95  # of what a trainer takes


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
        begun = time.perf_counter()
        for _ in self:
            pass
        return time.perf_counter() - begun


def splits_of(made: Made, folder: Path) -> dict[str, Any]:
    """The figures of all splits of one pipeline."""
    pipeline, source = Pipeline(made.steps), Source.of(write(made, folder))
    ways = {way.name: way for way in compressions()}
    predicted: list[list[Split]] = []
    passes: dict[tuple[int, str], list[float]] = {}
    made_of: dict[tuple[int, str], Passes] = {}
    begun = time.perf_counter()
    predicted.append(measure(pipeline, source, list(ways.values()), 1, lambda _: None))
    took = time.perf_counter() - begun
    for split in predicted[0]:
        stored = source
        if split.offline:
            target = folder / f"{made.name}-{split.offline}-{split.codec}"
            shards.write(target, pipeline, source, split, ways[split.codec], lambda _: None)
            stored = Source.of(str(target / "*.tar"))
        key = split.offline, split.codec
        made_of[key] = Passes(pipeline, stored, split, ways[split.codec])
        made_of[key].seconds()  # warm
        passes[key] = [made_of[key].seconds()]
    for _ in range(TURNS - 1):
        predicted.append(measure(pipeline, source, list(ways.values()), 1, lambda _: None))
        for key, one in made_of.items():
            passes[key].append(one.seconds())
    rows = []
    for number, split in enumerate(predicted[0]):
        key = split.offline, split.codec
        said, true = median(each[number].sps for each in predicted), source.count / median(passes[key])
        rows.append({"split": split.offline, "codec": split.codec, "predicted": said, "true": true})
    judged = [row for row in rows if source.count / row["true"] >= LEAST_PASS_S]
    chosen = verdict.best(predicted[-1], source.count, verdict.MachineLimits())
    best = next(r for r in rows if (r["split"], r["codec"]) == (chosen.offline, chosen.codec))
    return {
        "pipeline": made.name,
        "steps": pipeline.names,
        "seconds": took,
        "rows": rows,
        "judged": len(judged),
        "close": sum(abs(row["predicted"] / row["true"] - 1) <= CLOSE for row in judged),
        "best_over_fastest": best["true"] / max(row["true"] for row in rows),
        "trainers": trainers(made_of[0, "none"], median(each[0].sps for each in predicted), predicted[-1]),
        "order": order(predicted[-1], source.count) if made.name == "jpeg" else None,
    }


def trainers(online: Passes, has: float, splits: list[Split]) -> list[dict[str, Any]]:
    """Trainers that take less and more than what is fed: what the verdict says, and what they got."""
    found = []
    for share in (0.8, 1.25):
        need = share * has
        said = verdict.verdict(
            splits, online.pipeline.names, online.source.count, verdict.MachineLimits(), need
        )
        loader = DataLoader(online, batch_size=None, num_workers=1, prefetch_factor=4 * BATCH)
        samples = iter(loader)
        for _ in range(2 * BATCH):
            next(samples)
        begun, taken = time.perf_counter(), 0
        due = begun
        for taken, _ in enumerate(samples, 1):
            due = max(due, time.perf_counter()) + 1 / need
            if taken % BATCH == 0:
                time.sleep(max(0.0, due - time.perf_counter()))
        got = taken / (time.perf_counter() - begun)
        keeps_up = got >= KEEPS_UP * need
        found.append(
            {"need": need, "got": got, "right": keeps_up == ("leave all online" in said), "said": said}
        )
    return found


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
            told = ", ".join(f"{row['predicted'] / row['true']:.2f}" for row in one["rows"])
            print(
                f"{made.name}: {one['close']} of {one['judged']} splits within {CLOSE:.0%} ({told}); best "
                f"of them: {one['best_over_fastest']:.0%} of the fastest; {one['seconds']:.0f} s; trainers "
                f"{[each['right'] for each in one['trainers']]}",
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
