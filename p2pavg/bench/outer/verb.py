"""`bench outer`: loss, bytes and utilisation of outer steps, beside data-parallel training."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from p2pavg import codecs
from p2pavg.bench.options import at_least, positive_int, processes, seed
from p2pavg.bench.outer import CONTEXT
from p2pavg.bench.outer.pace import Pace
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit
from p2pavg.bench.workers import Workers
from p2pavg.errors import ConfigurationError
from p2pavg.optim.outer.settings import Outer
from p2pavg.printable import counted
from p2pavg.report.plot import from_zero

WORKER = "p2pavg.bench.outer.worker"
START_DEADLINE_S = 120.0
SECONDS_A_STEP = 10.0  # the longest that a microbatch may take, its share of a round included
CHUNK = 1 << 17
DATA_PARALLEL = DEFAULT = "fp16"
# Student's t: the 97.5% quantiles, from one degree of freedom on.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "outer",
        help="outer steps beside data-parallel training",
        description="Trains a small language model over bytes with real peers and outer steps, then the same "
        "model on the same samples with data-parallel training, an average for every step. With --compute "
        "sleep there is nothing to learn: bytes and utilisation are measured, of models of any size.",
        epilog="example: p2pavg bench outer --peers 2 --inner-steps 30 --compression int4 --json -",
    )
    add = parser.add_argument
    add("--peers", type=processes, default=2, help="real processes")
    add("--lab", metavar="TOPOLOGY", help="outer steps run on the hosts of a lab topology")
    add("--params", type=positive_int, default=100_000, help="parameters of the model, about")
    add("--inner-steps", type=positive_int, default=30, metavar="H", help="of each peer between averages")
    add("--outer-steps", type=positive_int, default=10, help="averages")
    add("--batch", type=positive_int, default=8, help="samples per inner step")
    add("--compression", choices=tuple(codecs.WIRE_IDS), help="of outer steps; default: int8")
    add("--density", type=share, metavar="D", help="share of the values that outer steps send, such as 1/64")
    add("--without-feedback", action="store_true", help="what a codec takes is lost: a negative control")
    add("--lr", type=at_least(0.0), default=3e-3, help="of the inner optimizer, at its peak")
    add("--data-parallel-lr", type=at_least(0.0), help="of the data-parallel run; as --lr by default")
    add("--outer-lr", type=at_least(0.0), help="default: that of p2pavg.Outer")
    add("--momentum", type=at_least(0.0), help="of the outer steps; default: that of p2pavg.Outer")
    add("--overlap", type=int, default=0, help="inner steps that run behind a round")
    add("--fragments", type=positive_int, default=1, help="bins of tensors, averaged in turn")
    add("--keep-local", type=at_least(0.0), default=1.0, help="share of them that stays on top")
    add("--seed", type=seed, default=0, help="of the model and the samples")
    add("--seeds", type=positive_int, default=1, help="runs of both, with seeds from --seed on")
    add("--compute", choices=("sleep", "torch"), default="torch")
    add("--step-seconds", type=at_least(0.0), default=0.05, help="an inner step with --compute sleep")
    add("--threads", type=positive_int, default=1, help="torch threads per peer")
    add(
        "--even",
        action="store_true",
        help="peers take their inner steps together, as many each; data-parallel training is one process "
        "over the same samples, in float32",
    )
    add("--only", choices=("outer", "data-parallel"), help="leave the other run out")
    add_output_options(parser)
    parser.set_defaults(func=run)


def share(text: str) -> float:
    """A share such as "1/64" or "0.015625"."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 1/64") from None


