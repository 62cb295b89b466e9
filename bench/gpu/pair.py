"""Two processes on one GPU: as peers, and plainly side by side. Run by `bench.gpu`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer
from p2pavg.report import RoundReport

ROOT = Path(__file__).resolve().parents[2]
LR = 0.1


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _bits(params: list[torch.Tensor]) -> str:
    """A digest of the parameters' bits: equal on peers that hold the same."""
    total = 0
    for index, param in enumerate(params):
        words = param.detach().contiguous().view(torch.int32).flatten().to(torch.int64)
        weights = torch.arange(1, len(words) + 1, device=words.device) % 65521
        total = (total * 31 + index + int((words * weights).sum())) % (1 << 61)
    return f"{total:x}"


# ------------------------------------------------------------------------- the workers: exact averages


def exact(options: dict[str, Any]) -> None:
    """Gradients that are constants of the peer, so that every epoch's average is known exactly."""
    rank, numel, batch = options["rank"], options["numel"], 4
    w = nn.Parameter(torch.zeros(numel, device="cuda"))
    idle = nn.Parameter(torch.ones(1000, device="cuda"))
    gradients = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    mine = gradients[rank].cuda()
    reports: list[RoundReport] = []
    opt = CollaborativeOptimizer(
        torch.optim.SGD([w, idle], lr=LR, weight_decay=0.0),
        run_id=options["run_id"],
        target_batch_size=64,
        batch_size_per_step=batch,
        initial_peers=options["initial_peers"],
        listen="127.0.0.1:0",
        compression=options["compression"],
        on_round=reports.append,
        **options["way"],
    )
    _say(address=opt.peer.address, peer=opt.peer.peer_id.hex())
    sys.stdin.readline()
    while opt.epoch < options["epochs"]:
        (w * mine).sum().backward()
        opt.step()
        opt.zero_grad()
        time.sleep(0.002)
    opt.close(0.0)
    expected = np.zeros(numel, np.float64)
    reports.sort(key=lambda report: report.epoch)
    for report in reports:
        total = sum(member.samples for member in report.members if member.weight > 0)
        for member in report.members:
            if member.weight > 0:
                other = member.peer != report.peer
                owner = gradients[1 - rank if other else rank].double().numpy()
                expected -= LR * member.samples / total * owner
    got = w.detach().double().cpu().numpy()
    _say(
        epochs=[report.epoch for report in reports],
        members=[len(report.members) for report in reports],
        relative_error=float(np.linalg.norm(got - expected) / np.linalg.norm(expected)),
        idle_moved=bool((idle != 1).any()),
        bits=_bits([w, idle]),
    )


# ---------------------------------------------------------------------- the workers: a large model


def train(options: dict[str, Any]) -> None:
    """XLM-R large under float16 autocast: as a peer with offload and delay, or plainly on the device."""
    from bench.gpu.models import language_model

    torch.manual_seed(0)
    job = language_model(options["batch"])
    torch.manual_seed(1 + options["rank"])
    microbatches, epochs = options["microbatches"], options["epochs"]
    inner = torch.optim.AdamW(job.model.parameters(), lr=1e-5)
    before = torch.cuda.memory_allocated()
    opt: CollaborativeOptimizer | None = None
    reports: list[RoundReport] = []
    if options["collaborative"]:
        opt = CollaborativeOptimizer(
            inner,
            run_id=options["run_id"],
            target_batch_size=2 * microbatches * options["batch"],
            batch_size_per_step=options["batch"],
            initial_peers=options["initial_peers"],
            listen="127.0.0.1:0",
            delay_updates=True,
            offload_optimizer=True,
            on_round=reports.append,
        )
    _say(address=opt.peer.address if opt is not None else "")
    sys.stdin.readline()
    torch.cuda.reset_peak_memory_stats()
    ends, counted = [time.time()], [0]
    deadline = time.monotonic() + options["seconds"]
    samples = count = 0
    while len(ends) <= epochs and time.monotonic() < deadline:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = job.loss(job.model)
        loss.backward()
        samples += options["batch"]
        count += 1
        if opt is not None:
            epoch = opt.epoch
            opt.step()
            over = opt.epoch > epoch
        else:
            over = count % microbatches == 0
            if over:
                inner.step()
                inner.zero_grad()
        if count % 8 == 0 or over:
            torch.cuda.synchronize()  # or the clock would read what was launched, not what was done
        if over:
            ends.append(time.time())
            counted.append(samples)
    torch.cuda.synchronize()
    facts = {
        "ends": ends,
        "samples": counted,
        "parameters": sum(p.numel() for p in job.model.parameters()),
        "note": job.note,
        "memory_before": before,
        "memory_peak": torch.cuda.max_memory_allocated(),
        "memory_reserved": torch.cuda.max_memory_reserved(),
        "memory_at_rest": torch.cuda.memory_allocated(),
        "waited": [report.extra.get("seconds_step_waited", 0.0) for report in reports],
        "transfer": [report.seconds_transfer for report in reports],
        "update": [report.seconds_update for report in reports],
    }
    if opt is not None:
        opt.close(0.0)
        facts["epochs_reported"] = [report.epoch for report in reports]
    _say(**facts)


