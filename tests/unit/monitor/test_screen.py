"""What a monitor prints: a screen of 80 by 24 and more, plain lines, and the table of peers."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from p2pavg.identity import short_id
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.monitor import peers
from p2pavg.monitor.health import duration
from p2pavg.monitor.lines import Lines
from p2pavg.monitor.picture import Picture
from p2pavg.monitor.screen import screen
from p2pavg.monitor.shown import run_line
from p2pavg.report.distance import Distance
from tests.unit.monitor.test_monitor import PRICES, A, B, C, event, named, sees, status, three, told_of


def test_text_of_members_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """A region or a state that looks like the terminal's markup is shown as it is."""
    from rich.console import Console

    picture = three()
    picture.told(A, status(region="[/x]", state="[red]"), 0.5)
    Console(width=150).print(screen(picture.show(1.0), 150))
    peers._print_table("[/run]", [(PeerInfo(B, region="[/y]"), 1.0)])
    shown = capsys.readouterr().out
    for part in ("[/x]", "[red]", "[/y]", "[/run]"):
        assert part in shown


def test_the_run_line() -> None:
    """Epoch, bar, time to the step, rates and peers in one line."""
    shown = replace(three(PRICES).show(1.0), samples_per_second=123.4, granularity=4.2)
    line = run_line(shown)
    for part in (
        "run run",
        "epoch 4",
        "450/1000",
        "step in 3.7 s",
        "123.4 samples/s",
        "granularity 4.2",
        "3 peers",
    ):
        assert part in line
    assert "###########............." in line
    assert "nobody" in run_line(Picture("run").show(0.0))
    assert [duration(seconds) for seconds in (1.234, 59.0, 600.0, 7300.0)] == [
        "1.2 s",
        "59 s",
        "10 min",
        "2.0 h",
    ]


def test_plain_lines_tell_an_event_again_only_when_it_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal: each event once, and once more when the round that followed is known."""
    picture, lines = three(), Lines()
    picture.unlinked(C, "gone", 1.0)
    lines.show(picture.show(1.0))
    lines.show(picture.show(1.5))
    picture.told(A, event("begun", attempt=2, contributors=2), 1.6)
    lines.show(picture.show(2.0))
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("peer")]
    name = short_id(C)
    assert told == [
        f"peer {name} was lost in epoch 4 (gone)",
        f"peer {name} was lost in epoch 4 (gone); round held with 2",
    ]


def test_plain_lines_say_once_that_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, while nobody is in the run; a run that came is told every time."""
    lines, empty, here = Lines(), Picture("run").show(0.0), three().show(1.0)
    for shown in (empty, empty, here, here, empty, empty):
        lines.show(shown)
    told = capsys.readouterr().out.splitlines()
    assert ["nobody" in line for line in told] == [True, False, False, True]


def test_the_terminal_shows_peers_links_and_events() -> None:
    """The screen has a row per peer, the matrix of links and what happened."""
    from rich.console import Console

    picture = three()
    row = [B, list(Distance).index(Distance.WORLD), 0.103, 8, 2.1e8, 1000, 1000]
    picture.told(A, status(counted=300, peers=sees(B, C), links=[row]), 0.5)
    picture.told(A, event("silent", peer=C, why="no heartbeat"), 0.6)
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(screen(picture.show(1.0), 150))
    text = console.export_text()
    for part in (
        f"* {short_id(A)}",
        "eu-west-1",
        "210.0 Mb/s",
        "103 ms ×8",
        "silent",
        "fell silent in epoch 4",
    ):
        assert part in text


@pytest.mark.parametrize("peers", [3, 40])
def test_the_screen_fits_80_columns(peers: int) -> None:
    """On 80 columns nothing is cut off: columns that do not fit are left out, and a legend says what is
    there.
    """
    from rich.console import Console

    picture = Picture("run")
    ids = [bytes([65 + number]) * 20 for number in range(peers)]
    row = [ids[1], list(Distance).index(Distance.WORLD), 0.103, 8, 2.1e8, 1000, 1000]
    picture.listed({p: named(p, f"machine-{p[0]}", region="eu-west-1") for p in ids}, 0.0)
    for peer in ids:
        picture.linked(peer, 0.0)
        picture.told(peer, status(leader=ids[0], peers=sees(*ids), links=[row]), 0.0)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(picture.show(0.5), 80))
    text = console.export_text()
    assert "…" not in text
    assert "* machine-65" in text
    assert "* leads." in text
    assert ("210.0 Mb/s" in text) == (peers == 3)
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_table_of_peers_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """`p2pavg peers` on 80 columns: names, addresses, who downloads, and nothing cut off."""
    rows = [
        named(A, "a-machine-of-a-lab", region="eu-west-1", samples_per_second=1234.5),
        named(B, "new", joining=True),
    ]
    peers._print_table("my-run", [(row, 1.0) for row in rows])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "run my-run: 1 peer and 1 downloading"
    assert max(map(len, lines)) <= 80
    for part in ("a-machine-of-a-lab", short_id(A), "198.51.100.7:31330", "eu-west-1", "1,234", "joining"):
        assert any(part in line for line in lines)


