"""What the checker of `bench.world` says of a prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.world_check.foretold import PAYLOAD, prediction
from tests.unit.bench.test_world_check import AVERAGES, PLACES, Logs

SAID = {
    "samples_per_second": 8.0,
    "epoch_s": 1.0,
    "peers": 2,
    "dollars_per_million": 2.0,
    "bytes_per_epoch": {"averages": 1000.0 * PAYLOAD, "wire": 1200.0},
}


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    """Two peers, each of which sends 600 bytes an epoch, as foretold; all is routed."""
    found = Logs(tmp_path)
    for name in PLACES:
        for report in found.reports[name]:
            report["peer"], report["wire_bytes_sent"] = name, 600
            for member in report["members"]:
                member["voter"] = True
    paths = [{"src": PLACES[0], "dst": PLACES[1], "sent_bytes": 1200 * AVERAGES}]
    found.events += [{"t": "predicted", "at": 1.0, "epoch": 1}, {"t": "lab", "at": 1.0, "paths": paths}]
    (tmp_path / "predict.json").write_text(json.dumps(SAID))
    return found


def test_bytes_as_foretold_are_told_so(logs: Logs) -> None:
    """Of averages, and of all that was routed."""
    found = prediction(logs.folder, logs.read())
    assert found["bytes_of_averages_of_predicted"] == pytest.approx(1.0)
    assert found["all_bytes_of_predicted"] == pytest.approx(1.0)
    assert found["dollars_per_million_came"] == 0.0


def test_what_a_newcomer_downloads_counts_among_all_bytes_alone(logs: Logs) -> None:
    """Averages during which a peer came are left out of the row of averages."""
    for name in PLACES:
        logs.reports[name][-2]["wire_bytes_sent"] = 10**6
    logs.events.append({"t": "born", "at": AVERAGES - 1.5, "who": "two-1"})
    logs.events[-2]["paths"][0]["sent_bytes"] += 10**6
    (logs.folder / "two-1.jsonl").write_text('{"t": "up", "at": %s}\n' % (AVERAGES - 1.5))
    found = prediction(logs.folder, logs.read())
    assert found["averages_without_a_newcomer"] < AVERAGES - 1
    assert found["bytes_of_averages_of_predicted"] == pytest.approx(1.0)
    assert found["all_bytes_of_predicted"] > 1.5


def test_fewer_members_are_expected_to_send_less(logs: Logs) -> None:
    """Where two of three took part: half of the averages' bytes, and a third of what links carry beside."""
    (logs.folder / "predict.json").write_text(
        json.dumps(SAID | {"peers": 3, "bytes_per_epoch": {"averages": 2000 * PAYLOAD, "wire": 2600.0}})
    )
    found = prediction(logs.folder, logs.read())
    assert found["bytes_of_averages_of_predicted"] == pytest.approx(1.0)
