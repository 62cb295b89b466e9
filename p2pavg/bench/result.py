"""A benchmark's result: lines for people, JSON, a picture."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from p2pavg.bench.machine import environment
from p2pavg.report.plot import plot_path, save_plot


def output_path(text: str) -> str:
    """An argparse type: a file that can be written, or '-'. Checked before the benchmark runs, not after."""
    if text != "-" and not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist; make it first")
    return text


def add_output_options(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    """Add `--json PATH` and, for benchmarks, `--plot PATH`."""
    parser.add_argument(
        "--json", metavar="PATH", type=output_path, help="write the result as JSON; '-' is stdout, alone"
    )
    if plot:
        parser.add_argument(
            "--plot", metavar="PATH", type=plot_path, help="draw the result (png, svg or pdf)"
        )


def emit(
    args: argparse.Namespace,
    result: Mapping[str, Any],
    lines: Iterable[str],
    draw: Callable[[Any], None] | None = None,
) -> None:
    """Print `lines` for people, write `result` where --json says and the picture where --plot says.

    result: JSON data; `environment()` is added under "environment". draw: draws on a matplotlib Figure.
    """
    if args.json == "-":
        print(json.dumps({**result, "environment": environment()}, allow_nan=False))
    else:
        for line in lines:
            print(line, flush=True)
        keep(args, result)
    if draw is not None and getattr(args, "plot", None) is not None:
        save_plot(args.plot, draw)


def keep(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write `result` where --json says, if that is a file: a benchmark that goes on may yet fail."""
    if args.json not in (None, "-"):
        document = {**result, "environment": environment()}
        Path(args.json).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of `values` lie, interpolated linearly. Not for empty `values`."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


Sections = Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]]
FAILED = "failed"  # in the result of a benchmark of sections: why a section has no figures, by its name


def add_section_options(parser: argparse.ArgumentParser, sections: Sections) -> None:
    """Add `--only SECTION...` and `--json PATH`, for `emit_sections`."""
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), metavar="SECTION")
    add_output_options(parser, plot=False)


def emit_sections(args: argparse.Namespace, sections: Sections) -> int:
    """Measure the sections that `args.only` names, and emit the figures of each as soon as it is measured. In
    the file of `args.json` stays, as it was, what is not measured now: other sections, and all from an
    interrupt on.

    A section that fails is named under FAILED with the reason, and the next one follows. Returns 1 then, for
    the exit code, else 0.
    """
    path = Path(args.json) if args.json and args.json != "-" else None
    figures: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    figures.pop("environment", None)
    failed: dict[str, str] = figures.pop(FAILED, {})
    for name in args.only:
        failed.pop(name, None)
        found: dict[str, Any] = {}
        try:
            found = sections[name](args)
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        figures |= found
        if args.json != "-":
            lines = [f"{key}: {value}" for key, value in found.items()]
            if name in failed:
                lines.append(f"{name}: failed: {failed[name]}")
            emit(args, figures | ({FAILED: failed} if failed else {}), lines)
    if args.json == "-":
        emit(args, figures | ({FAILED: failed} if failed else {}), ())
    return int(not failed.keys().isdisjoint(args.only))