# ------------------------------------------------------------------------------------------ the parent


class Pair:
    """Two workers that do one job after the other, both at the same time."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline = time.monotonic() + deadline_s
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.gpu.pair"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for _ in range(2)
        ]

    def _tell(self, rank: int, line: str) -> None:
        worker = self._workers[rank]
        assert worker.stdin is not None
        worker.stdin.write(line + "\n")
        worker.stdin.flush()

    def _line(self, rank: int) -> dict[str, Any]:
        """The worker's next JSON line. A worker past the deadline is killed, which ends its output."""
        worker = self._workers[rank]
        timer = threading.Timer(max(0.1, self._deadline - time.monotonic()), worker.kill)
        timer.start()
        try:
            assert worker.stdout is not None
            for line in worker.stdout:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        finally:
            timer.cancel()
        raise RuntimeError(f"worker {rank} ended with code {worker.wait()} and without a word")

    def run(self, mode: str, **options: Any) -> list[dict[str, Any]]:
        """Both get ready, the second naming the first, then begin together."""
        options |= {"mode": mode, "run_id": f"gpu-pair-{random.getrandbits(64):x}", "initial_peers": []}
        for rank in range(2):
            self._tell(rank, json.dumps({**options, "rank": rank}))
            address = self._line(rank).get("address")
            options["initial_peers"] = [address] if address else []
        for rank in range(2):
            self._tell(rank, "go")
        return [self._line(rank) for rank in range(2)]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


WAYS: tuple[tuple[str, dict[str, Any], str, float], ...] = (
    ("waiting none", {}, "none", 1e-6),
    ("waiting fp16", {}, "fp16", 1e-3),
    ("waiting int8", {}, "int8", 3e-3),  # 8e-3 without the residual
    ("delayed fp16", {"delay_updates": True}, "fp16", 1e-3),
    ("offload fp16", {"offload_optimizer": True}, "fp16", 1e-3),
    ("both fp16", {"delay_updates": True, "offload_optimizer": True}, "fp16", 1e-3),
    ("clipped fp16", {"max_grad_norm": 1e9}, "fp16", 1e-3),
)
"""What it is called, options, codec, and the relative error to float64 that it may have."""


def check_exact() -> dict[str, Any]:
    """Two peers on one GPU: every way of updating and codec ends at float64's result, with equal bits."""
    found: dict[str, Any] = {}
    wrong: list[str] = []
    with Pair(100) as pair:
        for name, way, compression, bound in WAYS:
            results = pair.run("exact", numel=3_000_000, epochs=6, way=way, compression=compression)
            found[name] = results
            for result in results:
                if result["relative_error"] > bound:
                    wrong.append(f"{name}: relative error {result['relative_error']:.2e}, not {bound}")
                if result["idle_moved"]:
                    wrong.append(f"{name}: an unused parameter moved")
                if max(result["members"]) < 2:
                    wrong.append(f"{name}: no common round")
            if results[0]["epochs"] == results[1]["epochs"] and results[0]["bits"] != results[1]["bits"]:
                wrong.append(f"{name}: the peers' parameters differ")
    assert not wrong, f"{wrong} in {found}"
    return found


def together(seconds: float) -> dict[str, Any]:
    """Samples per second of two peers with offload and delay, over those of two plain processes.

    seconds: for all of it.
    """
    found: dict[str, Any] = {}
    microbatches, batch, epochs = 96, 16, 4
    for name, share in (("plain", 0.4), ("peers", 0.6)):
        with Pair(seconds * share) as pair:
            results = pair.run(
                "train",
                collaborative=name == "peers",
                microbatches=microbatches,
                batch=batch,
                epochs=epochs,
                seconds=seconds * share * 0.7,
            )
        found[name] = {"workers": results}
        skip = 2 if name == "peers" else 1  # the first epoch is not delayed, the second is handed in
        rates, spans = [], []
        for result in results:
            ends, samples = result["ends"], result["samples"]
            if len(ends) > skip + 1:
                rates.append((samples[-1] - samples[skip]) / (ends[-1] - ends[skip]))
                spans.append(ends[-1] - ends[skip])
        found[name]["samples_per_second"] = sum(rates) if len(rates) == 2 else None
        found[name]["seconds_measured"] = spans
    if found["plain"]["samples_per_second"] and found["peers"]["samples_per_second"]:
        found["ratio"] = found["peers"]["samples_per_second"] / found["plain"]["samples_per_second"]
    peaks = {name: found[name]["workers"][0]["memory_peak"] for name in ("plain", "peers")}
    found["memory_saved"] = peaks["plain"] - peaks["peers"]
    found["state_and_master_bytes"] = 8 * found["plain"]["workers"][0]["parameters"]  # exp_avg, exp_avg_sq
    return found


def main() -> None:
    """A worker: one job per line of standard input."""
    works = {"exact": exact, "train": train}
    for line in sys.stdin:
        options = json.loads(line)
        works[options["mode"]](options)


if __name__ == "__main__":
    main()
