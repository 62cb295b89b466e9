"""What all benchmarks share: output options, results as JSON, plots, progress, the machine they ran on."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from p2pavg import __version__, codecs
from p2pavg.errors import ConfigurationError
from p2pavg.report.plot import save_plot

PROGRESS_AFTER_S = 2.0

_SYSCTLS = (
    "net.core.default_qdisc",
    "net.core.rmem_max",
    "net.core.wmem_max",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_mem",
    "net.ipv4.tcp_no_metrics_save",
    "net.ipv4.tcp_notsent_lowat",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_slow_start_after_idle",
    "net.ipv4.tcp_window_scaling",
    "net.ipv4.tcp_wmem",
)


def output_path(text: str) -> str:
    """An argparse type: a file that can be written, or '-'. Checked before the benchmark runs, not after."""
    if text != "-" and not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist; make it first")
    return text


def positive_int(text: str) -> int:
    """An argparse type: an int of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def at_least(least: float) -> Callable[[str], float]:
    """An argparse type: a finite number, and not less."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least:g}")
        return value

    return number


def add_output_options(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    """Add `--json PATH` and, for benchmarks, `--plot PATH`."""
    parser.add_argument(
        "--json", metavar="PATH", type=output_path, help="write the result as JSON; '-' is stdout, alone"
    )
    if plot:
        parser.add_argument(
            "--plot", metavar="PATH", type=output_path, help="draw the result (png, svg or pdf)"
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
    document = {**result, "environment": environment()}
    if args.json == "-":
        print(json.dumps(document, allow_nan=False))
    else:
        for line in lines:
            print(line)
        if args.json is not None:
            Path(args.json).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if draw is not None and getattr(args, "plot", None) is not None:
        save_plot(args.plot, draw)


def tcp_sysctls() -> dict[str, str]:
    """The kernel's TCP settings in force, those that exist here, by their sysctl name."""
    found = {}
    for name in _SYSCTLS:
        try:
            found[name] = " ".join(Path("/proc/sys", *name.split(".")).read_text().split())
        except OSError:
            continue
    return found


def environment() -> dict[str, Any]:
    """The machine, the software and the TCP settings that a result was measured with."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "p2pavg": __version__,
        "sysctls": tcp_sysctls(),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), ""
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of `values` lie, interpolated linearly. Not for empty `values`."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@contextmanager
def progress(text: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Yield `advance(amount)`. A progress line shows on a terminal's stderr once two seconds have passed."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%" if total is not None else ""),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(text, total=total)
    timer = threading.Timer(PROGRESS_AFTER_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda amount: bar.advance(task, amount)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def torch_device(name: str) -> Any:
    """The torch.device of this name. Raises ConfigurationError when there is none here."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise ConfigurationError(f"Cannot use the device {name!r}: {why}") from None
    return device


def compression(text: str) -> str:
    """An argparse type: a codec by name, or MODULE:NAME of a class that the workers import."""
    if ":" not in text and text not in codecs.WIRE_IDS:
        known = ", ".join(codecs.WIRE_IDS)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known}, and no MODULE:NAME of a Codec")
    return text


def codec_of(text: str) -> str | codecs.Codec:
    """What `compression` took. Raises ConfigurationError when the class is not there, or is no Codec."""
    module, colon, name = text.partition(":")
    if not colon:
        return text
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"Cannot make the codec {text!r}: {error}") from None
    return codecs.get(made)
