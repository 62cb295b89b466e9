"""The checker of `bench.world`: it finds what is wrong in logs, and knows nothing of what wrote them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.world.faults import KINDS, schedule
from bench.world.model import SAMPLES
from bench.world_check.__main__ import efficiency, hashes, stalls, void
from bench.world_check.data import SETTLES, count_indices, index_of
from bench.world_check.logs import Run
from p2pavg.data.permutation import EvenBlocks

ROOT = Path(__file__).parents[3]
SEED, BLOCK, BATCH = 5, 32, 4
AVERAGES = SETTLES + 4
PLACES = ("one", "two")


class Logs:
    """What two peers would have written that each took one step of BATCH samples between averages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = [
            {
                "t": "run", "at": 0.0, "seed": SEED, "block": BLOCK, "batch": BATCH, "pace_s": 1.0,
                "places": [{"name": name, "slowness": 1.0} for name in PLACES],
            },
            *({"t": "born", "at": 0.0, "who": f"{name}-0"} for name in PLACES),
            {"t": "finish", "at": AVERAGES * 1.0},
        ]  # fmt: skip
        self.logs: dict[str, list[dict[str, Any]]] = {name: [{"t": "up", "at": 0.0}] for name in PLACES}
        self.reports: dict[str, list[dict[str, Any]]] = {name: [] for name in PLACES}
        for epoch in range(AVERAGES):
            for rank, name in enumerate(PLACES):
                self._average(epoch, rank, name)
        for name in PLACES:
            self.logs[name].append({"t": "end", "at": AVERAGES * 1.0, "sha256": "ab" * 32})

    def _average(self, epoch: int, rank: int, name: str) -> None:
        first = 2 * BATCH * epoch
        drawn = range(first + rank * BATCH, first + (rank + 1) * BATCH)
        indices = [index_of(0, at, SEED, BLOCK) for at in drawn]
        at, sha = epoch + 1.0, f"{epoch + 1:064x}"
        self.logs[name] += [
            {"t": "took", "at": at, "indices": list(indices)},
            {"t": "step", "at": at, "seconds": 0.1, "epoch": epoch + 1, "indices": indices},
            {"t": "theta", "at": at, "epoch": epoch + 1, "sha256": sha},
        ]
        self.reports[name].append(
            {
                "epoch": epoch,
                "lineage": f"{epoch:08x}",
                "samples": 2 * BATCH,
                "passes": (first + 2 * BATCH) / SAMPLES,
                "members": [{"peer": peer, "weight": 4.0, "samples": BATCH} for peer in PLACES],
                "consumed": [[0, first, first + 2 * BATCH]],
                "discarded_why": [],
                "discarded_samples": [],
                "extra": {"theta_sha256_low": float(int(sha[:12], 16))},
            }
        )

    def read(self) -> Run:
        files = {"events": self.events}
        files |= {f"{name}-0": self.logs[name] for name in PLACES}
        files |= {f"{name}-0.reports": self.reports[name] for name in PLACES}
        for name, lines in files.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.folder / f"{name}.jsonl").write_text(text + '{"half a li')
        return Run.read(self.folder)


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def test_a_sound_run_is_found_sound(logs: Logs) -> None:
    """Equal bits, each index once, all steps kept."""
    run = logs.read()
    assert hashes(run)["divergences"] == 0
    assert hashes(run)["hashes"] == 2 * AVERAGES
    counted = count_indices(run)
    assert counted["indices_averaged"] == 2 * BATCH * AVERAGES
    assert counted["indices_settled"] > 0
    assert not any(counted[f"indices_{name}"] for name in ("doubled", "lost", "untrained"))
    assert counted["averages_misnamed"] == 0
    assert efficiency(run)["step_efficiency"] == 1.0


def test_what_a_beginning_far_apart_jumped_over_is_not_lost(logs: Logs) -> None:
    """The first average also took positions near the end of the pass."""
    for reports in logs.reports.values():
        reports[0]["consumed"] = [[0, SAMPLES - 2 * BATCH, SAMPLES]]
        reports[1]["consumed"].append([0, 0, 2 * BATCH])
    counted = count_indices(logs.read())
    assert counted["indices_lost"] == 0
    assert 0 < counted["indices_settled"] < SAMPLES // 2


