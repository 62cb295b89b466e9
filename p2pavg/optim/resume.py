"""The run's part of a state_dict(), from which a run goes on, and how it is loaded."""

from __future__ import annotations

import base64
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import torch
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.errors import ConfigurationError, StateError
from p2pavg.kinds import seen
from p2pavg.optim.updates.masters import Masters
from p2pavg.printable import printable
from p2pavg.rounds.state.files.checkpoints import About, Checkpoints
from p2pavg.rounds.state.files.saver import Saving
from p2pavg.rounds.state.generation_rows import from_rows, to_rows
from p2pavg.rounds.training import RunStart, StateSource, Training

log = logging.getLogger("p2pavg.optim")
CHECKPOINT_EPOCHS = 10
MARK = "p2pavg"
MALFORMED = "the run's part of this state_dict is malformed; load an older one"
SOFTWARE = f"torch {torch.__version__}"


class Stateful(Protocol):
    """An object of the user's that belongs to the run, such as a GradScaler or a sampler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Resumable:
    """The parts of a run that a state_dict() of the inner optimizer does not hold."""

    run_id: str
    schema: bytes
    scheduler: LRScheduler | None
    masters: Masters | None
    extras: Mapping[str, Stateful]
    built: str = ""  # what the state is of, in words

    def save(self, inner: dict[str, Any], training: Training) -> dict[str, Any]:
        """The inner optimizer's state_dict() with the run's part, and a mark in its first group that stays
        with an optimizer which loads it by itself.
        """
        first, *rest = inner["param_groups"]
        groups = [{**first, MARK: {"run": self.run_id, "epoch": training.standing[0]}}, *rest]
        return {**inner, "param_groups": groups, MARK: self._part(training)}

    def _part(self, training: Training) -> dict[str, Any]:
        """The run's part: numbers, texts, tensors, lists and dicts of them, and whatever the extras hold."""
        epoch, lineage = training.standing
        history = msgpack.packb(to_rows(training.history(), epoch))
        return {
            "epoch": epoch,
            "lineage": lineage.hex(),
            "history": base64.b64encode(history).decode(),
            "schema": self.schema.hex(),
            "built": self.built,
            "software": SOFTWARE,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "masters": None if self.masters is None else self.masters.copies(),
            "extras": {name: extra.state_dict() for name, extra in self.extras.items()},
        }

    def parted(self, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
        """Take apart what `save` made: the inner optimizer's state_dict(), and the run's part, if there is
        one. Raises StateError for what `save` never made.
        """
        if not _has_form(state_dict):
            raise StateError(
                "load_state_dict() takes what state_dict() of this optimizer returned, not "
                f"{seen(state_dict)}"
            )
        state = dict(state_dict)
        ours = state.pop(MARK, None)
        if not isinstance(ours, Mapping | None):
            raise StateError(MALFORMED)
        state["state"] = numbered(state["state"]) if "state" in state else {}  # without any, nothing is saved
        state["param_groups"] = [
            {key: value for key, value in group.items() if key != MARK} for group in state["param_groups"]
        ]
        return state, ours

    def is_present(self, saved: Mapping[str, Any] | None, training: Training) -> bool:
        """Whether the saved state is the one that this peer stands at."""
        if not isinstance(saved, Mapping):
            return False
        epoch, lineage = training.standing
        return saved.get("epoch") == epoch and saved.get("lineage") == lineage.hex()

    def check(self, saved: Mapping[str, Any] | None) -> None:
        """Raises StateError when the state is of another model or optimizer, or malformed; warns when it is
        of another torch, or of no run.
        """
        if saved is None:
            log.warning(
                "this state_dict is of an optimizer outside a run: the run's epoch, history, scheduler and "
                "extras are not in it, and go on from what the members have, or from the beginning"
            )
            return
        _start(saved)
        if saved.get("schema", self.schema.hex()) != self.schema.hex():
            theirs = saved.get("built")
            differ = isinstance(theirs, str) and theirs != self.built
            told = f" ({printable(str(theirs))}, and here {self.built})" if differ else ""
            raise StateError(
                f"this state_dict is of another model or optimizer{told}; build what was saved, in the same "
                "order"
            )
        if saved.get("software", SOFTWARE) != SOFTWARE:
            log.warning(
                "this state_dict was saved with %s, this is %s: further steps may differ in the last bits",
                saved["software"],
                SOFTWARE,
            )

    def load(self, saved: Mapping[str, Any] | None) -> RunStart | None:
        """Load the run's part, after the inner optimizer's. None: it does not tell where the run stood."""
        if self.masters is not None:
            self.masters.collect(None if saved is None else saved.get("masters"))
        if saved is None:
            return None
        if self.scheduler is not None and saved.get("scheduler") is not None:
            self.scheduler.load_state_dict(numbered(saved["scheduler"]))
        load_extras(self.extras, saved.get("extras", {}))
        return _start(saved)


def built_of(params: Sequence[torch.Tensor], described: Sequence[str]) -> str:
    """What a state is of, in words: parameters, class, and dtypes."""
    kinds = sorted({str(param.dtype).removeprefix("torch.") for param in params})
    return ", ".join([*described, " and ".join(kinds)])


def _start(saved: Mapping[str, Any]) -> RunStart:
    """Where the run stood. Raises StateError when that is malformed."""
    try:
        rows = msgpack.unpackb(base64.b64decode(saved["history"]))
        return RunStart(int(saved["epoch"]), bytes.fromhex(saved["lineage"]), from_rows(rows))
    except (ValueError, KeyError, TypeError, msgpack.UnpackException):
        raise StateError(MALFORMED) from None


def _has_form(state_dict: object) -> bool:
    """Whether it is a state_dict() of some optimizer."""
    if not isinstance(state_dict, Mapping):
        return False
    groups, state = state_dict.get("param_groups"), state_dict.get("state", {})
    return (
        isinstance(state, Mapping)
        and isinstance(groups, list | tuple)
        and all(isinstance(each, Mapping) and isinstance(each.get("params"), list | tuple) for each in groups)
    )


def check_fresh(optimizer: torch.optim.Optimizer, run_id: str) -> None:
    """Raises ConfigurationError when the optimizer holds a state of this run, whose epoch would be lost."""
    for group in optimizer.param_groups:
        mark = group.get(MARK)
        if isinstance(mark, Mapping) and mark.get("run") == run_id:
            raise ConfigurationError(
                f"this optimizer has loaded the state of epoch {mark.get('epoch')} of run {run_id!r}: wrap "
                "first, then load_state_dict() on the wrapper, so that the run goes on there"
            )
        group.pop(MARK, None)


def saving(
    directory: str | os.PathLike[str] | None, every: int | None, about: About, source: StateSource
) -> Saving | None:
    """The writing of checkpoints that the two options ask for. Raises ConfigurationError."""
    if directory is None:
        return None
    return Saving(Checkpoints(directory, about), every or CHECKPOINT_EPOCHS, source)


def numbered(value: Any) -> Any:
    """The mapping with numbers as keys again, of which torch.distributed.checkpoint makes texts."""
    if isinstance(value, Counter):
        return value
    if isinstance(value, Mapping):
        return {
            int(key) if isinstance(key, str) and key.isdecimal() else key: numbered(item)
            for key, item in value.items()
        }
    return [numbered(item) for item in value] if isinstance(value, list) else value


def load_extras(extras: Mapping[str, Stateful], saved: Mapping[str, Any]) -> None:
    """Load into each extra the state that was saved under its name, if there is one."""
    for name, extra in extras.items():
        if name in saved:
            if saved[name]:  # what keeps nothing may refuse to load it
                extra.load_state_dict(saved[name])
        else:
            log.warning("the state that is loaded has no %r among its extras", name)
