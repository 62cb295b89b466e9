"""`report.flat()` in each logger that the pages name, with the real package, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from p2pavg import CollaborativeOptimizer
from p2pavg.report import RoundReport
from tests.integrations.processes import net
from tests.integrations.tools import QUIET

pytestmark = pytest.mark.swarm

EPOCHS = 3


def train(on_round: Any) -> list[RoundReport]:
    """A few epochs of one peer, each logged."""
    reports: list[RoundReport] = []
    model = net()

    def told(report: RoundReport) -> None:
        reports.append(report)
        on_round(report)

    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with CollaborativeOptimizer(inner, "logged", "step", 4, initial_peers=[], on_round=told, **QUIET) as opt:
        while opt.epoch < EPOCHS:
            model(torch.randn(4, 8)).square().mean().backward()
            opt.step()
    assert len(reports) == EPOCHS
    return reports


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    """Each name of flat() is a scalar with a value per epoch."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    reports = train(lambda report: [writer.add_scalar(*item, report.epoch) for item in report.flat().items()])
    writer.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set(reports[0].flat())
    assert [event.value for event in found.Scalars("samples")] == [report.samples for report in reports]


def test_wandb_takes_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.log(report.flat(), step=report.epoch) is kept in the run's summary."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="swarm", mode="offline", dir=str(tmp_path))
    reports = train(lambda report: run.log(report.flat(), step=report.epoch))
    run.log({"over": 1}, step=EPOCHS)  # a step's row is complete when the next one begins
    assert run.summary["samples"] == reports[-1].samples
    assert run.summary["epoch"] == reports[-1].epoch
    run.finish()


def test_mlflow_takes_it_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlflow.log_metrics(report.flat(), step=report.epoch) is read back from a store on disk."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}")
    mlflow.set_experiment("swarm")
    with mlflow.start_run() as run:
        name = run.info.run_id
        reports = train(lambda report: mlflow.log_metrics(report.flat(), step=report.epoch, run_id=name))
    kept = mlflow.get_run(name).data.metrics
    assert kept["samples"] == reports[-1].samples
    assert set(kept) == set(reports[0].flat())