def run(args: argparse.Namespace) -> int:
    """Run the verb."""
    if args.density is not None and args.compression is not None:
        raise ConfigurationError("--density is a codec of its own; leave --compression out")
    inner = args.inner_steps * args.outer_steps
    job = {
        "params": args.params,
        "batch": args.batch,
        "lr": args.lr,
        "seed": args.seed,
        "compute": args.compute,
        "step_seconds": args.step_seconds,
        "threads": args.threads,
        "steps": inner,
        "even": args.even,
        "streams": 1,
    }
    outer = {
        "lr": args.outer_lr,
        "momentum": args.momentum,
        "overlap": args.overlap,
        "keep_local": args.keep_local,
        "fragments": args.fragments,
        "density": args.density,
    }
    Outer(**outer)
    compression = args.compression or "int8"
    kept = {"feedback": not args.without_feedback}
    steps = {"target": target_of(args), "epochs": args.outer_steps * args.fragments}
    each = {"target": args.peers * args.batch, "epochs": inner}
    plain = {**job, "lr": args.lr if args.data_parallel_lr is None else args.data_parallel_lr}
    seeds = range(args.seed, args.seed + args.seeds)
    # A density takes the codec that it is, which no compression names.
    wanted = {**job, **kept, "outer": outer, "compression": DEFAULT if args.density else compression}
    codec = compression if args.density is None else codecs.sparse_of(args.density).name
    found, reference = Runs(), Runs()
    if args.only != "data-parallel":
        with Workers(args.peers, WORKER, topology=args.lab) as workers:
            found = Runs([train(workers, steps, {**wanted, "seed": seed}) for seed in seeds])
    if args.only != "outer" and args.compute == "torch":
        wanted = {**plain, **kept, "outer": None, "compression": DATA_PARALLEL}
        if args.even:
            wanted |= {"streams": args.peers, "compression": "none"}
        with Workers(1 if args.even else args.peers, WORKER) as workers:
            reference = Runs([train(workers, each, {**wanted, "seed": seed}) for seed in seeds])
    parameters = (found.runs or reference.runs)[0]["parameters"]
    expected = args.outer_steps * bytes_of_a_round(parameters, args.peers, codec)
    expected_plain = inner * bytes_of_a_round(parameters, args.peers, DATA_PARALLEL)
    measured = None if args.even else reference.mean("bytes_per_peer")
    excess = found.above(reference)
    result = {
        "tokens": args.peers * args.batch * inner * CONTEXT,
        "loss": found.mean("loss"),
        "loss_data_parallel": reference.mean("loss"),
        "losses": found.all("loss"),
        "losses_data_parallel": reference.all("loss"),
        "excess": mean(excess) if excess else None,
        "excess_interval": interval(excess),
        "bit_identical": all(run["bit_identical"] for run in found.runs) if found.runs else None,
        "bytes_per_peer": found.mean("bytes_per_peer"),
        "wire_bytes_per_peer": found.mean("wire_bytes_per_peer"),
        "utilisation": found.mean("utilisation"),
        "seconds": found.mean("seconds"),
        "smallest_group": min((run["smallest_group"] for run in found.runs), default=None),
        "attempts": max((run["attempts"] for run in found.runs), default=None),
        "local_steps": found.all("local_steps"),
        **(found.runs[-1]["verdict"] if found.runs else {}),
        "bytes_expected": expected,
        "bytes_of_data_parallel": expected_plain if measured is None else measured,
        "bytes_of_data_parallel_expected": expected_plain,
        "peers": args.peers,
        "parameters": parameters,
        "inner_steps": args.inner_steps,
        "outer_steps": args.outer_steps,
        "compression": codec,
        "density": args.density,
        **kept,
        "topology": args.lab,
        "outer": outer,
        **job,
        "data_parallel_lr": plain["lr"],
        "steps": inner,
    }
    emit(args, result, lines(result), lambda figure: draw(figure, result))
    return 0


def target_of(args: argparse.Namespace) -> int:
    """The samples of an epoch. Of even peers: all are due when the first of them has its last step, and each
    knows what the others had before theirs.
    """
    steps = args.peers * args.inner_steps
    if not args.even:
        return int(args.batch * steps)
    if args.inner_steps % args.fragments:
        raise ConfigurationError("--even needs as many --inner-steps in each of the --fragments")
    return int(args.batch * (steps - args.fragments * (args.peers - 1)))


