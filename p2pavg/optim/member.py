"""An optimizer's place in its run: it enters, leaves, and enters again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from p2pavg import kinds
from p2pavg.errors import ClosedError, P2PAvgError
from p2pavg.membership.table.address import format_host_port
from p2pavg.optim import live
from p2pavg.optim.gradients.flat import FlatGradients
from p2pavg.optim.interrupts import Interrupts
from p2pavg.optim.outer.local import LocalSteps
from p2pavg.optim.outer.reference import Reference
from p2pavg.optim.outer.settings import outer_of
from p2pavg.optim.process import sigterm
from p2pavg.optim.resume import Resumable
from p2pavg.optim.sampling import Sampling
from p2pavg.optim.training_options import TrainingOptions
from p2pavg.optim.training_state import FiledState, TrainingState
from p2pavg.optim.updates.buffers import AveragedBuffers
from p2pavg.optim.updates.built import Built
from p2pavg.optim.updates.resync import Resync
from p2pavg.optim.updates.update import HALF_CHANGED, Update
from p2pavg.optim.wrapper import Wrapper
from p2pavg.peer.peer import Peer
from p2pavg.peer.words.notice import tell
from p2pavg.rounds.session import Session
from p2pavg.rounds.state.files.saver import Saving
from p2pavg.rounds.training import RunStart, TrainingSpec

log = logging.getLogger("p2pavg.optim")


@dataclass(frozen=True)
class Entering:
    """How a peer that left enters the run again, kept until it has: an interrupt may come in between."""

    start: RunStart | None
    dropped: int  # samples that it had accumulated
    known: list[str] | None  # addresses of members
    loading: dict[str, Any] | None = None  # a state_dict() that may be loaded in part


class RunWrapper(Wrapper):
    """The part of a CollaborativeOptimizer that enters the run and leaves it."""

    run_id: str
    peer: Peer
    _training: Session
    _update: Update
    _flat: FlatGradients | LocalSteps
    _state: TrainingState
    _sampling: Sampling
    _frozen: str
    _leave_notice_s: float
    _build_peer: Callable[..., Peer]
    _options: TrainingOptions
    _buffers: AveragedBuffers
    _saving: Saving | None
    _filed: FiledState
    _reference: Reference | None
    _resumable: Resumable
    _resync: Resync
    _described: list[str]
    _outline: list[str]
    _make_update: Callable[[Session], Update]

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._closed = False
        self._entering: Entering | None = None
        self.began = False  # it has trained, so that leaving may have something to hand over
        self._held: list[live.Closeable] = []
        self._interrupts = Interrupts()

    def owns(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether this optimizer trains one of these parameters now."""
        mine = {id(param) for param in self._flat.params}
        return not self._closed and any(id(param) in mine for param in params)

    def _begin(self) -> None:
        """Enter the run for the first time, from the newest checkpoint where there is one."""
        built = Built(self.inner, self._options.scheduler)
        self._join(self._load_checkpoint())
        built.tell_replaced()

    def _join(self, start: RunStart | None, known: Sequence[str] | None = None) -> None:
        """Enter the run, and load the swarm's state when it has gone on without us.

        known: addresses of members, instead of those that the user named.
        """
        self.peer = self._build_peer() if known is None else self._build_peer(initial_peers=known)
        self._held[:] = [self._flat, self.peer]
        self.peer.start()
        peer, claimed = self.peer, weakref.WeakMethod(self._claimed)  # a sampler keeps no optimizer alive
        self._sampling.enter(peer.peer_id, lambda: peer.peers, lambda: (claimed() or _nothing)())
        self._training = self.peer.training(self._specify(start))
        self._state.settle(self._training.epoch)
        self._update = self._make_update(self._training)
        self._update.join()
        if self._reference is not None:
            self._reference.restore_unsent()  # unless the swarm's state came on top
        self._aim()

    def _aim(self) -> None:
        """The samples of an epoch <- those of the peers that train now, where they depend on them."""
        if self._options.follows_peers:
            self.peer.set_target(self._options.target_with(1 + self.peer.wait_for_peers(0)))

    def _load_checkpoint(self) -> RunStart | None:
        """Load the newest checkpoint of the directory. None: there is none."""
        found = None if self._saving is None else self._saving.checkpoints.newest()
        if found is None:
            return None
        self._filed.load(found.state.meta, found.state.buffers)
        self._buffers.restore()
        self._flat.clear()
        if self._masters is not None:
            self._masters.round()
            self._masters.publish()
        tell("resumed at epoch %d from %s", found.state.epoch, found.path.parent)
        return RunStart(found.state.epoch, found.state.lineage, found.history)

    def _specify(self, start: RunStart | None) -> TrainingSpec:
        outer = outer_of(self._options.outer)
        return TrainingSpec(
            target_batch_size=self._options.target or 1,
            lockstep=self._options.lockstep,
            numel=self._flat.layout.numel,
            schema=self._resumable.schema,
            initial_digest=self._state.initial_digest(),
            compression=self._options.compression,
            feedback=1 if outer is None else outer.fragments,
            state=self._state,
            inherits=True,
            saving=self._saving,
            state_upload_bps=self._options.state_upload_bps,
            egress_usd_per_hour=self._options.max_egress_usd_per_hour,
            start=start,
            describe=self._described,
            outline=self._outline,
            device=_device_name(self._flat.params[0].device),
            exact=partial(_exact, self._flat, self._resync),
            terms=self._terms(),
            drawing=self._sampling.draws,
            allocate=self._flat.allocate,
            keeps_results=outer is not None,
        )

    def _terms(self) -> dict[str, int | str]:
        """The terms that all peers of a run share, beside the model and the codec."""
        options = self._options
        scheduler, outer = options.scheduler, outer_of(options.outer)
        return {
            "resync_epochs": self._resync.every or 0,
            "buffers": options.buffers,
            "max_grad_norm": str(options.max_grad_norm),
            "scheduler": type(scheduler).__name__ if scheduler is not None else "None",
            "outer": "None" if outer is None else outer.terms(),
            "sampler": self._sampling.terms,
            "frozen parameters (a digest)": self._frozen,
            **options.followed_terms(),
        }

    def _claimed(self) -> None:
        """The sampler draws what it has no lease for."""
        if hasattr(self, "_training"):
            self._training.claimed()

    def _addresses(self) -> list[str] | None:
        """Where the other members are reached; None: none is known."""
        found: list[str] = []
        with suppress(ClosedError):  # this peer has left
            for info in self.peer.peers.values():
                if not info.client_only:
                    found += [format_host_port(host, port) for host, port in info.addresses]
        return found or None

    def _known(self) -> list[str] | None:
        """The same, or what was known when this peer left to enter again."""
        return self._addresses() or (None if self._entering is None else self._entering.known)

    def _standing(self) -> RunStart | None:
        """Where the run stands; after this peer has left to enter again, where it is to go on."""
        try:
            return RunStart(*self._training.standing, self._training.history())
        except ClosedError:
            if self._entering is None:
                raise
            return self._entering.start

    def _leave(self) -> None:
        """Leave the run, to enter it anew."""
        self.peer.close()
        self._update.close()

    def _enter_again(self) -> None:
        """Enter the run anew after an exception left parameters half changed, with the swarm's state if it is
        further.
        """
        before = self._entering
        if before is not None and before.loading is not None:
            self.load_state_dict(before.loading)
            return
        if before is None:
            log.warning(
                "something was raised while the parameters of epoch %d changed: this peer enters the run "
                "again, and takes the swarm's state where others are further",
                self._update.epoch,
            )
        start, known = self._standing(), self._known()
        dropped = self._training.unaveraged() if before is None else before.dropped
        self._entering = Entering(start, dropped, known)
        self._flat.clear()
        self._leave()
        self._join(start, known)
        self._entering = None
        if dropped:
            self._training.refused(dropped, HALF_CHANGED)

    def call_off(self) -> None:
        """Have `step()` wait for others no longer than for a round that counts on what it brought, as this
        peer is about to leave: call `close` then. Any thread may call this.
        """
        self._training.call_off()

    def close(self, notice_s: float | None = None) -> None:
        """Leave the swarm. The model's parameters become ordinary ones, without gradients.

        What this peer accumulated is handed over to a peer that stays; the last report names as discarded
        what could not be.

        Args:
            notice_s: seconds that this may take; None: `leave_notice_s`; 0: nothing is handed over.
        """
        if notice_s is not None:
            kinds.check_number("notice_s", notice_s, 0.0, kinds.MOST_SECONDS)
        if self._closed:
            return
        self._closed = True
        sigterm.forget(self)
        with ExitStack() as ending:  # from the last to the first, whatever one of them raises
            ending.callback(self._interrupts.release)
            ending.callback(self._held.clear)
            ending.callback(self._flat.close)
            if self._masters is not None:
                ending.callback(self._masters.restore)
            if hasattr(self, "_update"):
                ending.callback(self._update.close)
            if hasattr(self, "peer"):
                ending.callback(self.peer.close)
            if hasattr(self, "_update"):
                self._hand_over(self._leave_notice_s if notice_s is None else notice_s)

    def _hand_over(self, notice_s: float) -> None:
        if self._flat.pending:
            with suppress(Exception):  # it was raised before, from step()
                self._update.settle()
            with suppress(ClosedError):  # an interrupt came while it left, to enter again
                self._training.discard("closed between backward() and step()")
            self._sampling.dropped()
            self._flat.clear()
        if notice_s > 0:
            try:
                self._update.leave(notice_s)
            except P2PAvgError:
                pass
            except Exception as error:
                log.warning(
                    "the last average before this peer left raised %s: %s", type(error).__name__, error
                )

    def __enter__(self) -> Self:
        self._interrupts.hold(lambda: self.began, self._leave_notice_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, KeyboardInterrupt | SystemExit) or self._interrupts.waits
        hurry = isinstance(error, SystemExit) and sigterm.asked()  # the notice is over, or SIGTERM came twice
        whole = error is None or (stopped and not self._interrupts.inside and not hurry)
        self.close(None if whole else 0.0)  # else it may have struck in the middle of a step
        self._interrupts.release()


def _exact(gradients: FlatGradients | LocalSteps, resync: Resync, epoch: int) -> int:
    return gradients.layout.numel + resync.size if resync.due(epoch) else 0


def _nothing() -> None:
    """For who is gone."""


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
