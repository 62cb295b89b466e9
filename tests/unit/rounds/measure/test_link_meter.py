"""What the links of an epoch's report say, from what an engine counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.report.distance import Distance
from p2pavg.report.wire import Wire
from p2pavg.rounds.measure import link_meter
from p2pavg.rounds.measure.link_meter import LinkMeter
from p2pavg.transport.engine import StreamStats

A, B = b"a" * 20, b"b" * 20


class Counters:
    """An engine's counters, and a clock."""

    def __init__(self) -> None:
        self.moved: dict[int, tuple[int, int]] = {}
        self.carried: dict[bytes | None, Wire] = {}
        self.table = Wire()
        self.windows: list[int] = [100_000]
        self.now = 100.0

    def traffic(self, link: int) -> tuple[int, int]:
        return self.moved.get(link, (0, 0))

    def stats(self, link: int) -> list[StreamStats]:
        return [StreamStats(i, 0, 0, 0.1, window, 1e12, 0, 0.0, 3) for i, window in enumerate(self.windows)]

    def monotonic(self) -> float:
        return self.now


def link(
    number: int, host: str = "10.0.0.2", region: str = "", role: str = "trainer", rtt: float = 0.1
) -> Any:
    return SimpleNamespace(id=number, hello={"role": role, "region": region}, address=(host, 1), rtt=rtt)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    made = Counters()
    monkeypatch.setattr(link_meter, "time", made)
    return made


def meter(counters: Counters, region: str = "") -> LinkMeter:
    return LinkMeter(
        counters,  # type: ignore[arg-type]
        region,
        lambda host: host == "127.0.0.1",
        carried=lambda: counters.carried,
        table=lambda: counters.table,
    )


def test_bytes_are_those_since_the_last_report(counters: Counters) -> None:
    """Every byte is in exactly one report, those of failed attempts and downloads too."""
    watch, links = meter(counters), {A: link(1)}
    counters.moved[1] = (1000, 10)
    watch.observe(links, moving=True)
    counters.moved[1] = (1500, 20)
    (first,) = watch.report(links, 0.0).links
    counters.moved[1] = (1600, 50)
    (second,) = watch.report(links, 0.0).links
    assert (first.bytes_sent, first.bytes_received) == (1500, 20)
    assert (second.bytes_sent, second.bytes_received) == (100, 30)


def test_a_lost_link_keeps_its_bytes(counters: Counters) -> None:
    """What a link moved before it was replaced, or lost for good, is in the report of its epoch, once."""
    watch = meter(counters)
    counters.moved = {1: (1000, 0), 2: (50, 0)}
    watch.observe({A: link(1), B: link(2)}, moving=False)
    counters.moved = {3: (7, 0)}
    links = {A: link(3)}  # a new link to A; B is gone
    sent = {report.peer: report.bytes_sent for report in watch.report(links, 0.0).links}
    assert sent == {A.hex(): 1007, B.hex(): 50}
    assert [report.peer for report in watch.report(links, 0.0).links] == [A.hex()]


def test_rates_are_measured_while_gradients_flow(counters: Counters) -> None:
    """The fastest beat of a long transfer; for one that was over between two beats, its own length."""
    watch, links = meter(counters), {A: link(1)}
    for sent in (0, 1_000_000, 4_000_000, 5_000_000):
        counters.moved[1] = (sent, 0)
        watch.observe(links, moving=True)
        counters.now += 0.1
    (long,) = watch.report(links, 0.3).links
    assert long.rate_bps == pytest.approx(8 * 3_000_000 / 0.1)
    counters.moved[1] = (6_000_000, 0)
    (short,) = watch.report(links, 0.02).links
    assert short.rate_bps == pytest.approx(8 * 1_000_000 / 0.02)
    (idle,) = watch.report(links, 0.0).links
    assert idle.rate_bps == 0.0


def test_streams_and_windows_are_the_most_of_the_epoch(counters: Counters) -> None:
    """What a link had while gradients flowed, not what is left of it afterwards."""
    watch, links = meter(counters), {A: link(1)}
    counters.windows = [100_000, 900_000, 200_000]
    watch.observe(links, moving=True)
    counters.windows = [10_000]
    (report,) = watch.report(links, 0.0).links
    assert (report.streams, report.window_bytes, report.retransmits) == (3, 900_000, 9)
    assert report.rtt_s == 0.1


def test_links_are_classed_by_address_region_and_round_trip(counters: Counters) -> None:
    """An address of this machine, the regions of both sides, else the round trip."""
    watch = meter(counters, "eu-west-1a")
    links = {
        b"1" * 20: link(1, host="127.0.0.1", region="us-east-1"),
        b"2" * 20: link(2, region="eu-west-1a"),
        b"3" * 20: link(3, region="us-east-1"),
        b"4" * 20: link(4, rtt=0.003),
        b"5" * 20: link(5, role="watcher"),
    }
    found = watch.report(links, 0.0).links
    assert [link.distance for link in found] == [
        Distance.HOST,
        Distance.ZONE,
        Distance.WORLD,
        Distance.REGION,
    ]
    assert [link.region for link in found] == ["us-east-1", "eu-west-1a", "us-east-1", ""]


def test_watchers_see_the_last_report(counters: Counters) -> None:
    """Between two reports the links are told as the last one had them, with the round trip of now."""
    watch, links = meter(counters), {A: link(1)}
    assert watch.current() == ()
    counters.moved[1] = (500, 0)
    watch.report(links, 0.0)
    watch.observe({A: link(1, rtt=0.2)}, moving=False)
    (shown,) = watch.current()
    assert (shown.bytes_sent, shown.rtt_s) == (500, 0.2)


def test_every_byte_of_the_wire_is_in_one_report(counters: Counters) -> None:
    """What the kernel counted is told once: with the member that it went to, the table or others."""
    watch, links = meter(counters), {A: link(1), B: link(2, role="watcher")}
    counters.carried = {A: Wire(1000, 100), B: Wire(50, 5), None: Wire(7, 1)}
    counters.table = Wire(300, 30)
    first = watch.report(links, 0.0)
    assert [(row.wire_bytes_sent, row.wire_bytes_received) for row in first.links] == [(1000, 100)]
    assert (first.table, first.others) == (Wire(300, 30), Wire(57, 6))
    counters.carried = {A: Wire(1400, 100), B: Wire(60, 5), None: Wire(7, 1)}
    counters.table = Wire(310, 31)
    second = watch.report(links, 0.0)
    assert [(row.wire_bytes_sent, row.wire_bytes_received) for row in second.links] == [(400, 0)]
    assert (second.table, second.others) == (Wire(10, 1), Wire(10, 0))
    watch.report({}, 0.0)
    counters.carried[A] = Wire(1500, 100)  # the end of a link that no report has a row for any more
    assert watch.report({}, 0.0).others == Wire(100, 0)
