"""`p2pavg monitor RUN` and `p2pavg report PATH`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from p2pavg.cli.stopping import until_stopped
from p2pavg.credentials import Credentials, from_environment
from p2pavg.errors import ConfigurationError
from p2pavg.membership.table.address import Address, initial_addresses
from p2pavg.monitor.lines import JsonLines, Lines
from p2pavg.monitor.picture import Picture
from p2pavg.monitor.shown import Shown
from p2pavg.report.plot import plot_path, save_plot
from p2pavg.report.prices import EXAMPLE, PriceTable
from p2pavg.report.reading import end_last_line

if TYPE_CHECKING:
    from p2pavg.monitor.web import Page

Frame = Mapping[str, Any]  # as Shown.to_dict makes it
Sink = Callable[[Shown, Frame], None]

REFRESH_S = 1.0
PRICES_HELP = "a price table:\n\n" + EXAMPLE
NICENESS = 10  # of this process, so that a trainer on the same machine comes first


def register(subparsers: Any) -> None:
    """Add the two verbs to the command line's sub-parsers."""
    monitor = subparsers.add_parser(
        "monitor",
        description="Shows a run as it is now, every second: its progress, its peers, their links, and what\n"
        "happened. It takes no part in the run. Ends with Ctrl-C.",
        epilog="example: p2pavg monitor my-run --initial-peers 10.0.0.5:31330\n\n" + PRICES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = monitor.add_argument
    add("run_id", metavar="RUN")
    add("--initial-peers", nargs="+", metavar="HOST:PORT", help="any member; default: $P2PAVG_INITIAL_PEERS")
    add("--credentials", metavar="PATH", help="of a closed run; default: $P2PAVG_CREDENTIALS")
    add("--jsonl", metavar="PATH", help="append one line of JSON each second; - is stdout, alone")
    add(
        "--web",
        metavar="HOST:PORT",
        help="serve a page for browsers, /state as JSON and /metrics for Prometheus, such as at "
        "127.0.0.1:8033; other addresses than loopback's need a token, made or of $P2PAVG_WEB_TOKEN",
    )
    _add_prices(monitor)
    monitor.set_defaults(func=run_monitor)

    report = subparsers.add_parser(
        "report",
        description="Reads what P2PAVG_REPORTS=PATH made peers write, and says in words how the run went.",
        epilog="example: p2pavg report reports.jsonl --plot run.png\n\n" + PRICES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = report.add_argument
    add("paths", nargs="+", metavar="JSONL", help="reports of one run, of one or more peers")
    add("--run", metavar="RUN", help="which run, when the files hold several")
    add(
        "--plot",
        metavar="PATH",
        type=plot_path,
        help="draw one page (png, svg or pdf); default: the first file's name + .png",
    )
    add("--json", metavar="PATH", help="write the summary as JSON; - is stdout, alone")
    _add_prices(report)
    report.set_defaults(func=run_report)


def _add_prices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prices",
        metavar="TOML",
        help="what peers and traffic cost; see below",
    )


def _prices(args: argparse.Namespace) -> PriceTable | None:
    return None if args.prices is None else PriceTable.load(args.prices)


def run_report(args: argparse.Namespace) -> int:
    """Say in words how a run went, and draw it."""
    from p2pavg.monitor import history, plots
    from p2pavg.report import reading

    run = reading.load(args.paths, args.run)
    summary = history.summary(run, _prices(args))
    if args.json == "-":
        print(json.dumps(summary, allow_nan=False))
    else:
        for line in history.words(summary):
            print(line)
        if args.json is not None:
            with _writing(args.json) as file:
                file.write(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    plot = args.plot or f"{args.paths[0]}.png"
    told = sys.stderr if args.json == "-" else sys.stdout
    try:
        save_plot(plot, lambda figure: plots.draw(figure, run), size=(11.0, 12.0))
        print(f"drawn: {plot}", file=told)
    except ConfigurationError as error:
        if args.plot is not None:
            raise
        print(f"not drawn: {error}", file=told)
    return 0


def run_monitor(args: argparse.Namespace) -> int:
    """Watch until SIGINT or SIGTERM."""
    import uvloop

    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    source = args.credentials or from_environment()
    credentials = None if source is None else Credentials.load(source)
    named = initial_addresses(args.initial_peers or None)
    picture = Picture(args.run_id, _prices(args))
    page = None
    if args.web is not None:
        from p2pavg.monitor import web

        page = web.Page(web.place(args.web), args.run_id, args.jsonl)
    with _sink(args.jsonl) as show, contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_monitor(picture, named, credentials, show, page))
    return 0


async def _monitor(
    picture: Picture,
    initial_peers: Sequence[Address],
    credentials: Credentials | None,
    show: Sink,
    page: Page | None,
) -> None:
    from p2pavg.monitor.watcher import Watcher

    watcher = Watcher(picture)
    async with contextlib.AsyncExitStack() as open_things:
        stop = open_things.enter_context(until_stopped())
        await watcher.start(initial_peers, credentials)
        open_things.push_async_callback(watcher.close)
        if page is not None:
            url = await page.start()
            open_things.push_async_callback(page.close)
            print(f"the page of run {picture.run_id}: {url}", file=sys.stderr, flush=True)
        due = time.monotonic()
        while not stop.is_set():
            refusal = watcher.refusal()
            if refusal is not None:
                raise refusal
            shown = picture.show(time.monotonic())
            frame = shown.to_dict(time.time())
            show(shown, frame)
            if page is not None:
                page.show(shown, frame)
            due = max(due + REFRESH_S, time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), due - time.monotonic())


@contextmanager
def _sink(jsonl: str | None) -> Iterator[Sink]:
    """Opens the outputs of pictures: a live terminal or plain lines, and a JSONL file where one is named."""
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if jsonl is not None:
            written = JsonLines(sys.stdout if jsonl == "-" else stack.enter_context(_writing(jsonl, "a")))
            sinks.append(lambda shown, frame: written.write(frame))
        if jsonl != "-":
            told = stack.enter_context(_live()) if sys.stdout.isatty() else Lines().show
            sinks.append(lambda shown, frame: told(shown))

        def show(shown: Shown, frame: Frame) -> None:
            for sink in sinks:
                sink(shown, frame)

        yield show


@contextmanager
def _live() -> Iterator[Callable[[Shown], None]]:
    from rich.live import Live

    from p2pavg.monitor.screen import screen

    with Live(auto_refresh=False, screen=True) as live:
        yield lambda shown: live.update(screen(shown, *live.console.size), refresh=True)


@contextmanager
def _writing(path: str, mode: str = "w") -> Iterator[IO[str]]:
    with _told_of(path):
        file = _opened(path, mode)
    try:
        yield file
    finally:
        with _told_of(path):  # the disk may be full by then
            file.close()


def _opened(path: str, mode: str) -> IO[str]:
    if mode == "a":
        end_last_line(path)
    return open(path, mode, encoding="utf-8")


@contextmanager
def _told_of(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot write {path!r}: {error.strerror}") from None
