"""The series of runs under faults that counts each sample: its verdicts, and what a resume leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from bench.exactly_once import COUNTS, HARM, verdict
from p2pavg.bench.chaos.passes import Data
from p2pavg.bench.chaos.sharing import RESUMES, SharingSwarm


def row(**changed: int) -> dict[str, Any]:
    return {**dict.fromkeys((*COUNTS, *HARM), 0), "resumes": RESUMES, **changed}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "exact"),
        ({"indices_missing": 1}, "BROKEN"),
        ({"indices_doubled": 1}, "BROKEN"),
        ({"averages_misnamed": 1}, "BROKEN"),
        ({"divergences": 1}, "BROKEN"),
        ({"crashes": 1}, "BROKEN"),
        ({"indices_untold": 4}, "BROKEN"),
        ({"indices_untold": 4, "averages_unseen": 1}, "exact"),
        ({"hangs": 1, "indices_missing": 9}, "void: a peer said nothing for a minute"),
        ({"hangs": 1, "indices_missing": 9, "indices_doubled": 1}, "BROKEN"),
        ({"resumes": 1}, "void: 1 resumes"),
    ],
)
def test_only_whole_runs_count_and_none_hides_a_sample(changed: dict[str, int], said: str) -> None:
    """What is missing or doubled breaks the promise; a run that ended early shows nothing."""
    assert verdict(row(**changed)) == said


def test_faults_end_before_others_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that were cut when all processes were killed are mended for those that go on."""
    data = Data(length=100, passes=3, block=16, seed=0, batch=4)
    options: dict[str, Any] = {"peers": 4, "steps": 10, "epoch_seconds": 0.5, "topology": None}
    swarm = SharingSwarm(data, **options, seed=0, encrypted=False)
    told: list[str] = []
    monkeypatch.setattr(swarm, "_start", lambda: told.append("starts"))
    monkeypatch.setattr(swarm, "_pump", lambda seconds: None)
    swarm._undo.append((1e9, lambda: told.append("mends")))
    swarm._resume()
    assert told == ["mends", "starts"]
