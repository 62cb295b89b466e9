"""Where a run goes on: what a state_dict() says of it beside the inner optimizer's, and how it is loaded."""

from __future__ import annotations

import base64
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import torch
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.errors import StateError
from p2pavg.optim.updates.masters import Masters
from p2pavg.rounds.state.checkpoints import About, Checkpoints
from p2pavg.rounds.state.generation_rows import from_rows, to_rows
from p2pavg.rounds.state.saver import Saving
from p2pavg.rounds.training import Start, Training

log = logging.getLogger("p2pavg.optim")
CHECKPOINT_EPOCHS = 10
SOFTWARE = f"torch {torch.__version__}"


class Stateful(Protocol):
    """Something of the user's that belongs to the run: a GradScaler, a sampler's position."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Resumable:
    """The parts of a run that a state_dict() of the inner optimizer does not hold."""

    schema: bytes
    scheduler: LRScheduler | None
    masters: Masters | None
    extras: Mapping[str, Stateful]

    def save(self, training: Training) -> dict[str, Any]:
        """Numbers, texts, tensors, and lists and dicts of them, whatever the extras hold."""
        epoch, lineage = training.standing
        history = msgpack.packb(to_rows(training.history(), epoch))
        return {
            "epoch": epoch,
            "lineage": lineage.hex(),
            "history": base64.b64encode(history).decode(),
            "schema": self.schema.hex(),
            "software": SOFTWARE,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "masters": None if self.masters is None else self.masters.copies(),
            "extras": {name: extra.state_dict() for name, extra in self.extras.items()},
        }

    def check(self, saved: Mapping[str, Any] | None) -> None:
        """Raises StateError when it was saved with another model or optimizer; says so of another torch."""
        if saved is None:
            return
        if saved.get("schema", self.schema.hex()) != self.schema.hex():
            raise StateError(
                "this state_dict is of another model or optimizer; build what was saved, in the same order"
            )
        if saved.get("software", SOFTWARE) != SOFTWARE:
            log.warning(
                "this state_dict was saved with %s, this is %s: further steps may differ in the last bits",
                saved["software"],
                SOFTWARE,
            )

    def load(self, saved: Mapping[str, Any] | None) -> Start | None:
        """After the inner optimizer's part was loaded. None: nothing tells where the run stood."""
        if self.masters is not None:
            self.masters.collect(None if saved is None else saved.get("masters"))
        if saved is None:
            return None
        if self.scheduler is not None and saved.get("scheduler") is not None:
            self.scheduler.load_state_dict(numbered(saved["scheduler"]))
        load_extras(self.extras, saved.get("extras", {}))
        if "history" not in saved:
            return None
        try:
            rows = msgpack.unpackb(base64.b64decode(saved["history"]))
            return Start(int(saved["epoch"]), bytes.fromhex(saved["lineage"]), from_rows(rows))
        except (ValueError, KeyError, TypeError, msgpack.UnpackException):
            raise StateError("the run's part of this state_dict is malformed; load an older one") from None


def saving(directory: str | os.PathLike[str] | None, every: int | None, about: About) -> Saving | None:
    """What checkpoint_dir and checkpoint_epochs ask for. Raises ConfigurationError."""
    return None if directory is None else Saving(Checkpoints(directory, about), every or CHECKPOINT_EPOCHS)


def numbered(value: Any) -> Any:
    """With numbers as keys again: torch.distributed.checkpoint makes texts of them."""
    if isinstance(value, Counter):
        return value
    if isinstance(value, Mapping):
        return {
            int(key) if isinstance(key, str) and key.isdecimal() else key: numbered(item)
            for key, item in value.items()
        }
    return [numbered(item) for item in value] if isinstance(value, list) else value


def load_extras(extras: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Give each extra what was saved under its name, if anything was."""
    for name, extra in extras.items():
        if name in saved:
            if saved[name]:  # what keeps nothing may refuse to load it
                extra.load_state_dict(saved[name])
        else:
            log.warning("the state that is loaded has no %r among its extras", name)
