"""What the checker of `bench.world` says of a prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.world.faults import Planned
from bench.world.foresee import joins
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


def with_joins(logs: Logs, more: float) -> dict[str, Any]:
    """What is said of a run for which two joins of 5,000 bytes were foretold, and which routed more."""
    joins = {"share_of_time": 0.2, "bytes_each": 5000.0, "bytes_of_a_result": 300.0}
    each = SAID["bytes_per_epoch"] | {"wire": 1250.0, "joins": 50.0}
    (logs.folder / "predict.json").write_text(json.dumps(SAID | {"bytes_per_epoch": each, "joins": joins}))
    asked = next(event for event in logs.events if event["t"] == "predicted")
    asked["joins"] = 2
    logs.events[-1]["paths"][0]["sent_bytes"] += more
    return prediction(logs.folder, logs.read())


def test_joins_that_were_foretold_are_expected(logs: Logs) -> None:
    """Their bytes among all bytes, and not in the row of averages; who lives has joined, so that what joins
    take of the time is not asked of it.
    """
    found = with_joins(logs, 2 * 5000)
    assert found["bytes_of_averages_of_predicted"] == pytest.approx(1.0)
    assert found["all_bytes_of_predicted"] == pytest.approx(1.0)
    assert found["came_of_predicted_for_the_living"] == pytest.approx(0.8, rel=0.01)


def test_a_result_for_whoever_missed_the_average_is_expected(logs: Logs) -> None:
    """One average of one peer alone, whose result the other got later."""
    for report in (logs.reports[name][5] for name in PLACES):
        report["members"][1]["voter"] = False
    found = with_joins(logs, 2 * 5000 - 1000 + 300)
    assert found["all_bytes_of_predicted"] == pytest.approx(1.0)


def test_nobody_is_expected_to_send_while_it_is_stopped(logs: Logs) -> None:
    """Links to it carry nothing then: 200 bytes a second of two peers."""
    logs.events.append({"t": "fault", "fault": "stop", "who": "one-0", "at": 2.0, "until": 5.0})
    logs.events[-2:] = reversed(logs.events[-2:])
    found = with_joins(logs, 2 * 5000 - 3 * 200)
    assert found["all_bytes_of_predicted"] == pytest.approx(1.0)


def test_faults_that_end_with_a_download_are_joins() -> None:
    """Processes that begin anew, and absences of more averages than members keep the results of."""
    planned = [
        Planned(100.0, kind, 0.5, seconds)
        for kind, seconds in (
            ("kill", 10.0),
            ("spot", 180.0),
            ("sleep", 120.0),
            ("stop", 60.0),
            ("disk", 120.0),
        )
    ]
    assert joins(planned, 28.8) == 3
    assert joins(planned, 31.0) == 2
