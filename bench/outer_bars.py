"""Bars of outer steps. `python -m bench.outer_bars --json PATH [--only two four bytes ...]`.

Losses are of peers that take their local steps together (`bench outer --even`), paired by seed; each section
is a process of its own, so that a machine with many cores can run several at once.

tune: the grid of learning rates and momenta, with a seed that no other section has.
two, four: so many peers beside data-parallel training on the same samples, each as tuned.
codec: two peers in int4, beside no compression with the same seeds, and without feedback.
averages: two peers that send a 64th, beside the same outer steps uncompressed, by the number of averages; and
where what was not sent is lost.
alone: one peer with outer steps, with and without momentum, and with density 1/64, beside itself without.
fragments: four fragments behind the local steps, beside one piece that is waited for; and with half of what
was moved meanwhile.
bytes: what four peers send in int8 every 30 local steps, in int4 every 125, and with density 1/64 every 30,
beside data-parallel fp16 and beside the formula; their steps sleep.
hidden: over 100 Mb/s and 100 ms, in four fragments behind the local steps: how much of its time a trainer
computes.
slow: two peers with 51.2M parameters over 10 Mb/s and 100 ms.

A section that is not measured now stays in PATH as it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from p2pavg.bench.options import positive_int
from p2pavg.bench.outer.verb import interval
from p2pavg.bench.result import add_section_options, emit_sections

HOMES = str(Path(__file__).with_name("two_homes.toml"))
Figures = dict[str, Any]
NONE = ("--compression", "none")
FLAT = ("--momentum", 0, "--outer-lr", 1)
GRID, MOMENTA = (1e-2, 2e-2, 4e-2), (0.5, 0.7, 0.9)
UNSEEN = 100  # the seed of `tune`
TUNED = {2: (2e-2, 0.7), 4: (2e-2, 0.7)}  # inner learning rate and momentum
TUNED_PLAIN = {2: 4e-2, 4: 4e-2}
ALONE_LR = 2e-2


def outer(*words: object) -> Figures:
    """What `p2pavg bench outer` finds with these options."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, "-m", "p2pavg.bench", "outer", *map(str, words), "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: Figures = json.loads(path.read_text())
    return found


def spread(name: str, values: list[float]) -> Figures:
    """A mean with its interval, under one name."""
    low, high = interval(values) or (None, None)
    return {name: mean(values), f"{name}_low": low, f"{name}_high": high}


def above(ours: Figures, theirs: Figures, of: str) -> list[float]:
    """By how much losses of the same seeds are above the others' `of`, relative to them."""
    return [one / other - 1 for one, other in zip(ours["losses"], theirs[of], strict=True)]


def tune(args: argparse.Namespace) -> Figures:
    """The grid of one number of peers: losses by (inner learning rate, momentum), and by the rate alone."""
    figures: Figures = {}
    common = (*run(args), "--peers", args.peers, "--seed", UNSEEN)
    for lr in GRID:
        found = outer("--only", "data-parallel", "--lr", lr, *common)
        figures[f"tune_data_parallel_{args.peers}_peers_lr_{lr:g}"] = found["loss_data_parallel"]
        for momentum in MOMENTA:
            found = outer("--only", "outer", *NONE, "--lr", lr, "--momentum", momentum, *common)
            figures[f"tune_{args.peers}_peers_lr_{lr:g}_momentum_{momentum:g}"] = found["loss"]
    return figures


def beside_data_parallel(args: argparse.Namespace, peers: int) -> Figures:
    found = outer("--peers", peers, *NONE, *tuned(peers), *plainly_tuned(peers), *training(args))
    figures = spread(f"excess_of_{peers}_peers", above(found, found, "losses_data_parallel"))
    figures[f"loss_of_{peers}_peers"] = found["loss"]
    figures[f"loss_of_{peers}_peers_data_parallel"] = found["loss_data_parallel"]
    figures[f"bits_equal_of_{peers}_peers"] = found["bit_identical"]
    return figures


def two(args: argparse.Namespace) -> Figures:
    return beside_data_parallel(args, 2)


def four(args: argparse.Namespace) -> Figures:
    return beside_data_parallel(args, 4)


def codec(args: argparse.Namespace) -> Figures:
    alone = ("--peers", 2, "--only", "outer", *tuned(2), *training(args))
    plain, coarse, lossy = (
        outer("--compression", *words, *alone)
        for words in (("none",), ("int4",), ("int4", "--without-feedback"))
    )
    return spread("int4_excess", above(coarse, plain, "losses")) | spread(
        "int4_without_feedback_excess", above(lossy, plain, "losses")
    )


def averages(args: argparse.Namespace) -> Figures:
    """Of small batches, which make long runs affordable."""
    figures: Figures = {}
    for count in args.averages:
        alone = ("--peers", 2, "--only", "outer", "--lr", 1e-2, *run(args, batch=8, averages=count))
        alone = (*alone, "--seeds", min(args.seeds, 3))
        plain = outer(*NONE, *FLAT, *alone)
        few, lossy = (outer("--density", "1/64", *words, *alone) for words in ((), ("--without-feedback",)))
        figures |= spread(f"density_excess_after_{count}_averages", above(few, plain, "losses"))
        figures |= spread(
            f"density_without_feedback_excess_after_{count}_averages", above(lossy, plain, "losses")
        )
    return figures