def test_a_peer_that_may_be_dead_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """Between a crash and the end of a peer's record its row says so, and for how long it was silent."""
    peers._print_table("my-run", [(named(A, "lives"), 2.0), (named(B, "killed"), 11.0)])
    out = capsys.readouterr().out
    lives, killed = (next(line for line in out.splitlines() if name in line) for name in ("lives", "killed"))
    assert "silent" not in lives
    assert "silent 11 s" in killed
    assert "silent: it may have died" in out


@pytest.mark.parametrize("count", [1, 3, 5, 12, 40])
def test_the_screen_fits_80_by_24(count: int) -> None:
    """Verdict, run, figures, peers, rounds and the newest events fit; links where there is room for them."""
    from rich.console import Console

    ids = [bytes([65 + number]) * 20 for number in range(count)]
    picture = Picture("llama-7b-pretrain", PRICES)
    picture.listed({p: named(p, f"machine-{p[0]}", region="eu-west-1") for p in ids}, 0.0)
    for peer in ids:
        picture.linked(peer, 0.0)
        links = [[other, 4, 0.103, 8, 2.1e8, 1000, 1000] for other in ids if other != peer]
        for epoch in range(1, 6):
            picture.told(peer, told_of(epoch, samples_discarded=3 if epoch == 3 else 0), 0.1 * epoch)
        told = {"leader": ids[0], "peers": sees(*ids), "links": links, "loss": 2.31, "passes": 1.25}
        picture.told(peer, status(epoch=6, **told), 0.6)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(picture.show(1.0), 80, 24))
    text = console.export_text()
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for part in (
        "discarded in the last minute",
        "epoch 6",
        "loss 2.31",
        "pass 1.250",
        "* machine-65",
        "====",
        "0.7 s ago",
    ):
        assert part in text
    assert ("103 ms ×8" in text) == (count == 3)
    assert ("there is no room" in text) == (count >= 12)


def test_a_lost_peer_comes_first_on_a_full_screen() -> None:
    """Where not all rows fit, those in trouble do."""
    from rich.console import Console

    picture = Picture("run")
    ids = [bytes([65 + number]) * 20 for number in range(40)]
    picture.listed({p: named(p, f"machine-{p[0]}") for p in ids}, 0.0)
    for peer in ids:
        picture.linked(peer, 0.0)
        picture.told(peer, status(), 0.0)
    picture.unlinked(ids[39], "closed by the other side", 0.5)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(picture.show(0.5), 80, 24))
    lines = console.export_text().splitlines()
    (head,) = (place for place, line in enumerate(lines) if line.startswith("peer "))
    assert lines[head + 1].split()[0] == "machine-104"
    assert lines[head + 1].split()[-1] == "lost"


def test_hostile_text_is_text_on_the_terminal() -> None:
    """Markup and escapes in names, regions, versions, verdicts and losses reach the screen as letters."""
    from rich.console import Console

    picture = Picture("[red]run[/x]")
    told = {"region": "[/y]", "version": "[bold]", "reach": "[link=x]", "loss": float("nan")}
    listed = PeerInfo.decode(named(A, "[/z]\x1b[2J").encode(), A, 1)
    assert listed is not None
    picture.listed({A: listed}, 0.0)
    picture.linked(A, 0.0)
    picture.told(A, status(**told), 0.0)
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(screen(picture.show(0.5), 150, 40))
    text = console.export_text()
    for part in ("[red]run[/x]", "[/y]", "[bold]", "[link=x]", "[/z] [2J", "the loss is nan"):
        assert part in text
    assert "\x1b" not in text
