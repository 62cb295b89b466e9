"""Published swarms, their replays' data, and what is said of them before they run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from p2pavg.bench.__main__ import main
from p2pavg.bench.scenario import replay as replay_module
from p2pavg.bench.scenario import verb
from p2pavg.bench.scenario.foretell import foretell
from p2pavg.bench.scenario.published import MODELS, SCENARIOS, TARGET
from p2pavg.bench.scenario.replay import Sleeper, Training, among
from p2pavg.bench.scenario.verb import peers, under_hivemind
from p2pavg.bench.workers import WorkerError
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


def test_a_hivemind_that_fails_is_told_beside_our_own_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A failure of the other system is a reason in the result, which is written before that system begins."""
    found, python = tmp_path / "found.json", tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    figures = {"measured_epoch_s": 31.0, "measured_communication_s": 5.0, "bytes_between_regions": 1e6}
    monkeypatch.setattr(verb, "replay", lambda *_: None)
    monkeypatch.setattr(verb, "replayed", lambda _: {**figures, "lab": {"void": False}})

    def fails(*_: object, **__: object) -> object:
        assert json.loads(found.read_text())["measured_epoch_s"] == 31.0
        raise WorkerError("worker 3 ended with code 1")

    monkeypatch.setattr(verb, "replay_of", fails)
    assert main(["scenario", "E-C", "--hivemind", str(tmp_path), "--json", str(found)]) == 0
    told = json.loads(found.read_text())
    assert told["hivemind_failed"] == "worker 3 ended with code 1"
    assert (told["measured_epoch_s"], told["hivemind_epoch_s"]) == (31.0, None)


def test_hivemind_epochs_are_those_that_all_peers_ended() -> None:
    """Peers that jump over an epoch, or end at different ones, leave those epochs that all have."""
    one = {"ends": {"1": 5.0, "2": 10.0, "3": 20.0, "4": 31.0, "5": 40.0}, "groups": {"3": [2], "4": [0]}}
    other = {"ends": {"2": 11.0, "3": 19.0, "4": 30.0}, "groups": {"2": [2], "3": [2], "4": [2]}}
    found = under_hivemind([one, other])
    assert found["hivemind_epoch_seconds"] == [9.0, 11.0]
    assert found["hivemind_averages_by_peers"] == {"0": 1, "2": 3}
    assert "they came to 5, 1" in under_hivemind([one, {"ends": {"1": 6.0}}])["hivemind_failed"]
    assert "came to 0, 0" in under_hivemind([{"ends": {}}, {"ends": {}}])["hivemind_failed"]


def test_a_virtual_environment_without_python_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before anything runs."""
    with pytest.raises(SystemExit):
        main(["scenario", "E-C", "--hivemind", str(tmp_path)])
    assert "name a virtual environment that has hivemind" in capsys.readouterr().err
