"""How a run looks on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2pavg.identity import short_id
from p2pavg.monitor.shown import PeerShown, Shown, duration, rate, run_line

MATRIX_PEERS = 12
STYLES = {"gone": "red", "silent": "yellow", "no link": "dim", "averaging": "cyan", "waiting": "blue"}


def screen(shown: Shown) -> RenderableType:
    """The whole picture: run line, peers, links, what happened."""
    parts: list[RenderableType] = [Text(run_line(shown), style="bold")]
    if shown.peers:
        parts.append(_peers(shown))
    ends = [peer for peer in shown.peers if peer.state != "gone"]
    if 1 < len(ends) <= MATRIX_PEERS and shown.links:
        parts.append(_matrix(shown, ends))
    parts += [Text(f"{duration(ago):>8} ago  {words}") for _, ago, words in shown.events]
    return Group(*parts)


def _peers(shown: Shown) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("peer", "region", "epoch", "samples", "samples/s", "computing", "upload", "state", "seen"):
        left = name in ("peer", "region", "state")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for peer in shown.peers:
        cells = (
            peer.name + (" *" if peer.peer == shown.leader else ""),
            peer.region or "-",
            str(peer.epoch),
            str(peer.samples),
            f"{peer.samples_per_second:.1f}",
            f"{peer.rate:.1f}/s",
            rate(peer.upload_bps),
            peer.state,
            "now" if peer.last_seen_s < 2 else f"{duration(peer.last_seen_s)} ago",
        )
        table.add_row(*map(Text, cells), style=STYLES.get(peer.state))  # as it is: others wrote some of it
    return table


def _matrix(shown: Shown, ends: list[PeerShown]) -> Table:
    """Rows send, columns receive: the fastest that the link went, and its round trip."""
    cells = {(link.peer, link.other): link for link in shown.links}
    table = Table(box=None, pad_edge=False, title="links, row to column", title_justify="left")
    table.add_column("")
    for peer in ends:
        table.add_column(short_id(bytes.fromhex(peer.peer)), justify="right", no_wrap=True)
    for row in ends:
        texts = []
        for column in ends:
            link = cells.get((row.peer, column.peer))
            texts.append("" if link is None else f"{rate(link.rate_bps)} {1e3 * link.rtt_s:.1f} ms")
        table.add_row(row.name, *texts)
    return table
