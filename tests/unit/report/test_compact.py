"""The compact report in records and messages, and what things cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.errors import ConfigurationError
from p2pavg.identity import Identity
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.seal import OVERHEAD_BYTES
from p2pavg.membership.table.record import MAX_RECORD_BYTES, MAX_VALUE_BYTES, sign_record
from p2pavg.report.compact import MAX_BYTES, CompactReport
from p2pavg.report.distance import Distance
from p2pavg.report.prices import PriceTable, per_hour, per_million
from tests.unit.report.reports import link, report

counts = st.integers(0, 2**80)
seconds = st.floats(0.0, 1e12)


@settings(deadline=None)
@given(counts, counts, seconds, seconds, st.lists(counts, min_size=5, max_size=5))
def test_a_compact_report_is_bounded_and_comes_back(
    samples: int, others: int, total: float, moved: float, sent: list[int]
) -> None:
    """However large the numbers, at most MAX_BYTES travel; ordinary ones come back to the millisecond."""
    links = tuple(link(count, where) for count, where in zip(sent, Distance, strict=True))
    made = report(
        samples=samples,
        table_bytes_sent=others,
        other_bytes_received=others,
        seconds_total=total,
        seconds_transfer=moved,
        links=links,
    )
    data = CompactReport.of(made).encode()
    assert len(data) <= MAX_BYTES
    back = CompactReport.decode(data)
    assert back is not None
    assert back.members == 2
    everywhere = dict(zip(Distance, sent, strict=True))
    everywhere[Distance.WORLD] += others
    if max(samples, others + sum(sent)) < 2**53 and max(total, moved) < 1e9:
        assert (back.samples, back.wire_bytes_received) == (samples, others + sum(sent))
        assert back.seconds_total == pytest.approx(total, abs=6e-4)
        assert back.sent == {where: count for where, count in everywhere.items() if count}


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_bytes_that_are_no_report_are_refused(data: bytes) -> None:
    """Arbitrary bytes make a report or None, and never raise."""
    made = CompactReport.decode(data)
    assert made is None or isinstance(made, CompactReport)


def test_another_version_of_a_report_is_no_report() -> None:
    """A compact report of a version that is not known is left alone; fields appended to a known one too."""
    data = CompactReport.of(report()).encode()
    assert CompactReport.decode(data.replace(b"\x01", b"\x02", 1)) is None
    count = data[1:3] if data[0] == 0xDC else data[:1]
    longer = data[:1] + (int.from_bytes(count, "big") + 1).to_bytes(2, "big") + data[3:] + b"\x07"
    assert CompactReport.decode(longer) == CompactReport.decode(data)


def test_a_record_with_a_report_fits_a_datagram() -> None:
    """The largest report, and a record as long as may be with one, stay below the limits; a record that has
    no room for its report goes without.
    """
    identity = Identity.generate()
    largest = b"r" * MAX_BYTES
    for hosts in (1, 3, 5):
        info = PeerInfo(
            identity.peer_id,
            tuple(("h" * 100, 1 + port) for port in range(hosts)),
            region="r" * 64,
            lineage=b"l" * 32,
            model=b"m" * 32,
            report=largest,
        )
        value = info.encode()
        assert len(value) + OVERHEAD_BYTES <= MAX_VALUE_BYTES
        record = sign_record(
            identity, b"k" * 20, value, incarnation=1, sequence=1, lifetime=15.0, anchor=b"a" * 10
        )
        assert len(record.encoded) <= MAX_RECORD_BYTES < 1200
        back = PeerInfo.decode(value, identity.peer_id, 0)
        assert back is not None
        assert back.report == (largest if hosts < 5 else b"")


def test_prices_by_region_and_class_of_link(tmp_path: Path) -> None:
    """The longest region that fits prices the hour, the class of link the GB."""
    path = tmp_path / "prices.toml"
    path.write_text(
        "[peer_hour]\ndefault = 0.35\n'us-east' = 0.32\nus = 1.0\n[gb]\nhost = 0.0\nworld = 0.08\n"
    )
    table = PriceTable.load(path)
    assert table.hourly("us-east-1a") == 0.32
    assert table.hourly("eu-west-1") == 0.35
    dollars = table.dollars("eu-west-1", 1800.0, {Distance.WORLD: 10**9, Distance.HOST: 10**12})
    assert dollars == pytest.approx(0.175 + 0.08)
    assert per_hour(dollars, 1800.0) == pytest.approx(0.51)
    assert per_million(dollars, 500_000) == pytest.approx(0.51)


def test_traffic_between_regions_costs_what_the_table_says_of_them() -> None:
    """Links to regions that [egress] names have its price, all other bytes that of their class; what stays
    inside a machine has no price of a region.
    """
    table = PriceTable({}, {Distance.WORLD: 0.08}, {"us-east": {"eu": 0.05, "us-east": 0.01}})
    sent = {Distance.WORLD: 3 * 10**9, Distance.HOST: 10**9}
    links = [("eu-west-1", Distance.WORLD, 2 * 10**9), ("us-east-1", Distance.HOST, 10**9)]
    assert table.dollars("us-east-1a", 0.0, sent, links) == pytest.approx(2 * 0.05 + 0.08)
    assert table.dollars("ap-south-1", 0.0, sent, links) == pytest.approx(3 * 0.08)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("peer_hour = 3", "must be a table"),
        ("[peer_hour]\ndefault = -1", "at least 0"),
        ("[peer_hour]\ndefault = true", "at least 0"),
        ("[gb]\nmoon = 1", "moon"),
        ("[hours]\n", "hours"),
        ("=", "no TOML"),
        ("a = " + "[" * 100_000, "no TOML"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_price_table_says_what_is_wrong(text: str | None, words: str, tmp_path: Path) -> None:
    """Each mistake in the table is one sentence that names it."""
    path = tmp_path / "prices.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        PriceTable.load(path)
