"""Saver: what keeps a checkpoint from being written is told once, and it tries again."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from p2pavg.errors import StateError
from p2pavg.rounds.session import Session
from p2pavg.rounds.state.files.checkpoints import About, Checkpoints
from p2pavg.rounds.state.files.saver import Saver, Saving


class Source:
    """A state that cannot be copied."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0

    def snapshot(self) -> Any:
        self.asked += 1
        raise self.error

    def load(self, meta: Any, buffers: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            AttributeError("'int' object has no\nattribute 'state_dict'"),
            "AttributeError: 'int' object has no",
        ),
        (StateError("mend the state_dict() of the scheduler"), "mend the state_dict() of the scheduler"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("x" * 5000), "xxx…"),
    ],
    ids=["users", "ours", "memory", "long"],
)
async def test_whatever_the_copy_raises_is_told_once(
    error: Exception, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each due epoch tries again, one warning of one line says why, and no task is left with an exception."""
    source = Source(error)
    saving = Saving(Checkpoints(tmp_path, About("r", b"s" * 32, "SGD", "torch")), 1, source)
    live = Session(None, 1, lambda: None)  # type: ignore[arg-type]
    live.standing = live.next_standing = (1, b"\x01")
    left: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
    with ThreadPoolExecutor(1) as background:
        saver = Saver(saving, live, lambda: (), background)
        for epoch in (1, 2, 3):
            saver.applied(epoch)
            await saver.close()
    del saver
    assert source.asked == 3
    assert not left
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("no checkpoint can be written to ")
    assert told in warning
    assert "\n" not in warning
    assert len(warning) < 500