def train(workers: Workers, run: dict[str, int], job: dict[str, Any]) -> dict[str, Any]:
    """One run of a swarm, and its figures. run: the run's target, and the number of its epochs."""
    words = "data-parallel" if job["outer"] is None else "outer"
    deadline = START_DEADLINE_S + 2 * job["steps"] * max(SECONDS_A_STEP, job["step_seconds"])
    with progress(words, None), TemporaryDirectory() as folder:
        pace = Path(folder, "pace") if job["even"] else None
        if pace is not None:
            Pace.make(pace, len(workers.workers))
        begun = workers.join(
            run_id=f"bench-{words}-{job['seed']}",
            target=run["target"],
            **(job | {"pace": None if pace is None else str(pace)}),
        )
        workers.all(deadline_s=START_DEADLINE_S, do="gather", peers=len(begun))
        peers = workers.all(deadline_s=deadline, do="train", epochs=run["epochs"], peers=len(begun))
        workers.all(deadline_s=START_DEADLINE_S, do="leave")
        verdict = workers.lab_verdict()
    digests = {peer["digest"] for peer in peers}
    theta: dict[str, set[float | None]] = {}
    for peer in peers:
        for epoch, told in peer["theta"].items():
            theta.setdefault(epoch, set()).add(told)
    return {
        "loss": peers[0]["loss"],
        "bit_identical": len(digests) == 1 and all(len(told) == 1 for told in theta.values()),
        "bytes_per_peer": sum(peer["bytes"] for peer in peers) / len(peers),
        "wire_bytes_per_peer": sum(peer["wire_bytes"] for peer in peers) / len(peers),
        "utilisation": sum(peer["computing"] for peer in peers) / sum(peer["seconds"] for peer in peers),
        "seconds": max(peer["seconds"] for peer in peers),
        "local_steps": [peer["steps"] for peer in peers],
        "smallest_group": min(min(peer["members"]) for peer in peers),
        "attempts": max(max(peer["attempts"]) for peer in peers),
        "parameters": begun[0]["parameters"],
        "verdict": verdict,
    }


@dataclass(frozen=True)
class Runs:
    """The same training with one seed after another."""

    runs: Sequence[dict[str, Any]] = ()

    def all(self, name: str) -> list[Any]:
        """One figure, of each run."""
        return [run[name] for run in self.runs]

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the runs; None where no run has the figure."""
        values = [value for value in self.all(name) if value is not None]
        return mean(values) if values else None

    def above(self, others: Runs) -> list[float]:
        """The relative excess of each loss over that of the other training with the same seed."""
        pairs = zip(self.all("loss"), others.all("loss"), strict=False)
        return [one / other - 1 for one, other in pairs if one is not None and other is not None]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% confidence interval of the mean, by Student's t; None: too few values."""
    if not 2 <= len(values) <= len(STUDENT) + 1:
        return None
    half = STUDENT[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def bytes_of_a_round(parameters: int, peers: int, compression: str) -> float:
    """Bytes that a peer sends, on average: contributions to others' parts, and its own part's result. What is
    sparse goes to all others.
    """
    codec = codecs.get(compression)
    if codecs.is_sparse(codec):
        return (peers - 1) * parameters * codec.encoded_size(CHUNK) / CHUNK
    values = sum(one.encoded_size(CHUNK) for one in (codec, codecs.for_results(codec))) / CHUNK
    return (peers - 1) / peers * parameters * values


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines for people."""
    told = [
        f"{counted(result['peers'], 'peer')}, {result['parameters'] / 1e6:.2f}M parameters, "
        f"{result['inner_steps']} inner steps, {result['compression']}: {result['tokens'] / 1e6:.2f}M tokens"
    ]
    if result["loss"] is not None or result["loss_data_parallel"] is not None:
        shown = [f"{loss:.4f}" if loss is not None else "-" for loss in _losses(result)]
        spread = ""
        if result["excess_interval"] is not None:
            low, high = result["excess_interval"]
            spread = f", 95% {100 * low:+.2f}% to {100 * high:+.2f}%"
        excess = "" if result["excess"] is None else f" ({100 * result['excess']:+.2f}%{spread})"
        told.append(f"loss {shown[0]}{excess}, of data-parallel training {shown[1]}")
    if result["bytes_per_peer"]:
        share = result["bytes_of_data_parallel"] / result["bytes_per_peer"]
        told.append(
            f"{result['bytes_per_peer'] / 1e6:.3f} MB sent per peer, 1/{share:.0f} of data-parallel's"
        )
    if result["utilisation"] is not None:
        equal = "equal" if result["bit_identical"] else "NOT equal"
        told.append(
            f"the trainer computes {100 * result['utilisation']:.1f}% of the time; {equal} to the bit"
        )
    return told


def _losses(result: dict[str, Any]) -> tuple[float | None, float | None]:
    return result["loss"], result["loss_data_parallel"]


def draw(figure: Any, result: dict[str, Any]) -> None:
    """Draw the bytes of both trainings on one scale."""
    axes = figure.subplots()
    axes.bar(
        ["outer steps", "data-parallel"],
        [(result["bytes_per_peer"] or 0) / 1e6, result["bytes_of_data_parallel"] / 1e6],
    )
    axes.set_ylabel("MB sent per peer")
    axes.set_title(f"{counted(result['peers'], 'peer')}, {result['tokens'] / 1e6:.1f}M tokens")
    from_zero(axes)
