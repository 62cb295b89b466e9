"""`bench plans`: what is predicted of each plan over a lab topology."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from p2pavg import codecs
from p2pavg.bench import __main__ as bench
from p2pavg.bench.plans.predicting import names_of_groups, predict
from p2pavg.bench.plans.verb import COLUMNS, table
from p2pavg.lab import topology
from p2pavg.plan import MOST_FLAT
from p2pavg.report.prices import PriceTable
from p2pavg.rounds.loop.planning import Planner
from p2pavg.rounds.protocol.roles import PlanMember

NUMEL = 1_000_000


@pytest.fixture
def clouds() -> topology.Topology:
    return topology.load("clouds-4")


def test_plans_of_a_network(clouds: topology.Topology) -> None:
    """Over four regions of two peers the least crosses with two levels, 6/12 of flat; an all-gather of a
    64th sends every contribution to the six elsewhere.
    """
    peers = len(clouds.hosts)
    rows = {row.name: row for row in predict(clouds, peers, NUMEL, codecs.get("fp16"))}
    assert list(rows) == ["flat", "two-level", "all-gather"]
    regions = peers // 2
    vector = codecs.get("fp16").encoded_size(NUMEL)
    assert rows["flat"].crossing == pytest.approx(2 * (peers - 2) * vector, rel=1e-3)
    assert rows["two-level"].crossing == pytest.approx(2 * (regions - 1) * vector, rel=1e-3)
    few = codecs.get("sparse-64").encoded_size(NUMEL)
    assert rows["all-gather"].crossing == pytest.approx(peers * (peers - 2) * few)
    assert all(row.seconds is not None and row.seconds > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("lab", "flat"),
    [
        ("uplinks", 3 * 200 / (100 / 8)),  # three vectors of 200 MB leave a site
        ("flowcaps", 200 / 3 / (15 / 8)),  # each pair of two sites carries the parts of both ends
    ],
)
def test_what_several_hosts_share_is_predicted_as_such(lab: str, flat: float) -> None:
    """Three members behind each of two uplinks, or nine pairs with a rate of their own: two levels take a
    third of a flat round's time.
    """
    rows = {row.name: row.seconds for row in predict(topology.load(lab), 6, 10**8, codecs.get("fp16"))}
    assert rows["flat"] == pytest.approx(flat, rel=0.02)
    assert rows["two-level"] == pytest.approx(flat / 3, rel=0.02)


def test_dollars_follow_the_prices(clouds: topology.Topology, tmp_path: Path) -> None:
    """With a price table there is a cheapest plan, and it costs no more than the others."""
    table = tmp_path / "prices.toml"
    table.write_text("[gb]\nworld = 0.08\ncontinent = 0.08\nregion = 0.01\n")
    prices = PriceTable.load(table)
    rows = {row.name: row for row in predict(clouds, 8, NUMEL, codecs.get("fp16"), prices)}
    assert 0 < rows["cheapest"].dollars <= rows["two-level"].dollars < rows["flat"].dollars


def test_the_verb_predicts_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    """--predict-only tells every plan as JSON; a number of peers that the network lacks is an error."""
    assert bench.main(["plans", "--lab", "clouds-4", "--predict-only", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes_between_regions"] < told["bytes_between_regions_flat"]
    assert [row["plan"] for row in told["plans"]] == ["flat", "two-level", "all-gather"]
    assert bench.main(["plans", "--lab", "clouds-4", "--peers", "99"]) != 0


def test_a_crowd_in_a_flat_plan_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """More members than a flat plan is tested with are told in one warning, and as many in none."""
    planner = Planner(lambda: NUMEL, lambda numel: 2 * numel)
    members = [PlanMember(bytes([rank]) * 20, True, 0.0, 0.0) for rank in range(MOST_FLAT + 1)]
    with caplog.at_level(logging.WARNING):
        planner(members[:-1])
        assert not caplog.records
        planner(members)
        planner(members)
    assert [record.getMessage()[:30] for record in caplog.records] == ["33 peers average with a flat p"]


def test_plans_stand_beside_each_other_in_columns() -> None:
    """Predicted and measured in one row for each plan; columns that nobody filled are left out."""
    row = {
        "plan": "two-level",
        "predicted_s": 1.25,
        "predicted_bytes_between_regions": 24e6,
        "predicted_dollars": 0.0,
    }
    ran = {
        "transfer_s": 1.5,
        "seconds_median": 1.75,
        "measured_bytes_between_regions": 24.5e6,
        "bit_identical": True,
    }
    assert table([row]) == ["     plan  predicted s  predicted MB", "two-level         1.25         24.00"]
    titles, beside = table([row | ran])
    assert [title in titles for title in COLUMNS] == [title != "predicted $" for title in COLUMNS]
    assert beside.split() == ["two-level", "1.25", "1.50", "1.75", "24.00", "24.50", "equal"]
    assert "UNEQUAL" in table([row | ran | {"bit_identical": False}])[1]


def test_hosts_of_one_region_have_one_name(clouds: topology.Topology) -> None:
    """So that real peers form the regions, and pay the prices, by which the cheapest plan is predicted."""
    names = names_of_groups(clouds, 8)
    assert names == [clouds.hosts[index - index % 2] for index in range(8)]
