"""Attempts: the engine's jobs behind OpenJob and BeginJob. On the loop thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.encoding import Encodable
from p2pavg.allreduce.jobs import Jobs, NoLinkError
from p2pavg.rounds.loop.notices import RelayNotice
from p2pavg.rounds.loop.supply import Supply
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.training import Contribution
from p2pavg.transport.links.link import Link


class Attempts:
    """Opens and begins jobs; what cannot be done is answered with JobFailed."""

    def __init__(
        self,
        me: bytes,
        links: Mapping[bytes, Link],
        jobs: Jobs,
        supply: Supply,
        exact: Callable[[int], int],
    ) -> None:
        """exact: as in `TrainingSpec`."""
        self._me = me
        self._links = links
        self._jobs = jobs
        self._supply = supply
        self._exact = exact
        self._notice = RelayNotice(me)

    def open(self, action: act.OpenJob) -> ev.JobFailed | None:
        """Prepare a transfer with the links there are."""
        members = [(seat.peer, seat.voter) for seat in action.members]
        links = {peer: link.id for peer, link in self._links.items()}
        try:
            epoch = action.ballot.epoch
            exact = self._exact(epoch) > 0
            self._jobs.open(action.transfer, self._me, members, action.plan, links, exact, epoch)
        except NoLinkError as error:
            return ev.JobFailed(action.transfer, str(error), error.rank)
        except (ValueError, MemoryError) as error:
            return ev.JobFailed(action.transfer, str(error) or "out of memory")
        self._notice.opened(action, self._links)
        return None

    def begin(self, action: act.BeginJob, contribution: Contribution | None) -> ev.JobFailed | None:
        """Let gradients flow. contribution: of the training thread that waits."""
        job = self._jobs.get(action.transfer)
        if job is None:
            return None
        gradient: npt.NDArray[np.float32] | Encodable | None = None
        source, scale = None, 1.0
        if action.weights[job.rank] > 0 and not job.plan.takes(job.rank):
            return ev.JobFailed(action.transfer, "its plan has no room for the contribution")
        if action.weights[job.rank] > 0:
            if contribution is None or contribution.gradient is None:
                return ev.JobFailed(action.transfer, "the contribution is gone")
            weight = contribution.samples if contribution.weight is None else contribution.weight
            if action.weights[job.rank] != weight:
                return ev.JobFailed(action.transfer, "the contribution is another than was declared")
            source, scale = contribution.gradient, contribution.scale
        if isinstance(source, np.ndarray) and len(source) != job.plan.numel:
            return ev.JobFailed(action.transfer, "the contribution has another length")
        if source is not None:
            gradient = self._jobs.prepared(action.transfer, action.weights, source)
        if gradient is None or isinstance(gradient, np.ndarray):
            self._jobs.begin(action.transfer, action.weights, gradient, scale)
        else:
            self._supply.begin(action.transfer, action.weights, gradient, scale)
        return None
