"""Bars of outer steps. `python -m bench.outer_bars --json PATH [--only loss bytes ...]`.

loss: two and four peers beside data-parallel training, paired seeds, 30 local steps between averages.
codec: the same of two peers in int4, beside no compression with the same seeds, and without feedback.
sparse: two peers that send a 64th, beside the same outer steps uncompressed, and without feedback.
alone: one peer with outer steps, and with density 1/64, beside itself without.
bytes: what four peers send in int8 every 30 local steps, in int4 every 125, and with density 1/64 every 30,
beside data-parallel fp16 and beside the formula; their steps sleep.
hidden: over 100 Mb/s and 100 ms, in four fragments behind the local steps: how much of its time a trainer
computes, and the loss beside that of one piece that is waited for.

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
from p2pavg.bench.result import add_output_options, emit

HOMES = str(Path(__file__).with_name("two_homes.toml"))
Figures = dict[str, Any]


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


def loss(args: argparse.Namespace) -> Figures:
    figures: Figures = {}
    for peers in (2, 4):
        found = outer("--peers", peers, "--compression", "none", *training(args))
        name = f"excess_of_{peers}_peers"
        figures |= spread(name, above(found, found, "losses_data_parallel"))
        figures[f"loss_of_{peers}_peers"] = found["loss"]
        figures[f"bits_equal_of_{peers}_peers"] = found["bit_identical"]
    return figures


def codec(args: argparse.Namespace) -> Figures:
    alone = ("--peers", 2, "--only", "outer", *training(args))
    plain, coarse, lossy = (
        outer("--compression", *words, *alone)
        for words in (("none",), ("int4",), ("int4", "--without-feedback"))
    )
    return spread("int4_excess", above(coarse, plain, "losses")) | spread(
        "int4_without_feedback_excess", above(lossy, plain, "losses")
    )


def sparse(args: argparse.Namespace) -> Figures:
    alone = ("--peers", 2, "--only", "outer", *training(args))
    momentum = outer("--compression", "none", *alone)
    plain = outer("--compression", "none", "--momentum", 0, "--outer-lr", 1, *alone)
    few, lossy = (outer("--density", "1/64", *words, *alone) for words in ((), ("--without-feedback",)))
    return (
        spread("density_excess", above(few, plain, "losses"))
        | spread("density_excess_over_momentum", above(few, momentum, "losses"))
        | spread("density_without_feedback_excess", above(lossy, plain, "losses"))
    )


def alone(args: argparse.Namespace) -> Figures:
    dense = outer("--peers", 1, "--compression", "none", *training(args))
    few = outer("--peers", 1, "--density", "1/64", "--only", "outer", *training(args))
    return spread("alone_excess", above(dense, dense, "losses_data_parallel")) | spread(
        "alone_density_excess",
        [a / b - 1 for a, b in zip(few["losses"], dense["losses_data_parallel"], strict=True)],
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
    pieces = ("--fragments", 4, "--overlap", 20)
    slow = outer(
        *("--peers", 2, "--compute", "sleep", "--step-seconds", 0.05, "--params", 2_000_000, "--lab", HOMES),
        *("--inner-steps", 100, "--outer-steps", 4, "--compression", "int4", *pieces),
    )
    one, four = (
        outer("--peers", 2, "--compression", "int4", "--only", "outer", *more, *training(args))
        for more in ((), pieces)
    )
    blocked = {"hidden_utilisation": slow["utilisation"], "hidden_bits_equal": slow["bit_identical"]}
    return blocked | spread("fragments_excess", above(four, one, "losses"))


def training(args: argparse.Namespace) -> tuple[object, ...]:
    return (
        *("--params", args.params, "--inner-steps", 30, "--outer-steps", args.outer_steps),
        *("--seeds", args.seeds, "--lr", args.lr, "--batch", 8),
    )


SECTIONS = {"loss": loss, "codec": codec, "sparse": sparse, "alone": alone, "bytes": bytes_, "hidden": hidden}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--seeds", type=positive_int, default=5, help="of every comparison of losses")
    parser.add_argument("--params", type=positive_int, default=30_000, help="of the model")
    parser.add_argument("--sent-params", type=positive_int, default=4_000_000, help="where bytes are counted")
    parser.add_argument("--outer-steps", type=positive_int, default=30)
    parser.add_argument("--lr", type=float, default=3e-3, help="of the inner optimizer, both ways")
    add_output_options(parser, plot=False)
    args = parser.parse_args()
    path = Path(args.json) if args.json and args.json != "-" else None
    figures: Figures = json.loads(path.read_text()) if path is not None and path.exists() else {}
    figures.pop("environment", None)
    for name in args.only:
        figures |= SECTIONS[name](args)
    emit(args, figures, [f"{name}: {value}" for name, value in figures.items()])


if __name__ == "__main__":
    main()