def test_other_bits_are_found(logs: Logs) -> None:
    """One peer's parameters after one average."""
    theta = [event for event in logs.logs["two"] if event["t"] == "theta"][3]
    theta["sha256"] = theta["sha256"][:-1] + "f"
    assert hashes(logs.read())["divergences"] == 1


def test_a_report_with_another_hash_than_the_script_made_is_found(logs: Logs) -> None:
    """What p2pavg says of the parameters is compared with what the script hashed."""
    logs.reports["one"][2]["extra"]["theta_sha256_low"] += 1
    assert hashes(logs.read())["hashes_misreported"] == 1


def _everywhere(logs: Logs, epoch: int, consumed: list[list[int]]) -> None:
    for name in PLACES:
        logs.reports[name][epoch]["consumed"] = consumed


def test_an_index_in_two_averages_is_found(logs: Logs) -> None:
    """The second average holds a position of the first, instead of its own: one twice, one never."""
    _everywhere(logs, 1, [[0, 0, 1], [0, 2 * BATCH + 1, 4 * BATCH]])
    counted = count_indices(logs.read())
    assert (counted["indices_doubled"], counted["indices_lost"], counted["indices_untrained"]) == (1, 1, 1)


def test_an_average_with_fewer_indices_than_samples_is_found(logs: Logs) -> None:
    """It names one position less."""
    _everywhere(logs, 1, [[0, 2 * BATCH, 4 * BATCH - 1]])
    counted = count_indices(logs.read())
    assert (counted["averages_misnamed"], counted["indices_lost"]) == (1, 1)


def test_an_index_that_nobody_trained_on_is_found(logs: Logs) -> None:
    """A script drew something else than the average names."""
    step = next(event for event in logs.logs["one"] if event["t"] == "took")
    step["indices"][0] = (step["indices"][0] + 1) % SAMPLES
    assert count_indices(logs.read())["indices_untrained"] == 1


def test_a_stall_is_told_by_its_fault(logs: Logs) -> None:
    """A long step() of a peer counts for the other's fault, and not for its own."""
    for name in PLACES:
        step = [event for event in logs.logs[name] if event["t"] == "step"][5]
        step["seconds"] = 3.1
    logs.events.append({"t": "fault", "fault": "stop", "who": "one-0", "at": 4.0, "until": 5.5})
    found = stalls(logs.read())
    assert found["longest_stall_s_by_fault"] == {"stop": 3.0}


def test_positions_stand_for_the_samplers_indices() -> None:
    """The checker's own permutation is that which the sampler draws by."""
    blocks = EvenBlocks(SAMPLES, BLOCK, SEED)
    for position in range(0, 3 * SAMPLES, 97):
        assert index_of(*divmod(position, SAMPLES), SEED, BLOCK) == blocks.index(position)


def test_the_checker_shares_no_code_with_the_product() -> None:
    """All of it is imported without anything of p2pavg."""
    code = "import sys, bench.world_check.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = {name.split(".")[0] for name in done.stdout.split()}
    assert "torch" in modules
    assert "p2pavg" not in modules


def test_a_schedule_of_faults_is_drawn_by_its_seed() -> None:
    """The same for the same seed, another for another; every kind comes before one comes again."""
    planned = schedule(7, 2700.0, 30.0)
    assert planned == schedule(7, 2700.0, 30.0) != schedule(8, 2700.0, 30.0)
    assert len(planned) >= 80
    assert {fault.kind for fault in planned[: len(KINDS)]} == set(KINDS)


@pytest.mark.parametrize(("took_s", "is_void"), [(1.0, False), (1.2, True)])
def test_trainers_that_wait_for_a_processor_void_the_run(
    tmp_path: Path, took_s: float, is_void: bool
) -> None:
    """Steps that take longer than asked for, whoever is to blame, say nothing of seconds; a stall is none."""
    logs = Logs(tmp_path)
    logs.events.append({"t": "lab", "at": AVERAGES * 1.0, "void_reason": None})
    at = AVERAGES * 1.0
    for seconds in (1.0, took_s, took_s, 9.0):
        at += seconds
        step = {"t": "step", "at": at, "seconds": 0.1, "epoch": AVERAGES, "indices": []}
        logs.logs["one"].append(step)
    assert bool(void(logs.read())) == is_void
