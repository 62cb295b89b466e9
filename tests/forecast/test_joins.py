"""Newcomers in predictions: the bytes of their states, and the time that these take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from p2pavg.allreduce.choosing import Topology
from p2pavg.allreduce.partition import chunk_elements
from p2pavg.errors import ConfigurationError
from p2pavg.forecast.evidence import from_reports
from p2pavg.forecast.joins import ACKNOWLEDGED, Newcomers, with_newcomers
from p2pavg.forecast.laws import (
    BYTES,
    FRAME_BYTES,
    PAYLOAD,
    EpochForecast,
    LinkProfile,
    Overheads,
    PeerProfile,
    Swarm,
    Workload,
    epoch,
    transfer,
    value_bytes,
)
from p2pavg.forecast.predict import _change, _Terms
from tests.forecast.swarms import reports
from tests.forecast.test_forecast_cli import figures, run

JOB = Workload(1000.0, 1e6)
STATE = 12e6


def three() -> Swarm:
    """Two near each other, and one far from both over thinner links."""
    members = [PeerProfile(name, region, 100.0) for name, region in (("a", "eu"), ("b", "eu"), ("c", "us"))]
    near, far = LinkProfile(0.01, 1e8), LinkProfile(0.1, 2e7)
    return Swarm(members, {(i, j): near if i + j == 1 else far for i in range(3) for j in range(3) if i != j})


def foretold(swarm: Swarm, each_hour: float) -> tuple[EpochForecast, EpochForecast, float]:
    """Without newcomers, with them, and the IP bytes that these add in an hour."""
    plain = epoch(JOB, swarm)
    found, _ = with_newcomers(JOB, swarm, Newcomers(each_hour, STATE), epoch)
    added = sum(found.wire.values()) - sum(plain.wire.values())
    return plain, found, added * 3600 / found.total


def test_each_join_is_a_state_and_the_results_of_its_time() -> None:
    """With TCP's and IP's headers, and the acknowledgements that go back."""
    swarm = three()
    _, joins = with_newcomers(JOB, swarm, Newcomers(2.0, STATE), epoch)
    assert joins is not None
    plain, found, hourly = foretold(swarm, 2.0)
    results = joins.seconds / found.total * JOB.values * BYTES["fp16"]
    each = (STATE + results) / PAYLOAD * (1 + ACKNOWLEDGED)
    assert joins.nbytes == pytest.approx(each)
    assert hourly == pytest.approx(3 * 2.0 * each)
    assert joins.an_epoch == pytest.approx(hourly * found.total / 3600)
    assert found.total > plain.total


def test_the_nearest_give_the_state() -> None:
    """A peer with a near neighbour has it from there, the far one from both alike."""
    plain, found, _ = foretold(three(), 1.0)
    more = {pair: found.wire[pair] - plain.wire[pair] for pair in plain.wire}
    assert more[0, 1] == pytest.approx(more[1, 0])
    assert more[0, 2] == pytest.approx(more[1, 2])
    assert more[0, 2] == pytest.approx(more[0, 1] / 2, rel=0.02)
    assert more[2, 0] < 0.05 * more[0, 2]  # acknowledgements


def test_who_downloads_does_not_calculate() -> None:
    """The calculation is longer by the share of the time that downloads take; more joins than there is time
    for are refused.
    """
    swarm = three()
    plain, found, _ = foretold(swarm, 60.0)
    seconds = (2 * STATE / PAYLOAD / 1e8 + 2 * STATE / PAYLOAD / 2e7) / 4
    assert found.calculation == pytest.approx(plain.calculation / (1 - 60 * seconds / 3600))
    slow = replace(swarm, members=[replace(member, up=1e5) for member in swarm.members])
    with pytest.raises(ConfigurationError, match="nobody would ever calculate"):
        with_newcomers(JOB, slow, Newcomers(60.0, STATE), epoch)


def test_nobody_gives_a_state_to_a_peer_alone() -> None:
    """One peer, and a swarm to which nobody comes, are foretold as without the option."""
    alone = three().only([0])
    assert with_newcomers(JOB, alone, Newcomers(5.0, STATE), epoch) == (epoch(JOB, alone), None)
    assert with_newcomers(JOB, three(), Newcomers(), epoch) == (epoch(JOB, three()), None)


def test_heartbeats_are_not_taken_for_averages() -> None:
    """Where reports tell what each stage sent, the vector is as large as that, and all else of a link's bytes
    grows with time.
    """
    plain = from_reports(reports(8, 3))
    job = replace(plain.job, values=1e6)
    sent = sum(transfer(job, plain.swarm).sent.values()) / 3
    chunk = chunk_elements([round(1e6 / 3)] * 3)
    encoded = sent * (1 - FRAME_BYTES / chunk / value_bytes("fp16", chunk))
    told = [
        replace(
            one,
            bytes_sent=round(1.5 * sent),
            bytes_by_stage={"contributions": round(encoded / 2), "results": round(encoded / 2)},
            links=tuple(replace(link, wire_bytes_sent=round(sent)) for link in one.links),
        )
        for one in reports(8, 3)
    ]
    found = from_reports(told)
    assert found.job.values == pytest.approx(1e6, rel=1e-4)
    beside = (2 * sent - sent / PAYLOAD) / (2 * told[0].seconds_total)
    assert found.overheads.beside == pytest.approx(beside, rel=0.01)


def test_joins_are_told_with_their_share_of_the_traffic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--joins-per-hour changes bytes, dollars and classes of traffic, and scripts are told what one costs."""
    path, prices = tmp_path / "reports.jsonl", tmp_path / "prices.toml"
    prices.write_text("[gb]\nworld = 0.5\nregion = 0.25\n")
    path.write_text("".join(replace(one, state_bytes=400_000_000).to_json() + "\n" for one in reports(9)))
    words = ("predict", "--from", str(path), "--prices", str(prices))
    plain, found = figures(capsys, *words), figures(capsys, *words, "--joins-per-hour", "6")
    joins = found["joins"]
    assert "joins" not in plain
    assert (joins["per_hour"], joins["state_bytes"]) == (6.0, 400_000_000)
    often = 6 * found["epoch_s"] / 3600
    assert found["bytes_per_epoch"]["joins"] == pytest.approx(often * joins["bytes_each"])
    more = found["bytes_per_epoch"]["wire"] - plain["bytes_per_epoch"]["wire"]
    assert more == pytest.approx(found["bytes_per_epoch"]["joins"])
    assert found["dollars_per_million"] > plain["dollars_per_million"]
    assert found["traffic_per_million"]["world"]["bytes"] > plain["traffic_per_million"]["world"]["bytes"]
    assert found["samples_per_second"] < plain["samples_per_second"]
    code, out, _ = run(capsys, *words, "--joins-per-hour", "6")
    assert code == 0
    assert "6 joins an hour: each downloads " in out
    code, _, err = run(capsys, *words, "--joins-per-hour", "6", "--without", "eu")
    assert code == 2
    assert "give newcomers the state" in err


def test_a_region_without_which_states_take_all_time_is_kept() -> None:
    """The links that are left may be too thin for as many joins: that is no failure of the prediction."""
    often, swarm = Newcomers(7000.0, STATE), three()
    terms = _Terms(Overheads(), Topology.FLAT, None, often)
    apart = replace(swarm, members=[replace(swarm.members[0], region="uk"), *swarm.members[1:]])
    found = _change(terms.epoch(JOB, apart), JOB, apart, "uk", terms)
    assert found == {"samples_per_second": -1.0, "dollars_per_million": None}


def test_joins_need_reports_that_tell_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a newcomer downloads is not guessed."""
    path = tmp_path / "reports.jsonl"
    path.write_text("".join(one.to_json() + "\n" for one in reports(9)))
    for number, said in (
        ("6", "no report tells how large the state is"),
        ("0", "above 0"),
        ("nan", "above 0"),
    ):
        code, _, err = run(capsys, "predict", "--from", str(path), "--joins-per-hour", number)
        assert code == 2
        assert said in err
    assert "joins" not in json.loads(path.read_text().splitlines()[0])
