"""`bench join`: a newcomer fetches the state while the swarm trains."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from p2pavg.bench.common import add_output_options, emit, positive_int, progress
from p2pavg.bench.workers import Workers

EXAMPLE = "example: p2pavg bench join --state-mb 200 --lab join-4"
BEFORE_EPOCHS = 8
AFTER_EPOCHS = 3
STEPS = 20  # per epoch and peer


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("join", help="a newcomer fetches the state", epilog=EXAMPLE)
    parser.add_argument("--state-mb", type=positive_int, default=200, help="size of the state (default 200)")
    parser.add_argument("--peers", type=positive_int, default=3, help="peers that train already (default 3)")
    parser.add_argument("--joiners", type=positive_int, default=1, help="newcomers at once (default 1)")
    parser.add_argument(
        "--numel", type=positive_int, default=1_000_000, help="parameters (default 1 million)"
    )
    parser.add_argument("--epoch-seconds", type=float, default=1.0, help="length of an epoch (default 1)")
    parser.add_argument("--kill-donor", action="store_true", help="kill one donor when half is downloaded")
    parser.add_argument("--lab", metavar="TOPOLOGY", help="run on the hosts of a lab topology")
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    result = measure(args)
    emit(args, result, _words(result), lambda figure: _draw(figure, result))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON data. Raises P2PAvgError when a worker fails."""
    count = args.peers + args.joiners
    config = {
        "target": args.peers * STEPS,
        "step_seconds": args.epoch_seconds / STEPS,
        "numel": args.numel,
        "extra_bytes": max(0, args.state_mb * 1_000_000 - 4 * args.numel),
    }
    patience = 60 + 40 * args.epoch_seconds
    with (
        progress("joining", None),
        Workers(count, "p2pavg.bench.join_worker", topology=args.lab) as workers,
    ):
        donors, newcomers = workers.workers[: args.peers], workers.workers[args.peers :]
        first = donors[0]
        first.send(do="start", initial_peers=[], **config)
        address = first.receive(patience)["address"]
        for donor in donors[1:]:
            donor.send(do="start", initial_peers=[address], **config)
        for donor in donors[1:]:
            donor.receive(patience)
        for donor in donors:
            donor.send(do="train", epochs=BEFORE_EPOCHS)
        before = [donor.receive(patience) for donor in donors]
        for donor in donors:
            donor.send(do="train_on")
            donor.receive(patience)
        for newcomer in newcomers:
            newcomer.send(
                do="join",
                initial_peers=[address],
                after_epochs=AFTER_EPOCHS,
                say_half=args.kill_donor and newcomer is newcomers[0],
                **config,
            )
        if args.kill_donor:
            newcomers[0].receive(300.0)  # half is there
            donors[-1].process.kill()
            donors = donors[:-1]
        joined = [newcomer.receive(600.0) for newcomer in newcomers]
        for donor in donors:
            donor.send(do="stop")
        after = [donor.receive(patience) for donor in donors]
        verdict = workers.lab_verdict()
    swarm = sorted({(e["epoch"], e["at"]) for answer in after for e in answer["applied"]})
    parameters = {e["epoch"]: {e["parameters"]} for e in joined[0]["applied"]}
    for answer in (*joined[1:], *after):
        for e in answer["applied"]:
            if e["epoch"] in parameters:
                parameters[e["epoch"]].add(e["parameters"])
    seconds = max(answer["seconds"] for answer in joined)
    ratios = [a["sps_during"] / b["sps"] for a, b in zip(after, before, strict=False) if b["sps"]]
    return {
        "seconds": seconds,
        "seconds_each": [answer["seconds"] for answer in joined],
        "gbps": 8e-9 * joined[0]["state_bytes"] / seconds,
        "donors": max(answer["donors"] for answer in joined),
        "epochs_missed": max(_missed(answer, swarm) for answer in joined),
        "donor_sps_ratio": statistics.median(ratios) if ratios else None,
        "donor_sps_ratio_lowest": min(ratios, default=None),
        "donor_extra_memory_bytes": max(answer["extra_memory_bytes"] for answer in after),
        "bit_identical": all(len(values) == 1 for values in parameters.values()),
        "epochs_compared": len(parameters),
        "state_bytes": joined[0]["state_bytes"],
        "epoch_seconds": args.epoch_seconds,
        "joiners": args.joiners,
        "peers": args.peers,
        "topology": args.lab,
        "arrivals": joined[0]["arrivals"],
        **verdict,
    }


def _missed(joined: dict[str, Any], swarm: Sequence[tuple[int, float]]) -> int:
    """Epochs that the swarm began after the transfer ended and before the newcomer contributed."""
    first: int = min(e["epoch"] for e in joined["applied"] if e["local_samples"] > 0)
    running = max((epoch + 1 for epoch, at in swarm if at <= joined["loaded_at"]), default=0)
    return max(0, first - running)


def _words(result: dict[str, Any]) -> list[str]:
    same = "the same bits everywhere" if result["bit_identical"] else "PEERS DIFFER"
    return [
        f"{result['joiners']} newcomers fetched {result['state_bytes'] / 1e6:.0f} MB from {result['donors']} "
        f"donors in {result['seconds']:.2f} s ({result['gbps']:.2f} Gb/s), and contributed "
        f"{result['epochs_missed']} epochs after the transfer; {same}",
        f"the donors kept {result['donor_sps_ratio']:.1%} of their samples/s, and used "
        f"{result['donor_extra_memory_bytes'] / 1e6:.0f} MB more memory",
    ]


def _draw(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots()
    times = [at for at, _ in result["arrivals"]]
    axes.plot(times, [size / 1e6 for _, size in result["arrivals"]])
    axes.set_xlabel("seconds after the newcomer started")
    axes.set_ylabel("MB of state")
    axes.set_title(f"{result['state_bytes'] / 1e6:.0f} MB from {result['donors']} donors")
