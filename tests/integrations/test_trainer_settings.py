"""Settings of Trainer that people use: what they mean in a swarm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from p2pavg import CollaborativeOptimizer, RoundReport
from p2pavg.errors import ConfigurationError
from tests.integrations.tools import NORM, QUIET, ForTrainer, inner_of, rows, trainer_args

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.swarm


class Seen(ForTrainer):
    """Keeps the batches of which it was asked for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.batches.append(x)
        return super().forward(x, labels)


def train(
    folder: Path, data: Any, take: Any = None, target: int = 8, **settings: Any
) -> tuple[Seen, list[RoundReport], Any]:
    """A peer that trains alone: its model, its reports, and the Trainer. take: changes what trainer_kwargs()
    made.
    """
    from transformers import Trainer

    from p2pavg.hf import trainer_kwargs

    model, reports = Seen(), []
    inner, schedule = inner_of(model)
    with CollaborativeOptimizer(
        inner,
        "settings",
        target,
        initial_peers=[],
        scheduler=schedule,
        max_grad_norm=NORM,
        on_round=reports.append,
        **QUIET,
    ) as opt:
        kwargs = trainer_kwargs(opt, trainer_args(folder, **settings))
        if take is not None:
            take(kwargs)
        trainer = Trainer(model, train_dataset=data, eval_dataset=rows(0, 1)[:4], **kwargs)
        trainer.train()
        return model, reports, trainer


class Stream(IterableDataset[Any]):
    """Eleven samples, of which nobody knows how many they are."""

    def __iter__(self) -> Iterator[Any]:
        yield from rows(0, 1)[:11]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stream_that_ends_begins_again(accumulate: int, tmp_path: Path) -> None:
    """A pass over a stream ends where it has no whole step more: no batch is smaller, no step has fewer, and
    the next pass begins at once.
    """
    model, reports, trainer = train(tmp_path, Stream(), gradient_accumulation_steps=accumulate)
    assert trainer.state.global_step == 8
    assert [report.samples for report in reports] == [8] * 8
    assert {len(batch) for batch in model.batches} == {4}
    assert len(model.batches) == 16
    assert torch.equal(model.batches[0], model.batches[2])  # two whole batches a pass


def test_an_evaluation_waits_for_eval_delay(tmp_path: Path) -> None:
    """eval_delay= is in epochs of the swarm, as eval_steps= is."""
    _, _, trainer = train(tmp_path, rows(0, 1), eval_strategy="steps", eval_steps=1, eval_delay=5)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_runtime" in entry] == [5, 6, 7, 8]


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_peers_that_group_by_length_draw_other_orders(strategy: str, tmp_path: Path) -> None:
    """These samplers have the same seed in all processes, which Trainer shares out between ranks; each peer
    has its own.
    """
    data = [row | {"input_ids": [0] * 3} for row in rows(0, 1)]
    first, second = (
        train(tmp_path, data, train_sampling_strategy=strategy, max_steps=2)[0] for _ in range(2)
    )
    assert not torch.equal(torch.cat(first.batches), torch.cat(second.batches))


@pytest.mark.parametrize(
    ("left_out", "words"),
    [("callbacks", "callbacks="), ("optimizers", "another args= or optimizers="), ("args", "another args=")],
)
def test_a_part_of_the_arguments_left_out_is_named(left_out: str, words: str, tmp_path: Path) -> None:
    """Trainer with callbacks, optimizers or args of somebody else's is stopped before its first step."""
    others = {"callbacks": [], "optimizers": (None, None), "args": trainer_args(tmp_path, max_grad_norm=0.0)}
    with pytest.raises(ConfigurationError, match=words):
        train(tmp_path, rows(0, 1), lambda kwargs: kwargs.update({left_out: others[left_out]}))
