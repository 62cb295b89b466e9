"""The view of a run on a terminal of 80 columns or more."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2pavg.monitor.health import duration
from p2pavg.monitor.shown import PeerShown, Shown, rate, run_line

WIDE = 100  # columns from which on all columns of the table fit
NAME, REGION = 20, 18
CELL = 11  # columns of a cell of the matrix, with its gap
MOST_NAME = 10  # characters of a peer's name in the matrix
STYLES = {"gone": "red", "silent": "yellow", "no link": "dim", "averaging": "cyan", "waiting": "blue"}
LEGEND = "* leads.  samples: of this epoch.  samples/s: over whole epochs; computing: without waiting"


def screen(shown: Shown, width: int) -> RenderableType:
    """The whole picture: run line, peers, links, what happened. width: columns of the terminal."""
    parts: list[RenderableType] = [Text(run_line(shown), style="bold")]
    if shown.peers:
        parts += [_peers(shown, width), Text(LEGEND if width >= WIDE else LEGEND.partition(";")[0], "dim")]
    ends = [peer for peer in shown.peers if peer.state != "gone"]
    if len(ends) > 1 and shown.links:
        fits = (width - NAME) // CELL
        parts.append(_matrix(shown, ends) if len(ends) <= fits else Text(_too_many(len(ends)), "dim"))
    parts += [Text(f"{duration(ago):>8} ago  {words}") for _, ago, words in shown.events]
    return Group(*parts)


def _too_many(ends: int) -> str:
    return f"the links of {ends} peers need {NAME + CELL * ends} columns; --jsonl has them all"


def _peers(shown: Shown, width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    regions, wide = any(peer.region for peer in shown.peers), width >= WIDE
    table.add_column("peer", no_wrap=True, max_width=NAME)
    if regions:
        table.add_column("region", no_wrap=True, max_width=REGION if wide else REGION - 6)
    for name in ("epoch", "samples", "samples/s", *(["computing"] if wide else []), "upload"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for peer in shown.peers:
        quiet = "" if peer.last_seen_s < 2 else f" {duration(peer.last_seen_s)}"
        cells = [
            ("* " if peer.peer == shown.leader else "") + peer.name,
            *([peer.region or "-"] if regions else []),
            str(peer.epoch),
            str(peer.samples),
            f"{peer.samples_per_second:.1f}",
            *([f"{peer.rate:.1f}"] if wide else []),
            rate(peer.upload_bps),
            peer.state + quiet + _relays(peer.relayed_bytes),
        ]
        table.add_row(
            *map(Text, cells), style=STYLES.get(peer.state)
        )  # Text, as peers wrote some of it: no markup is read
    return table


def _relays(nbytes: int) -> str:
    """What it has carried for others."""
    return f", relayed {nbytes / 1e6:.1f} MB" if nbytes else ""


def _matrix(shown: Shown, ends: list[PeerShown]) -> Table:
    """The matrix of links: rows send, columns receive. A cell has the highest rate and the round trip of a
    link.
    """
    cells = {(link.peer, link.other): link for link in shown.links}
    title = "links, row to column: the fastest they went, and their round trip"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("", no_wrap=True, max_width=NAME)
    for peer in ends:
        table.add_column(Text(peer.name[-MOST_NAME:]), justify="right", no_wrap=True)
    for row in ends:
        texts = [Text(row.name)]
        for column in ends:
            link = cells.get((row.peer, column.peer))
            texts.append(Text("" if link is None else f"{rate(link.rate_bps)}\n{1e3 * link.rtt_s:.1f} ms"))
        table.add_row(*texts)
    return table
