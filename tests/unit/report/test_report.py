"""What an epoch's report says: phases that add up, links by class, derived quantities."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.errors import ConfigurationError
from p2pavg.report import MemoryReport, Phases, RoundReport, phases
from p2pavg.report.distance import Distance, distance
from tests.unit.report.reports import link, report

seconds = st.floats(0.0, 100.0)


def total_of(spent: Phases) -> float:
    return (
        spent.calculation
        + spent.waiting
        + spent.matchmaking
        + spent.transfer
        + spent.commit
        + spent.update
        - spent.overlapped
    )


@settings(deadline=None)
@given(seconds, seconds, seconds, seconds, seconds, seconds, seconds)
def test_plain_phases_add_up_to_the_epoch(
    calculation: float, lost: float, wait: float, formed: float, moved: float, agreed: float, update: float
) -> None:
    """Waiting epochs: every second is in exactly one phase, failed attempts count as waiting."""
    arrived = calculation + lost
    total = arrived + wait + formed + moved + agreed + update
    spent = phases(
        total=total,
        arrived=arrived,
        waited_before=lost,
        round_seconds={"matchmaking": formed, "transfer": moved, "commit": agreed},
        update=update,
        waited=None,
    )
    assert total_of(spent) == pytest.approx(total, abs=1e-6)
    assert spent.calculation == pytest.approx(calculation, abs=1e-6)
    assert spent.waiting == pytest.approx(wait + lost, abs=1e-6)
    assert spent.overlapped == 0.0


def test_a_report_prints_as_one_line() -> None:
    """What it cost, and what went wrong if anything did."""
    found = report(links=(link(12_300_000, Distance.REGION),))
    plain = "epoch 3: 2 peers, 1,000 samples in 10.00 s, calculation 8.00, communication 1.60, 12.3 MB sent"
    assert str(found) == plain
    bad = replace(found, attempts=2, samples_discarded=5, samples_lost={"dd" * 20: 144})
    assert str(bad) == f"{plain}, 2 attempts, 5 samples discarded, 144 samples lost with 1 peer"


@settings(deadline=None)
@given(seconds, seconds, seconds, st.sampled_from([None, 0.0]))
def test_a_wait_for_peers_is_no_calculation(
    idle: float, calculation: float, moved: float, waited: float | None
) -> None:
    """What a thread waited for other peers before it computed is waiting, with and without delayed
    updates.
    """
    arrived = idle + calculation
    spent = phases(
        total=arrived + moved,
        arrived=arrived,
        waited_before=0.0,
        round_seconds={"transfer": moved},
        update=0.0,
        waited=waited,
        idle=idle,
    )
    assert total_of(spent) == pytest.approx(arrived + moved, abs=1e-6)
    assert spent.waiting == pytest.approx(idle, abs=1e-6)


@settings(deadline=None)
@given(seconds, seconds, seconds, st.floats(0.0, 1.0))
def test_delayed_phases_add_up_less_what_was_overlapped(
    alone: float, moved: float, update: float, share: float
) -> None:
    """Delayed updates: the phases exceed the epoch by just the seconds in which training went on too."""
    waited = share * (moved + update)
    spent = phases(
        total=alone + moved + update,
        arrived=alone,
        waited_before=0.0,
        round_seconds={"transfer": moved},
        update=update,
        waited=waited,
    )
    assert total_of(spent) == pytest.approx(alone + moved + update, abs=1e-6)
    assert spent.overlapped == pytest.approx(moved + update - waited, abs=1e-6)
    assert spent.calculation == pytest.approx(alone + moved + update - waited, abs=1e-6)


@settings(deadline=None)
@given(st.floats(0.1, 100.0), seconds, seconds, st.floats(0.0, 1.0))
def test_a_late_result_adds_up_too(total: float, moved: float, agreed: float, share: float) -> None:
    """A peer that computed while the round went on without it: the round is overlapped whole."""
    spent = phases(
        total=total,
        arrived=None,
        waited_before=0.0,
        round_seconds={"transfer": moved, "commit": agreed},
        update=share * total,
        waited=None,
    )
    assert total_of(spent) == pytest.approx(total, abs=1e-6)
    assert spent.overlapped == pytest.approx(spent.transfer + spent.commit)


@pytest.mark.parametrize(
    ("mine", "theirs", "rtt_s", "expected"),
    [
        ("us-central1-a", "us-central1-a", 0.2, Distance.ZONE),
        ("us-central1-a", "us-central1-b", 0.0, Distance.REGION),
        ("us-east-1a", "us-east-1a", 0.0, Distance.ZONE),
        ("us-east-1a", "us-east-1", 0.0, Distance.REGION),
        ("us-east-1", "us-west-2", 0.0, Distance.CONTINENT),
        ("europe-west4-a", "eu-west-1", 0.0, Distance.CONTINENT),
        ("us-east-1", "eu-west-1", 0.0, Distance.WORLD),
        ("eu/berlin/rack1", "eu/berlin/rack1", 0.0, Distance.ZONE),
        ("eu/berlin", "eu/paris", 0.0, Distance.CONTINENT),
        ("home", "home", 0.0, Distance.REGION),
        ("home", "office", 0.0004, Distance.ZONE),
        ("home", "office", 0.003, Distance.REGION),
        ("", "", 0.05, Distance.CONTINENT),
        ("", "", 0.15, Distance.WORLD),
        ("", "", 0.0, Distance.WORLD),
    ],
)
def test_links_are_classed_by_region_else_by_round_trip(
    mine: str, theirs: str, rtt_s: float, expected: Distance
) -> None:
    """Names of regions decide, either way round; where they say nothing the round trip does."""
    assert distance(mine, theirs, same_host=False, rtt_s=rtt_s) is expected
    assert distance(theirs, mine, same_host=False, rtt_s=rtt_s) is expected
    assert distance(mine, theirs, same_host=True, rtt_s=rtt_s) is Distance.HOST


def test_the_json_has_all_fields_and_derived_quantities() -> None:
    """One line of JSON: a version, the fields, the derived rates, and all bytes, by class of link too."""
    made = report(
        seconds_calculation=8.0,
        seconds_transfer=1.5,
        seconds_commit=0.5,
        seconds_total=10.0,
        samples=1000,
        local_samples=400,
        bytes_sent=30,
        table_bytes_sent=5,
        other_bytes_sent=1,
        host_bytes_sent=2,
        table_bytes_received=2,
        links=(link(10, Distance.HOST), link(20, Distance.WORLD)),
    )
    line = made.to_json()
    assert "\n" not in line
    data = json.loads(line)
    assert data["version"] == 1
    assert data["granularity"] == pytest.approx(4.0)
    assert data["samples_per_second"] == pytest.approx(100.0)
    assert data["local_samples_per_second"] == pytest.approx(50.0)
    assert data["egress_bytes_per_hour"] == pytest.approx(360 * 36)
    assert (data["wire_bytes_sent"], data["wire_bytes_received"]) == (36, 32)
    assert data["wire_bytes_sent_by_distance"] == {"host": 12, "world": 24}
    assert data["bytes_between_regions"] == 20
    assert data["members"][0].keys() == {"peer", "weight", "samples", "voter"}


def test_memory_survives_the_file() -> None:
    """What is written as JSON is read again; reports of old have none, and what is no size is refused."""
    made = replace(report(), memory=MemoryReport(5, 90, 20, 50))
    data = json.loads(made.to_json())
    assert data["memory"] == {"host_peak": 5, "host": 90, "device_peak": 20, "device": 50}
    assert RoundReport.from_dict(data) == made
    del data["memory"]
    assert RoundReport.from_dict(data).memory == MemoryReport()
    for wrong in ({"host": "much"}, None, 5):
        with pytest.raises(ConfigurationError):
            RoundReport.from_dict({**data, "memory": wrong})


def test_a_flat_report_is_numbers_under_stable_names() -> None:
    """`flat()` is a dict of finite numbers; what a user logged is under "extra_"."""
    made = replace(report(), extra={"loss": 2.5}, seconds_transfer=0.25)
    flat = made.flat()
    assert flat["extra_loss"] == 2.5
    assert flat["seconds_transfer"] == 0.25
    assert flat["peers"] == len(made.members)
    assert flat["seconds_communication"] == made.seconds_communication
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in flat.values())
    assert {"epoch", "samples", "samples_per_second", "egress_bytes_per_hour"} <= flat.keys()
    assert flat["bytes_between_regions"] == made.bytes_between_regions


def test_bytes_between_regions_are_those_of_far_links() -> None:
    """Links to another continent or region count, those inside a region do not; the plan stands beside."""
    links = tuple(link(10**power, where) for power, where in enumerate(Distance))
    made = replace(report(), links=links, plan="two-level", bytes_by_stage={"results": 7})
    assert made.bytes_between_regions == 1000 + 10_000
    again = RoundReport.from_dict(json.loads(made.to_json()))
    assert (again.plan, again.bytes_by_stage) == ("two-level", {"results": 7})
    for wrong in ({"results": "7"}, ["results"], {"results": float("nan")}):
        with pytest.raises(ConfigurationError):
            RoundReport.from_dict({**made.to_dict(), "bytes_by_stage": wrong})
