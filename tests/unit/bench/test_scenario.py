"""Published swarms, their replays' data, and what is said of them before they run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from p2pavg.bench.__main__ import main
from p2pavg.bench.scenario import replay as replay_module
from p2pavg.bench.scenario.foretell import foretell
from p2pavg.bench.scenario.published import MODELS, SCENARIOS, TARGET
from p2pavg.bench.scenario.replay import Sleeper, Training, among
from p2pavg.bench.scenario.verb import peers
from p2pavg.errors import P2PAvgError
from p2pavg.lab.topology import load
from tests.forecast.swarms import report

GOLDEN = json.loads((Path(__file__).parents[2] / "forecast" / "golden.json").read_text())
IDS = {
    ("C-4", "language"): "C-4/RXLM/32768",
    ("C-8", "vision"): "C-8/CONV/32768",
    ("E-C", "language"): "E-C-4/RXLM/32768",
    ("E-C", "vision"): "E-C-4/CONV/32768",
}


@pytest.mark.parametrize(("name", "model"), IDS)
def test_a_scenario_is_the_swarm_that_was_measured(name: str, model: str) -> None:
    """Devices, places, speeds, sizes and epochs are those of the golden set."""
    run = next(run for run in GOLDEN["runs"] if run["id"] == IDS[name, model])
    sleepers, scenario = peers(SCENARIOS[name], model), SCENARIOS[name]
    assert sorted(scenario.devices.values()) == sorted(peer["device"] for peer in run["peers"])
    assert sum(sleeper.sps for sleeper in sleepers) == pytest.approx(run["local_sps"], rel=0.01)
    assert scenario.printed[model] == pytest.approx(run["epoch_s"], rel=0.001)
    assert MODELS[model].values == GOLDEN["models"][run["model"]]["parameters"]
    assert run["target_batch_size"] == TARGET
    network = among(scenario.network(), tuple(scenario.devices))
    place = {"us": "gc-us", "eu": "gc-eu", "asia": "gc-asia", "aus": "gc-aus"}
    place |= {"campus": "campus-eu", "west": "lambda-us-west"}
    rates = {frozenset((link["a"], link["b"])): link for link in GOLDEN["links"]}
    for one in sleepers:
        for other in sleepers:
            if one is not other:
                known = rates[frozenset((place[one.region], place[other.region]))]
                told = network.rate_mbps(one.host, other.host)
                far = one.region != other.region
                factor = 1e3 if far else 100  # far pairs have ten streams' worth at a tenth of the scale
                assert told == pytest.approx(factor * known["single_stream_gbps"], rel=0.06)
                assert network.rtt_ms(one.host, other.host) == pytest.approx(known["rtt_ms"], rel=0.1)


def test_the_scale_changes_no_prediction_by_much() -> None:
    """A tenth of bytes and rates takes as long, but for the round trips until a rate is reached."""
    topology = load("clouds-4")
    sleepers = [Sleeper(host, host[:-1], 100.0, 50) for host in topology.hosts]
    whole = foretell(topology, sleepers, Training(32_768, 56_000_000))
    tenth = foretell(topology.scaled(0.1), sleepers, Training(32_768, 5_600_000))
    assert tenth.calculation == whole.calculation == pytest.approx(40.96)
    assert (
        0 <= whole.communication - tenth.communication < math.log2(10) * whole.rtt
    )  # windows double in slow start
    assert whole.transfer.plan == "two-level"


def test_a_prediction_needs_no_lab(capsys: pytest.CaptureFixture[str]) -> None:
    """--predict-only prints what scripts rely on, without running anything."""
    assert main(["scenario", "E-C", "--predict-only", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted_epoch_s"] > found["predicted_calculation_s"] == pytest.approx(26.2, abs=0.2)
    assert "campus1" in found["binds"]
    assert found["measured_epoch_s"] is None
    assert found["printed_hivemind_epoch_s"] == 170.81
    assert main(["scenario", "E-C", "--predict-only", "--target-batch-size", "4096"]) == 0
    assert "published" not in capsys.readouterr().out


def test_a_replay_without_a_whole_round_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no round had all peers, one sentence says so instead of figures."""

    def train(
        argv: object, *_: object, environment: dict[str, str]
    ) -> tuple[list[object], dict[str, object]]:
        told = [report(epoch, 0, 2) for epoch in range(4)]
        Path(environment["P2PAVG_REPORTS"]).write_text("".join(one.to_json() + "\n" for one in told))
        return [], {"void": False}

    monkeypatch.setattr(replay_module, "replay_of", train)
    topology = load("clouds-4")
    sleepers = [Sleeper(host, host[:-1], 100.0, 50) for host in topology.hosts]
    with pytest.raises(P2PAvgError, match="no round after the warm-up had all 8 peers"):
        replay_module.replay(topology, sleepers, Training(800, 1000), 2)
    kept = replay_module.replay(topology, sleepers[:2], Training(800, 1000), 2, tmp_path / "kept.jsonl")
    assert [one.epoch for one in kept.first] == [2, 3]
    assert kept.samples_per_second == pytest.approx(200 / 8.03, rel=0.01)
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 4