def alone(args: argparse.Namespace) -> Figures:
    one = ("--peers", 1, *training(args))
    plain = outer("--only", "data-parallel", "--lr", ALONE_LR, *one)
    ways: dict[str, tuple[object, ...]] = {f"momentum_{it:g}": ("--momentum", it, *NONE) for it in MOMENTA}
    ways |= {"without_momentum": (*FLAT, *NONE), "density": ("--density", "1/64")}
    figures: Figures = {}
    for name, words in ways.items():
        found = outer("--only", "outer", "--lr", ALONE_LR, *words, *one)
        excess = [a / b - 1 for a, b in zip(found["losses"], plain["losses_data_parallel"], strict=True)]
        figures |= spread(f"alone_{name}_excess", excess)
    return figures


def fragments(args: argparse.Namespace) -> Figures:
    """Of 32 local steps, a fragment's turn each eight, behind six."""
    alone = ("--peers", 2, "--only", "outer", "--compression", "int4", *tuned(2), "--seeds", args.seeds)
    alone = (*alone, *run(args, inner=32))
    pieces = ("--fragments", 4, "--overlap", 6)
    whole, four_, half = (outer(*words, *alone) for words in ((), pieces, (*pieces, "--keep-local", 0.5)))
    return spread("fragments_excess", above(four_, whole, "losses")) | spread(
        "fragments_with_half_kept_excess", above(half, whole, "losses")
    )


def bytes_(args: argparse.Namespace) -> Figures:
    figures: Figures = {}
    ways = {"int8": (30, "--compression", "int8"), "int4": (125, "--compression", "int4")}
    for name, (steps, *how) in (ways | {"density": (30, "--density", "1/64")}).items():
        found = outer(
            *("--peers", 4, "--compute", "sleep", "--step-seconds", 0.005, "--params", args.sent_params),
            *("--inner-steps", steps, "--outer-steps", 3, *how),
        )
        figures[f"{name}_of_data_parallel"] = found["bytes_per_peer"] / found["bytes_of_data_parallel"]
        figures[f"{name}_over_formula"] = found["bytes_per_peer"] / found["bytes_expected"]
    return figures


def hidden(args: argparse.Namespace) -> Figures:
    slow = outer(
        *("--peers", 2, "--compute", "sleep", "--step-seconds", 0.05, "--params", 2_000_000, "--lab", HOMES),
        *(
            "--inner-steps",
            100,
            "--outer-steps",
            4,
            "--compression",
            "int4",
            "--fragments",
            4,
            "--overlap",
            20,
        ),
    )
    return {"hidden_utilisation": slow["utilisation"], "hidden_bits_equal": slow["bit_identical"]}


def slow(args: argparse.Namespace) -> Figures:
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        homes = Path(folder, "slow.toml")
        homes.write_text(Path(HOMES).read_text().replace("rate_mbps = 100", "rate_mbps = 10"))
        for compression in ("int4", "fp16"):
            found = outer(
                *("--peers", 2, "--compute", "sleep", "--step-seconds", 0.1, "--params", 51_200_000),
                *("--inner-steps", 20, "--outer-steps", 1, "--compression", compression, "--lab", homes),
            )
            names = ("seconds", "smallest_group", "attempts", "bit_identical", "parameters", "bytes_per_peer")
            figures |= {f"slow_{compression}_{name}": found[name] for name in names}
    return figures


def tuned(peers: int) -> tuple[object, ...]:
    lr, momentum = TUNED[peers]
    return ("--lr", lr, "--momentum", momentum)


def plainly_tuned(peers: int) -> tuple[object, ...]:
    return ("--data-parallel-lr", TUNED_PLAIN[peers])


def run(
    args: argparse.Namespace, *, inner: int = 30, batch: int | None = None, averages: int | None = None
) -> tuple[object, ...]:
    return (
        *("--even", "--params", args.params, "--inner-steps", inner),
        *("--outer-steps", averages or args.outer_steps, "--batch", batch or args.batch),
    )


def training(args: argparse.Namespace) -> tuple[object, ...]:
    return (*run(args), "--seeds", args.seeds)


SECTIONS = {
    "tune": tune,
    "two": two,
    "four": four,
    "codec": codec,
    "averages": averages,
    "alone": alone,
    "fragments": fragments,
    "bytes": bytes_,
    "hidden": hidden,
    "slow": slow,
}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add_section_options(parser, SECTIONS)
    parser.add_argument("--seeds", type=positive_int, default=8, help="of every comparison of losses")
    parser.add_argument("--params", type=positive_int, default=30_000, help="of the model")
    parser.add_argument("--sent-params", type=positive_int, default=4_000_000, help="where bytes are counted")
    parser.add_argument("--batch", type=positive_int, default=16)
    parser.add_argument("--outer-steps", type=positive_int, default=60)
    parser.add_argument("--peers", type=positive_int, default=2, help="of tune")
    parser.add_argument("--averages", type=positive_int, nargs="+", default=[300])
    args = parser.parse_args()
    return emit_sections(args, SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
