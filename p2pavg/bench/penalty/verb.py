"""`bench penalty`: the throughput that one training job loses to averaging, locally and globally."""

from __future__ import annotations

import argparse
from statistics import mean, median
from typing import Any

from p2pavg import codecs
from p2pavg.bench.options import at_least, compression, positive_int, processes, torch_device
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit
from p2pavg.bench.workers import Workers
from p2pavg.printable import counted
from p2pavg.report.plot import from_zero, whole

WORKER = "p2pavg.bench.penalty.worker"
START_DEADLINE_S = 120.0


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "penalty",
        description="Trains one job plainly in one process, then with --peers real peers. Local throughput "
        "counts the time of the microbatches alone, global throughput the whole wall clock.",
        epilog="example: p2pavg bench penalty --peers 3 --delay --json -",
    )
    parser.add_argument("--peers", type=processes, default=2, help="real processes")
    parser.add_argument("--lab", metavar="TOPOLOGY", help="run on the hosts of a lab topology")
    parser.add_argument("--params", type=positive_int, default=1_000_000, help="parameters of the model")
    parser.add_argument("--batch", type=positive_int, default=8, help="samples per microbatch")
    parser.add_argument("--steps", type=positive_int, default=10, help="microbatches per peer and epoch")
    parser.add_argument(
        "--step-seconds", type=at_least(0.0), default=0.05, help="a microbatch with --compute sleep"
    )
    parser.add_argument(
        "--epochs", type=positive_int, default=10, help="measured epochs, after two of warm-up"
    )
    parser.add_argument("--compute", choices=("sleep", "torch"), default="sleep")
    parser.add_argument(
        "--device",
        default="cpu",
        help="a torch device (default: cpu); on another one peers compute, and share it: plain training is "
        "then measured with as many processes. `cuda` spreads them over all GPUs",
    )
    parser.add_argument(
        "--compression",
        type=compression,
        default="fp16",
        help=f"{', '.join(codecs.WIRE_IDS)}, or MODULE:NAME of a Codec of your own; default: fp16",
    )
    parser.add_argument("--delay", action="store_true", help="delayed parameter updates")
    parser.add_argument("--offload", action="store_true", help="optimizer on the CPU")
    parser.add_argument(
        "--slow", type=at_least(0.01), default=1.0, help="how many times slower the last peer is"
    )
    parser.add_argument("--threads", type=positive_int, default=1, help="torch threads per peer")
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    shared = args.device != "cpu"
    if shared:
        torch_device(args.device)
    job = {
        "params": args.params,
        "batch": args.batch,
        "compute": "torch" if shared else args.compute,
        "device": args.device,
        "step_seconds": args.step_seconds,
        "threads": args.threads,
    }
    shares = args.peers - 1 + 1 / args.slow  # the swarm's speed, in multiples of one fast peer's
    target = max(1, round(args.steps * shares)) * args.batch
    calculating = args.steps * args.step_seconds
    deadline = START_DEADLINE_S + 60 * (args.epochs + 2) * max(1.0, calculating)
    with progress("training", None), Workers(args.peers, WORKER, topology=args.lab) as workers:
        plain = workers.workers if shared else workers.workers[:1]
        for worker in plain:
            worker.send(do="baseline", index=worker.index, steps=args.steps, epochs=args.epochs, **job)
        baseline = mean(worker.receive(deadline)["sps"] for worker in plain)
        workers.join(
            target=target,
            peers=args.peers,
            slow=args.slow,
            compression=args.compression,
            delay=args.delay,
            offload=args.offload,
            **job,
        )
        answers = workers.all(deadline_s=deadline, do="train", epochs=args.epochs + 2)
        workers.all(deadline_s=START_DEADLINE_S, do="leave")
        lab = workers.lab_verdict()
    peers = [answer["epochs"] for answer in answers]
    locals_ = [sum(r["samples"] for r in rows) / sum(r["calculating"] for r in rows) for rows in peers]
    wall = sum(r["seconds"] for r in peers[0])
    global_sps = sum(r["samples"] for rows in peers for r in rows) / wall
    epoch_seconds = [r["seconds"] for r in peers[0]]
    result = {
        "baseline_sps": baseline,
        "local_sps": locals_,
        "global_sps": global_sps,
        "local_over_baseline": locals_[0] / baseline,
        "global_over_local": global_sps / sum(locals_),
        "epoch_seconds_median": median(epoch_seconds),
        "calculating_seconds_median": median(r["calculating"] for r in peers[0]),
        "averaging_cpu_seconds_per_epoch": median(r["averaging_cpu"] for r in peers[0]),
        "epoch_seconds": epoch_seconds,
        "peers": args.peers,
        "topology": args.lab,
        "delay": args.delay,
        "offload": args.offload,
        "slow": args.slow,
        "compression": args.compression,
        "epochs": args.epochs,
        **job,
        **lab,
    }
    lines = [
        f"{counted(args.peers, 'peer')}, {args.params / 1e6:.1f}M parameters on {args.device}, "
        f"{args.compression}"
        f"{', delayed' if args.delay else ''}{', offloaded' if args.offload else ''}",
        f"one process {baseline:.1f} samples/s; a peer alone with its microbatches {locals_[0]:.1f} "
        f"({result['local_over_baseline']:.3f}); the swarm {global_sps:.1f} "
        f"({result['global_over_local']:.3f} of the sum)",
        f"an epoch {result['epoch_seconds_median']:.3f} s, "
        f"of it {result['calculating_seconds_median']:.3f} s calculation",
    ]
    emit(args, result, lines, lambda figure: draw(figure, result))
    return 0


def draw(figure: Any, result: dict[str, Any]) -> None:
    """The epochs' durations."""
    axes = figure.subplots()
    axes.plot(result["epoch_seconds"], "o-", label="epoch")
    axes.axhline(result["calculating_seconds_median"], color="grey", linewidth=0.8, label="calculation")
    axes.set_xlabel("epoch")
    axes.set_ylabel("seconds")
    axes.set_title(f"Epochs of {counted(result['peers'], 'peer')}, and what of them is calculation")
    from_zero(axes)
    whole(axes.xaxis)
    axes.legend(loc="lower right")
