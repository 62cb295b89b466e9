"""CollaborativeOptimizer: a torch optimizer whose step is taken by the whole swarm together."""

from __future__ import annotations

import importlib
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from p2pavg.errors import ClosedError, ConfigurationError
from p2pavg.membership import PeerInfo
from p2pavg.optim import arguments, frozen, live
from p2pavg.optim.accumulating import Accumulating
from p2pavg.optim.gradients.flat import FlatGradients
from p2pavg.optim.gradients.microbatches import Microbatches
from p2pavg.optim.gradients.path import open_cuda_path
from p2pavg.optim.gradients.uneven import RetainedSums
from p2pavg.optim.modules import owning_modules, persistent_buffers, places_of
from p2pavg.optim.outer.advice import Advisor
from p2pavg.optim.outer.fragments import fragments_of
from p2pavg.optim.outer.local import LocalSteps
from p2pavg.optim.outer.reference import KeptReference, Reference
from p2pavg.optim.outer.settings import outer_of
from p2pavg.optim.outer.update import Moves, OuterUpdate
from p2pavg.optim.outside import Outside
from p2pavg.optim.process import company, sigterm, spot
from p2pavg.optim.resume import SOFTWARE, Resumable, built_of, saving
from p2pavg.optim.sampling import Sampling
from p2pavg.optim.training_options import TrainingOptions
from p2pavg.optim.training_state import FiledState, TrainingState, outline, parameters_of, schema
from p2pavg.optim.updates.agreement import Agreement
from p2pavg.optim.updates.behind import BehindUpdate
from p2pavg.optim.updates.buffers import AveragedBuffers
from p2pavg.optim.updates.masters import Masters
from p2pavg.optim.updates.overshoot import Overshoot
from p2pavg.optim.updates.resync import Resync
from p2pavg.optim.updates.schedule import Schedule
from p2pavg.optim.updates.update import FOUND_INF, HALF_CHANGED, Shared, Update, WaitingUpdate
from p2pavg.peer.peer import Peer
from p2pavg.peer.signature import check_arguments, takes
from p2pavg.report import RoundReport
from p2pavg.rounds.session import Session
from p2pavg.rounds.state.files.checkpoints import About

log = logging.getLogger("p2pavg.optim")
OUTER, SAMPLER = "p2pavg.outer", "p2pavg.sampler"  # beside the user's extras


