"""Agreement on a step beside the average: all peers use the leader's options, and compare parameters."""

from __future__ import annotations

import hashlib
import logging
import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import torch

from p2pavg.errors import ConfigurationError
from p2pavg.optim.sample import Sample
from p2pavg.optim.training_state import LOCAL_OPTIONS, TrainingState, parameters_of
from p2pavg.optim.updates import options
from p2pavg.optim.updates.options import Columns
from p2pavg.rounds.protocol.fields import MAX_NOTE

log = logging.getLogger("p2pavg.optim")

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)
"""Their bits do not depend on the number of threads."""


class Agreement:
    """Writes the note that a contribution carries, and heeds the note that comes with an average.

    A note holds the options of the parameter groups at this boundary, a digest of the parameters, and where
    they are computed. All peers step with the options of one note. What differs is told once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: TrainingState) -> None:
        self._optimizer = optimizer
        self._state = state
        self._where = _where(optimizer)
        self._said: Columns = {}
        self._digest = b""
        self._told: set[str] = set()
        self._drawn = b""
        self.knows_draw = False
        self._who = secrets.token_bytes(8)

    def drew(self, sums: Sequence[torch.Tensor]) -> None:
        """The sums after the first microbatch of this process: two peers that have the same bits there drew
        the same samples.
        """
        data = Sample(sums, 0).data
        self._drawn = hashlib.sha256(data).digest()[:16] if data.strip(b"\0") else b""
        self.knows_draw = True

    def say(self) -> bytes:
        """The note of this boundary. Raises ConfigurationError when groups have too many values."""
        self._said = options.columns(self._optimizer.param_groups)
        sample, changed = self._state.look()
        if changed:
            self.tell_of_change()
        self._digest = hashlib.sha256(sample).digest()[:16]
        told = {"options": self._said, "digest": self._digest, "where": self._where, "drawn": self._drawn}
        told["who"] = self._who
        note: bytes = msgpack.packb(told)
        if len(note) > MAX_NOTE:
            raise ConfigurationError(
                f"the options of {len(self._optimizer.param_groups)} parameter groups do not fit into "
                f"{MAX_NOTE >> 10} KiB; use fewer groups"
            )
        return note

    def say_nothing(self) -> None:
        """This boundary's contribution, the last one, carries no note: what was said before is no measure."""
        self._digest = b""

    @contextmanager
    def heeded(self, note: bytes, counted: bool) -> Iterator[None]:
        """Inside, the optimizer has the note's options. counted: the round holds what was said last.

        It steps with copies of its groups: with delayed updates the training loop may write to the groups at
        the same time. What it wrote since it handed in is for the coming step, and stays.
        """
        optimizer = self._optimizer
        live = optimizer.param_groups
        told = _parsed(note, len(live))
        if told is None:
            yield
            return
        known = self._said if counted and self._digest else options.columns(live)
        if counted and self._digest:
            self._compare(told)
        copies = [dict(group) for group in live]
        options.apply(copies, told["options"])
        optimizer.param_groups = copies
        try:
            yield
        finally:
            optimizer.param_groups = live
            options.keep(live, copies, known)

    def tell_of_change(self) -> None:
        """Tell that something changed parameters between two steps."""
        self._tell(
            "changed",
            "parameters were changed between two calls of step(): other peers do not do so, and with "
            "delay_updates or offload_optimizer it is lost; change them in a hook, "
            "inner.register_step_post_hook(…), or, for an evaluation, change them back before step()",
        )

    def mended(self) -> None:
        """Note that the parameters are the swarm's again: a later difference is a new one."""
        self._told.discard("digest")

    def _compare(self, told: Mapping[str, Any]) -> None:
        groups = len(self._optimizer.param_groups)
        for name, pair in sorted(options.differences(self._said, told["options"], groups).items()):
            self._tell(
                name,
                "%s is %r at this peer and %r at the leader, whose value all peers step with: set it by "
                "scheduler=, or as a function of opt.epoch, the same on all peers",
                name,
                *pair,
            )
        if self._drawn and told.get("drawn") == self._drawn and told.get("who") != self._who:
            self._tell(
                "drawn",
                "this peer and the leader began with the same samples: their first gradients are equal to "
                "the bit; shuffle with another seed on each peer, as by torch.Generator().manual_seed(n) for "
                "the sampler, after the model was built with a seed that all share",
            )
        if told["where"] == self._where and told["digest"] != self._digest:
            self._tell(
                "digest",
                "the parameters of this peer are not those of the leader, though both compute alike: what "
                "is not the optimizer changes them on one of the two only; do that on all peers, in a hook, "
                "inner.register_step_post_hook(…), and make them equal again with resync_epochs=",
            )

    def _tell(self, what: str, text: str, *values: object) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning(text, *values)


def _parsed(note: bytes, groups: int) -> dict[str, Any] | None:
    """The parts of a note; None: no peer of this version makes such a note."""
    try:
        told = msgpack.unpackb(note)
    except (ValueError, msgpack.UnpackException):
        return None
    if not isinstance(told, dict) or not all(isinstance(told.get(key), bytes) for key in ("digest", "where")):
        return None
    return told if options.well_formed(told.get("options"), groups) else None


def _where(optimizer: torch.optim.Optimizer) -> bytes:
    """8 bytes: equal on peers that make the same bits of the same step."""
    params = parameters_of(optimizer)
    devices = sorted({param.device for param in params}, key=str)
    facts: list[Any] = [torch.__version__, _processor(), torch.backends.cpu.get_cpu_capability()]
    facts += [torch.cuda.get_device_name(d) if d.type == "cuda" else d.type for d in devices]
    facts += sorted({str(param.dtype) for param in params})
    facts += [
        str(group.get(name)) for group in optimizer.param_groups for name in sorted(LOCAL_OPTIONS - NAMES)
    ]
    if not isinstance(optimizer, ELEMENTWISE):
        facts.append(torch.get_num_threads())
    return hashlib.sha256(msgpack.packb(facts)).digest()[:8]


NAMES = frozenset({"params", "param_names"})


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith("model name")), platform.machine())
