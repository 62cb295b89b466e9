"""Several optimizers in one process, as the cells of a notebook leave them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from p2pavg.optim import live


class Optimizer:
    """Open in a run."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    def owns(self, params: Iterable[torch.Tensor]) -> bool:
        return False


class Held:
    """What it holds open."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("run_id", "schema", "is_open", "warned"),
    [
        ("cells", b"other", True, True),
        ("cells", b"same", True, False),  # peers of one run may live in one process
        ("another", b"other", True, False),
        ("cells", b"other", False, False),
    ],
)
def test_an_earlier_cells_optimizer_with_another_model_is_told_of(
    run_id: str, schema: bytes, is_open: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says what to close; what is closed, of another run, or of the same model is none of it."""
    held: list[live.Closeable] = [Held()]
    earlier = [Optimizer(run_id), Optimizer(run_id)]
    for each in earlier:
        live.enter(each, held, schema)
    if not is_open:
        held.clear()
    live.warn_of_another_model("cells", b"same")
    held.clear()
    said = [record.getMessage() for record in caplog.records]
    assert len([words for words in said if "close() it, as opt.close()" in words]) == warned
