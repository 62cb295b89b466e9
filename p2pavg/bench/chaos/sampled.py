"""One peer of `bench chaos --passes`: trains on what a SwarmSampler draws, until all passes are whole."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from p2pavg.bench.chaos.worker import Chaos, main
from p2pavg.bench.workers import own_host
from p2pavg.data.runs import intersection
from p2pavg.data.sampler import SwarmSampler
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.report import RoundReport

REPORT_DEADLINE_S = 10.0
STALL_S = 0.2
NOTICE_S = 5.0
ROUNDING = 0.05  # of one sample: what float32 may do to a count


class Sampled(Chaos):
    """One parameter for each index of the data: the gradient of a batch is 1 at each index in it, so an
    average tells by itself which samples it holds.
    """

    def run(self) -> None:
        config, data = self.config, self.config["data"]
        self._length, self._passes = data["length"], data["passes"]
        self._sampler = SwarmSampler(self._length, data["seed"], data["block"])
        self._marks = torch.nn.Parameter(torch.zeros(self._length))
        self._averages: list[tuple[torch.Tensor, str, str]] = []
        self._reports: list[RoundReport] = []
        self._told = threading.Condition()
        self._longest_draw_s = 0.0
        inner = torch.optim.SGD([self._marks], lr=1.0)
        inner.register_step_pre_hook(self._average)
        inner.register_step_post_hook(self._stepped)
        self._opt = opt = CollaborativeOptimizer(
            inner,
            config["run_id"],
            config["target"],
            data["batch"],
            initial_peers=config["initial_peers"],
            listen=f"{own_host()}:0",
            compression="none",
            loss_reduction="sum",
            sampler=self._sampler,
            checkpoint_dir=config["checkpoint_dir"],
            checkpoint_epochs=1,
            leave_notice_s=NOTICE_S,
            on_round=self._reported,
            **self.planned(),
            **config["own"],
        )
        self.say("up", address=opt.peer.address, peer=opt.peer.peer_id.hex())
        self._watch_phases(opt.peer)
        usage = threading.Thread(target=self._sample, args=(opt.peer,), daemon=True)
        usage.start()
        self.say("joined", epoch=opt.epoch)
        self._going.wait()
        loader: DataLoader[int] = DataLoader(
            range(self._length),  # type: ignore[arg-type]
            sampler=self._sampler,
            batch_size=data["batch"],
        )
        while not self._is_over():
            batches = iter(loader)
            while not self._is_over() and (batch := self._drawn(batches)) is not None:
                self._train(batch)
        if not self._leaving:
            self.say("finished", counted=self._own_samples, discarded=0, **self._standing())
        while not self._closing and not self._leaving:  # other peers may still need this peer's state
            time.sleep(0.05)
        self._over.set()
        usage.join()
        opt.close(NOTICE_S if self._leaving else 0.0)
        self.say("closed")

    def _drawn(self, batches: Iterator[torch.Tensor]) -> torch.Tensor | None:
        """The next batch, in this process: nothing is fetched ahead while the last one trains. None: the pass
        has ended.
        """
        begun = time.monotonic()
        batch = next(batches, None)
        self._longest_draw_s = max(self._longest_draw_s, time.monotonic() - begun)
        return batch

    def _is_over(self) -> bool:
        return self._closing or self._leaving or self._is_whole()

    def _is_whole(self) -> bool:
        every = ((0, self._passes * self._length),)
        return intersection(self._sampler.draws.ledger.consumed, every) == every

    def _standing(self) -> dict[str, Any]:
        opt, draws = self._opt, self._sampler.draws
        return {
            "pending": opt._training.samples(),
            "history": {made.epoch: made.lineage.hex() for made in opt._training.history()},
            "consumed": draws.ledger.consumed,
            "longest_draw_s": self._longest_draw_s,
        }

    def _train(self, batch: torch.Tensor) -> None:
        """One step; the averages that it brought are told."""
        opt = self._opt
        time.sleep(self.config["step_seconds"])
        self._marks[batch].sum().backward()  # type: ignore[no-untyped-call]
        self._own_samples += len(batch)
        begun = time.monotonic()
        opt.step(batch_size=len(batch))
        seconds = time.monotonic() - begun
        opt.zero_grad()
        if seconds > STALL_S:
            self.say("stall", seconds=seconds, epoch=opt.epoch)
        averages, self._averages = self._averages, []
        with self._told:
            self._told.wait_for(lambda: len(self._reports) >= len(averages), REPORT_DEADLINE_S)
            reports, self._reports = self._reports[: len(averages)], self._reports[len(averages) :]
        for report, average in zip(reports, averages, strict=False):
            self._tell(report, *average, seconds)

    def _tell(
        self, report: RoundReport, mean: torch.Tensor, result: str, parameters: str, seconds: float
    ) -> None:
        counts = mean.double() * report.samples
        whole = counts.round()
        wrong = (
            "" if torch.allclose(counts, whole, rtol=0.0, atol=ROUNDING) else "no whole numbers of samples"
        )
        if not wrong and int(whole.sum()) != report.samples:
            wrong = f"{int(whole.sum())} samples are in an average of {report.samples}"
        indices = torch.repeat_interleave(torch.arange(len(whole)), whole.long().clamp(min=0))
        self.say(
            "epoch",
            epoch=report.epoch,
            seconds_in_step=seconds,
            result=result,
            parameters=parameters,
            wrong=wrong,
            lineage=report.lineage,
            members={m.peer: m.samples for m in report.members if m.weight > 0},
            samples=report.samples,
            local_samples=report.local_samples,
            counted=self._own_samples,
            pending=self._opt._training.samples(),
            discarded=report.samples_discarded,
            why=report.discarded_why,
            attempts=report.attempts,
            causes=report.causes,
            leader=report.leader,
            indices=indices.tolist(),
            consumed=report.consumed,
            passes=report.passes,
            returned=report.blocks_returned,
        )

    def _reported(self, report: RoundReport) -> None:
        with self._told:
            self._reports.append(report)
            self._told.notify()

    def _average(self, *_: object) -> None:
        assert self._marks.grad is not None
        mean = self._marks.grad.clone()
        self._averages.append((mean, _hash(mean), ""))

    def _stepped(self, *_: object) -> None:
        mean, result, _none = self._averages[-1]
        self._averages[-1] = mean, result, _hash(self._marks)


def _hash(vector: torch.Tensor) -> str:
    return hashlib.blake2b(vector.detach().numpy().tobytes(), digest_size=12).hexdigest()


if __name__ == "__main__":
    sys.exit(main(Sampled))
