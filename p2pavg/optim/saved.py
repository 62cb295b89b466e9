"""The state of an optimizer in a run: saved and loaded, and shown to evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from p2pavg.errors import ClosedError
from p2pavg.optim.member import Entering, RunWrapper
from p2pavg.optim.outer.local import LocalSteps
from p2pavg.optim.resume import MARK
from p2pavg.optim.updates import options
from p2pavg.optim.updates.built import KINDS, Built
from p2pavg.rounds.training import RunStart


class Saved(RunWrapper):
    """The part of a CollaborativeOptimizer that saves, loads and shows its state."""

    def state_dict(self) -> dict[str, Any]:
        """The whole state of the run, together with the model's `state_dict()`.

        It holds the inner optimizer's state_dict and, under "p2pavg", where the run stands, with its
        scheduler and extras. The run goes on from there though no peer lives any more. What this peer has
        accumulated since the last step is not part of it.
        """
        self._update.settle()
        return self._resumable.save(self.inner.state_dict(), self._training)

    def stands_at(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether it is the state that this peer stands at: loading it changes the groups' options alone."""
        with suppress(Exception):  # it was raised before, from step()
            self._update.settle()
        whole = not self._update.lost and self._entering is None
        ours = state_dict.get(MARK) if isinstance(state_dict, Mapping) else None
        return whole and self._resumable.is_present(ours, self._training)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, and enter the run anew from there. This peer's accumulated samples are dropped.

        Load the model's state_dict() first. Where the swarm is further by then, its state replaces the
        checkpoint's. A checkpoint of the state that this peer stands at changes nothing but the options of
        the parameter groups.

        Args:
            state_dict: what `state_dict()` returned, here or at another peer of the run. That of an
                optimizer of the same class outside a run is taken, too, with a warning: the run's epoch and
                history are not in it.

        Interrupted, it is loaded whole by the next `step()`, or by another call.

        Raises:
            StateError: when it is of another model or optimizer, or malformed.
        """
        state, ours = self._resumable.parted(state_dict)
        options.check_saved(self.inner, state, plain=ours is None)
        self._resumable.check(ours)
        if self.stands_at(state_dict):
            options.take(self.inner, state)
            return
        built = Built(self.inner, self._options.scheduler)
        before, known = None, self._known()
        with suppress(ClosedError):  # of a peer that has failed, the checkpoint alone is left
            before = self._standing()
        self._entering = Entering(None, 0, known, state_dict)
        self._leave()
        try:
            start = self._load(state, ours)
        except Exception:  # the run goes on from where it stood
            self._entering = Entering(before, 0, known)
            raise
        self._flat.clear()
        self._entering = Entering(start, 0, known)
        self._join(start, known)
        self._entering = None
        built.tell_replaced(KINDS)

    def _load(self, state: dict[str, Any], ours: Mapping[str, Any] | None) -> RunStart | None:
        """Load the two parts of a state_dict(). Returns where the run stood."""
        with nullcontext() if self._reference is None else self._reference.kept_if_raises():
            self.inner.load_state_dict(state)
            self._mirror_inner()
            if self._reference is not None:
                self._reference.read()  # what the model holds, unless the run's part tells better
            start = self._resumable.load(ours)
            self._buffers.read_agreed()
            return start

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Around an evaluation with other weights in the place of the run's, so that no peer gets a copy of
        them. A round behind local steps, or a step behind them, is waited for before.

        Put the run's weights back before the block ends; `step()` must wait until then.
        """
        self._update.settle()
        with self._state.swapped():
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block, the model holds the swarm's parameters, for evaluations and for saving.

        With outer steps they are θ_ref, without what this peer moved since the last outer step; otherwise
        they are the parameters as they stand. `step()` must wait until the block has ended. A round behind
        local steps is waited for before.
        """
        if not isinstance(self._flat, LocalSteps):
            yield
            return
        self._update.settle()
        with self._state.swapped(), self._flat.shown():
            yield