class CollaborativeOptimizer(Accumulating):
    """Trains one model on many machines: peers accumulate samples, average gradients, and step together.

    `step()` counts this peer's samples. When the swarm has `target_batch_size` of them, it averages the
    gradient over all samples of all peers, steps the inner optimizer and the scheduler once, and the next
    epoch begins; before that it touches no network and does the same little work whatever the model's size.
    Constructing it changes no weight; a peer that joins a running swarm loads the swarm's state.

    Args:
        optimizer: any first-order torch optimizer, already built. The `.grad` of its parameters belongs to
            this class from then on.
        run_id: the run's name; peers of one run_id train together.
        target_batch_size: samples per epoch, over the whole swarm; or "step", for lockstep: one `step()` of
            each peer present makes an epoch, weighted by its samples, and whoever is late or joins counts in
            the next; None: with Outer(sync_every=), which says it.
        batch_size_per_step: samples per `backward()`, in lockstep per `step()`; None: taken from the first
            `step(batch_size=n)`.
        initial_peers: "host:port" of any members; empty: start a new swarm; None: those in
            `P2PAVG_INITIAL_PEERS`.
        scheduler: an LRScheduler on `optimizer`, stepped once per epoch.
        compression: how gradients travel: "none", "fp16", "bf16", "int8", "int4" or a `p2pavg.Codec`; the
            same on all peers. With "int8" and "int4" each contribution also carries what rounding took from
            the one before.
        streams: TCP streams per link, 1 to 128, or "auto": as many as transfers call for.
        delay_updates: average and step behind the next epoch's computation, with gradients one epoch old.
        delay_warmup_epochs: epochs at the start without delay.
        offload_optimizer: keep float32 master parameters, and the optimizer's state and step, on the CPU;
            with outer steps, every local step too.
        loss_reduction: "mean" or "sum", as in the loss whose `backward()` is called.
        max_grad_norm: clip the averaged gradient to this norm, as one would clip the gradient of one big
            batch; with outer steps, each local gradient. None: no clipping.
        grad_dtype: the dtype in which gradients of float16 and bfloat16 parameters accumulate; None: their
            own.
        resync_epochs: every so many epochs parameters and optimizer state are averaged too, uncompressed, so
            that peers on unlike hardware, which drift apart by rounding, are equal again. The report's
            `extra["drift"]` tells how far apart they were. None: only gradients are averaged.
        buffers: how floating-point buffers of the model (BatchNorm statistics) become equal after each epoch:
            "average" over all peers' samples, or those of the round's "leader".
        max_upload_mbps: most Mb/s that this peer sends; None: no limit.
        plan: how the bytes of a round travel, when this peer leads it: "flat", "two-level" (within regions
            first), "cheapest", or "auto", whatever is predicted to be faster.
        prices: the path of a price table, as `p2pavg monitor --prices` takes; "cheapest" needs it.
        max_state_upload_mbps: most Mb/s of these that newcomers get; None: no limit of their own.
        max_relay_mbps: most Mb/s that this peer carries for peers that have no way to each other; 0: none;
            None: a quarter of the upload that it has measured.
        max_egress_usd_per_hour: the most that gradients of all peers together may cost in an hour, by
            `prices`, when this peer leads. Where rounds would cost more, they come less often, and an epoch
            counts more samples than `target_batch_size`. None: no limit.
        checkpoint_dir: a folder for checkpoints. The last three are kept; training begins with the newest
            that is there, unless the swarm is further. None: as `P2PAVG_CHECKPOINTS` says, or else none.
        checkpoint_epochs: epochs from one checkpoint to the next; None: 10.
        leave_notice_s: seconds that handing over what was accumulated may take, after `close()` or SIGTERM.
        spot_notices: None: where the firmware names AWS, Google Cloud or Azure, their metadata service is
        asked
            every two seconds whether they take this machine, which then has the effect of SIGTERM; False: it
            is not asked.
        listen: "host:port" to bind. With the default the next free port is taken; port 0 is any free one.
        announce: the "host:port" at which others reach this peer, or several, best first, where that is not
            what they see of it.
        map_port: ask the gateway of this network to lead a port here (PCP, NAT-PMP, and UPnP with
            `p2pavg[upnp]`), and give it back at the end. None: in closed runs.
        client_only: others cannot open connections to this peer.
        region: where this peer is, for people and plans, such as "eu-west-1"; None: as `P2PAVG_REGION` says.
        name: how people call this peer in tables and in the monitor; None: as `P2PAVG_NAME` says, or else the
            host's name.
        credentials: file or text of the run's credentials; None: what `P2PAVG_CREDENTIALS` names. With
            neither the run is open.
        metrics: "host:port" at which this peer serves metrics for Prometheus, such as "127.0.0.1:9100", to
            whoever reaches that port; None: nowhere.
        on_round: called with the `RoundReport` of each round, on a background thread. What a peer lost by
            leaving is in `last_report`, after `close()`.
        model: the module whose buffers belong to the state; None: found through the parameters it owns.
        extras: by name, what else belongs to the run and has a `state_dict()`: a GradScaler, a sampler.
        sampler: a `p2pavg.SwarmSampler` or `p2pavg.SwarmShards` from which this peer's loader draws: each
            sample of a pass is in exactly one average. None: each peer draws its own.
        node_group: a torch.distributed group whose ranks are one peer: see `p2pavg.node`.
        outer: a `p2pavg.Outer`, "diloco" or "sparse": every `step()` steps the inner optimizer at once, on
        this peer's
            gradient alone, and an epoch averages how far the peers have moved. None: an epoch averages
            gradients.

    Raises:
        ConfigurationError: for arguments that cannot work.
        CredentialError: for credentials that are malformed, or of another run.
        UnreachableError: when none of the initial peers answers.
        IncompatiblePeerError: when the swarm trains another model, or on other terms.
    """

    def __new__(cls, *args: Any, node_group: object = None, **options: Any) -> Any:
        """With a node_group a `p2pavg.node.optimizer.NodeOptimizer`, whose first rank builds one of these."""
        if node_group is None:
            return super().__new__(cls)
        check_arguments(cls, inspect.signature(TrainingOptions), args, options)
        first = ("optimizer", "run_id", "target_batch_size", "batch_size_per_step")
        options.update(zip(first, args, strict=False))
        node = importlib.import_module("p2pavg.node")  # a floor above, and torch.distributed with it
        return node.optimizer_of(options.pop("optimizer"), node_group, **options)

    @takes(TrainingOptions)
    def __init__(self, options: TrainingOptions) -> None:
        together = company.wanted()
        optimizer, scheduler, extras = options.optimizer, options.scheduler, dict(options.extras or {})
        params = parameters_of(optimizer)
        live.check_free(params)
        self._sampling = Sampling(options.sampler)
        self._sampling.claim(self)
        super().__init__(optimizer)
        self._options, self._lockstep = options, options.lockstep
        self.run_id = options.run_id
        self._leave_notice_s = options.leave_notice_s
        self._outer = outer_of(options.outer)
        self._warned = False
        # Each local step stands for itself, so outer steps need no weights of microbatches.
        reduction = "sum" if self._outer is not None else options.loss_reduction
        self._microbatches = Microbatches(options.target, options.batch_size_per_step, reduction)
        self.stepped = False
        self.watches_gradients = True  # False: for a tool that measures norms by clipping to infinity
        self._agreement: Agreement | None = None
        behind = options.delay_updates or options.offload_optimizer
        self._outside = Outside(scheduler is not None, options.lockstep, behind)
        modules = owning_modules(params) if options.model is None else [options.model]
        arguments.check_modules(modules)
        self._frozen = frozen.digest(modules, params)
        me = weakref.ref(self)  # who drops this optimizer shall not be kept from it by its own parts
        self._buffers = AveragedBuffers(
            lambda: persistent_buffers(modules),
            (lambda: _leads(me())) if options.buffers == "leader" else None,
        )
        self._reference, self._advisor = None, None
        if self._outer is None:
            path = open_cuda_path(options.compression)
            self._flat = FlatGradients(params, options.grad_dtype, self._buffers.size, path)
            self._flat.before_backward = self._scale.follow
            self._retained = RetainedSums(lambda: self._flat.sums)
            if options.delay_updates or options.offload_optimizer:
                self._masters = Masters(optimizer, options.offload_optimizer)
        else:
            sizes = [param.numel() for param in params]
            arguments.check_dense(self._outer.density, self._buffers.size)
            fragments = fragments_of(sizes, self._outer.fragments, self._buffers.size)
            if options.offload_optimizer:
                self._masters = Masters(optimizer, offload=True)
            self._reference = Reference(params, fragments, self._outer, self._masters)
            self._advisor = Advisor(self._outer.overlap)
            self._flat = LocalSteps(
                optimizer, self._reference, self._outer, scheduler, options.max_grad_norm, self._masters
            )
            # The scaler unscales the gradients of each local step; of several microbatches that is refused.
            self._step_supports_amp_scaling = self._outer.accumulate > 1
        self._mirror_inner()
        self._resync = Resync(optimizer, options.resync_epochs)
        self._places = places_of(self._flat.params, modules)
        if options.sampler is not None:
            extras[SAMPLER] = options.sampler
        kept, whole, filed, values = extras, dict(extras), dict(extras), None
        if self._reference is not None:
            kept[OUTER] = KeptReference(self._reference)
            whole[OUTER] = KeptReference(self._reference, whole=True, unsent=True)
            filed[OUTER] = KeptReference(self._reference, unsent=True)
            values = partial(self._reference.views, self._reference.theta)
        self._state = TrainingState(optimizer, scheduler, self._buffers.agreed, kept, values)
        self._described = _describe(optimizer)
        self._outline = outline(optimizer, persistent_buffers(modules))
        fingerprint, built = schema(self._outline), built_of(params, self._described)
        self._resumable = Resumable(self.run_id, fingerprint, scheduler, self._masters, whole, built)
        about = About(self.run_id, fingerprint, built, SOFTWARE)
        self._filed = FiledState(self._state, filed)
        self._saving = saving(options.checkpoint_dir, options.checkpoint_epochs, about, self._filed)
        self._build_peer = partial(Peer, self.run_id, **options.shared())
        live.warn_of_another_model(self.run_id, self._resumable.schema)
        live.enter(self, self._held, self._resumable.schema)
        try:
            self._begin()
        except BaseException:
            self.close(0.0)
            raise
        sigterm.watch(self, options.leave_notice_s)
        spot.watch(options.spot_notices, sigterm.leaves)
        company.await_company(together, self.peer.wait_for_peers)

    def _make_update(self, training: Session) -> Update:
        if self._reference is not None:
            assert self._outer is not None
            moves = Moves(
                self.inner,
                Schedule(self._options.scheduler if self._outer.schedule == "outer" else None),
                self._outer,
                self._reference,
                self._state,
                training,
                self._buffers,
                self._sampling,
            )
            return OuterUpdate(moves)
        assert isinstance(self._flat, FlatGradients)
        self._agreement = Agreement(self.inner, self._state)
        shared = Shared(
            self.inner,
            Schedule(self._options.scheduler),
            self._flat,
            self._microbatches,
            self._state,
            training,
            self._options.max_grad_norm,
            self._scale,
            self._buffers,
            self._resync,
            self._agreement,
            Overshoot(self._options.target),
            self._sampling,
        )
        if self._masters is None:
            return WaitingUpdate(shared)
        return BehindUpdate(
            shared, self._masters, self._options.delay_updates, self._options.delay_warmup_epochs
        )

    # ---------------------------------------------------------------- the training loop

    def step(self, closure: Callable[[], Any] | None = None, batch_size: int | None = None) -> Any:
        """End a microbatch: count its samples; average and step once the swarm has reached the target.

        Args:
            closure: computes the loss and calls its `backward()`; called once.
            batch_size: samples of this microbatch; None: `batch_size_per_step`.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            ConfigurationError: when the microbatch's weight in the average is unknown.
            P2PAvgError: when this peer cannot go on in the run; the message says what to do.
            ClosedError: after `close()`.
        """
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (closure, batch_size), {})
        loss = None
        if closure is not None:
            arguments.check_closure(closure)
            with torch.enable_grad():
                loss = closure()
        if self._closed:
            raise ClosedError("this optimizer was closed; build a new one to go on training")
        self._check_groups()
        if self._state.are_swapped:
            raise ConfigurationError("step() inside opt.swapped() or opt.averaged(): end the block first")
        passes, half = self._flat.passes, self._update.lost or self._entering is not None
        if half:
            self._enter_again()
        self.stepped = False
        self._interrupts.begins()
        if not self.began:
            arguments.check_alone(self._flat.params)
            self.began = True
        if self._outer is None:
            self._outside.begins(self.param_groups)
        samples = self._microbatches.take(batch_size, passes)
        yields = self._sampling.trained(samples)
        found_inf = self.__dict__.get("found_inf")  # set by a GradScaler
        watched = found_inf is None and self.watches_gradients
        if watched and self._flat.check() and not self._warned:
            self._warned = True
            log.warning(
                "the gradient of a microbatch was changed before step(): other peers do not change theirs; "
                "to clip the averaged gradient, pass max_grad_norm= instead"
            )
        if self._lockstep:
            self._retained.weigh(self._training.samples(), samples)
        epoch = self._update.epoch
        if found_inf is not None and self._outer is not None:
            raise ConfigurationError("a GradScaler and Outer(accumulate=) above 1 do not go together")
        since = None if found_inf is None else self._scale.check(found_inf, samples, self._flat.sums)
        if not self._flat.pending:
            self._follow_model()
        if half:
            yields = HALF_CHANGED
        else:
            self._flat.tick()
        # With a sampler the ledger finds what two peers drew both.
        if self._agreement is not None and self._sampling.draws is None and not self._agreement.knows_draw:
            self._agreement.drew(self._flat.sums)
        if since is None:
            self._update.count(samples, yields)
        else:
            self._update.count(samples, FOUND_INF, since)
        self.stepped = self._update.epoch != epoch
        if self.stepped:
            self._aim()
        if self._advisor is not None:
            self._advisor.step(self.stepped, lambda: self.last_report)
        self._outside.ended(self.param_groups, self.stepped)
        if self._lockstep:
            self._retained.keep(self._training.samples(), samples)
        for after in self._optimizer_step_post_hooks.values():
            after(self, (closure, batch_size), {})
        if sigterm.asked():
            sigterm.obey()
        self._interrupts.ended()
        return loss

    # Without this, torch wraps step() in a profiler record that takes ten times as long as counting does. The
    # inner optimizer's step has its own.
    step.hooked = True  # type: ignore[attr-defined]

    @property
    def options(self) -> TrainingOptions:
        """The options with which this optimizer was built."""
        return self._options

    @property
    def epoch(self) -> int:
        """Global optimizer steps that this peer has applied."""
        return self._update.epoch

    @property
    def peers(self) -> Mapping[bytes, PeerInfo]:
        """The other peers of the run now in view, by peer id."""
        return self.peer.peers

    @property
    def last_report(self) -> RoundReport | None:
        """The report of the last epoch that this peer finished, or, once it has left, of what it lost then,
        with no members; None: there was none.
        """
        return self._training.last_report

    def log(self, **figures: float) -> None:
        """Put figures of this peer into the next report's `extra`, such as `log(loss=loss.item())`: the
        mean over the calls of an epoch. `p2pavg monitor` and `p2pavg report` show the one called "loss".

        Args:
            figures: numbers by name.

        Raises:
            ConfigurationError: for what is no number.
        """
        self._training.logged.add(figures)


CollaborativeOptimizer.__new__.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    CollaborativeOptimizer.__init__
)


def _describe(optimizer: torch.optim.Optimizer) -> list[str]:
    params = parameters_of(optimizer)
    count = sum(param.numel() for param in params)
    return [f"{count:,} parameters in {len(params)} tensors", type(optimizer).__name__]


def _leads(optimizer: CollaborativeOptimizer | None) -> bool:
    return optimizer is not None and optimizer._training.leads
