"""The view of a run on a terminal of 80 columns or more."""

from __future__ import annotations

import io
import sys

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2pavg.monitor import phases
from p2pavg.monitor.health import duration
from p2pavg.monitor.shown import LinkShown, PeerShown, Shown, figures_line, gradients_line, rate, run_line
from p2pavg.printable import figure, size

WIDE = 100  # columns from which on all columns of the table fit
NAME, REGION = 20, 18
CELL = 11  # columns of a cell of the matrix, with its gap
MOST_NAME = 10  # characters of a peer's name in the matrix
LEAST_EVENTS = 2  # for which there is room before the matrix of links gets any
MOST_EVENTS = 12
TROUBLES = ("gone", "silent", "no link")  # states of peers that come first
LEVELS = {"well": "green", "look": "yellow", "bad": "bold red"}
STYLES = {"gone": "red", "silent": "yellow", "no link": "dim", "averaging": "cyan", "waiting": "blue"}
LEGEND = "* leads.  samples: of this epoch.  samples/s: over whole epochs; computing: without waiting"


def screen(shown: Shown, width: int, height: int | None = None) -> RenderableType:
    """The whole picture: verdict, run, peers, rounds, links, what happened.

    width, height: columns and lines of the terminal; what does not fit is left out, links first. None: all
    fits.
    """
    space = Space(width, height)
    space.add(Text(shown.verdict, style=LEVELS.get(shown.level, "")))
    if not shown.peers:
        space.add_events(shown)
        return space.made()
    space.add(Text(run_line(shown), style="bold"))
    space.add(Text(figures_line(shown)))
    if gradients := gradients_line(shown):
        space.add(Text(gradients))
    ends = [peer for peer in shown.peers if peer.state != "gone"]
    below = len(phases.lines(shown, width)) + LEAST_EVENTS + 2  # what the table of peers leaves room for
    rows = space.fitting(len(shown.peers), below)
    space.add(_peers(shown, width, rows), rows + 1)
    if rows < len(shown.peers):
        more = len(shown.peers) - rows
        space.add(Text(f"and {more} more, for which there is no room; --web shows all", "dim"))
    else:
        space.add(Text(LEGEND if width >= WIDE else LEGEND.partition(";")[0], "dim"))
    for line in phases.lines(shown, width):
        space.add(line)
    if len(ends) > 1 and shown.links:
        lines = 2 + 2 * len(ends)
        if len(ends) <= (width - NAME) // CELL and space.has(lines + LEAST_EVENTS):
            space.add(Text("links, row to column: fastest rate, round trip, streams", "dim"))
            space.add(_matrix(shown, ends), lines - 1)
        else:
            space.add(Text(_too_many(len(ends)), "dim"))
    space.add_events(shown)
    return space.made()


class Space:
    """The lines of a terminal, as they are given away."""

    def __init__(self, width: int, height: int | None) -> None:
        self._console = Console(width=width, file=io.StringIO())
        self._width = width
        self._left = sys.maxsize if height is None else height
        self._parts: list[RenderableType] = []

    def has(self, lines: int) -> bool:
        """Whether so many are left."""
        return self._left >= lines

    def fitting(self, rows: int, below: int) -> int:
        """How many of so many rows of a table fit, with its head and so many lines below it; one at least."""
        return max(1, min(rows, self._left - 1 - below))

    def lines_of(self, text: Text) -> int:
        """How many a text takes."""
        return max(1, len(text.wrap(self._console, self._width)))

    def add(self, part: RenderableType, lines: int | None = None) -> None:
        """Add a part. lines: that it takes; None: it is a Text."""
        self._left -= self.lines_of(part) if lines is None and isinstance(part, Text) else lines or 0
        self._parts.append(part)

    def add_events(self, shown: Shown) -> None:
        """Fill what is left with the newest events, the newest last."""
        fitting: list[Text] = []
        for _, ago, words in reversed(shown.events[-MOST_EVENTS:]):
            text = Text(f"{duration(ago):>8} ago  {words}")
            if not self.has(self.lines_of(text)):
                break
            self._left -= self.lines_of(text)
            fitting.append(text)
        self._parts += reversed(fitting)

    def made(self) -> RenderableType:
        """All parts, one below the other."""
        return Group(*self._parts)


def _too_many(ends: int) -> str:
    columns, lines = NAME + CELL * ends, 2 + 2 * ends
    return f"the links of {ends} peers need {columns} columns and {lines} lines; --web shows them all"


def _peers(shown: Shown, width: int, most: int) -> Table:
    table = Table(box=None, pad_edge=False)
    regions, wide = any(peer.region for peer in shown.peers), width >= WIDE
    table.add_column("peer", no_wrap=True, max_width=NAME)
    if regions:
        table.add_column("region", no_wrap=True, max_width=REGION if wide else REGION - 6)
    for name in ("epoch", "samples", "samples/s", *(["computing"] if wide else []), "upload"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("memory", "share") if wide else ():
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("reach", "version") if wide else ():
        table.add_column(name, no_wrap=True, max_width=REGION)
    for peer in sorted(shown.peers, key=lambda peer: peer.state not in TROUBLES)[:most]:
        quiet = "" if peer.last_seen_s < 2 else f" {duration(peer.last_seen_s)}"
        cells = [
            ("* " if peer.peer == shown.leader else "") + peer.name,
            *([peer.region or "-"] if regions else []),
            str(peer.epoch),
            str(peer.samples),
            figure(peer.samples_per_second, 4),
            *([figure(peer.rate, 4)] if wide else []),
            rate(peer.upload_bps),
            ("lost" if peer.state == "gone" and not peer.left else peer.state) + quiet,
            *(
                [size(peer.memory_bytes + peer.device_memory_bytes), f"{100 * peer.share:.0f}%"]
                if wide
                else []
            ),
            *([peer.reach + _relays(peer.relayed_bytes), peer.version] if wide else []),
        ]
        table.add_row(
            *map(Text, cells), style=STYLES.get(peer.state)
        )  # Text, as peers wrote some of it: no markup is read
    return table


def _relays(nbytes: int) -> str:
    """What it has carried for others."""
    return f", relayed {size(nbytes)}" if nbytes else ""


def _trip(link: LinkShown) -> str:
    """Round trip and streams."""
    trip = 1e3 * link.rtt_s
    return f"{trip:.{0 if trip >= 10 else 1}f} ms ×{link.streams}"


def _matrix(shown: Shown, ends: list[PeerShown]) -> Table:
    """The matrix of links: rows send, columns receive. A cell has fastest rate, round trip and streams."""
    cells = {(link.peer, link.other): link for link in shown.links}
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True, max_width=NAME)
    for peer in ends:
        table.add_column(Text(peer.name[-MOST_NAME:]), justify="right", no_wrap=True)
    for row in ends:
        texts = [Text(row.name)]
        for column in ends:
            link = cells.get((row.peer, column.peer))
            texts.append(Text("" if link is None else f"{rate(link.rate_bps)}\n{_trip(link)}"))
        table.add_row(*texts)
    return table
