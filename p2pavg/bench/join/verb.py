"""`bench join`: a newcomer fetches the state while the swarm trains."""

from __future__ import annotations

import argparse
from typing import Any

from p2pavg import codecs
from p2pavg.bench.join import figures
from p2pavg.bench.join.bars import bars
from p2pavg.bench.options import at_least, positive_int, processes
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit
from p2pavg.bench.workers import Worker, Workers
from p2pavg.errors import ConfigurationError
from p2pavg.printable import counted
from p2pavg.report.plot import from_zero

EXAMPLE = "example: p2pavg bench join --state-mb 200 --lab join-4"
BEFORE_EPOCHS = 12
AFTER_EPOCHS = 3
STEPS = 20  # per epoch and peer
PATIENCE_S = 600.0
COMPRESSION = "fp16"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("join", epilog=EXAMPLE)
    parser.add_argument("--state-mb", type=positive_int, default=200, help="size of the state (default 200)")
    parser.add_argument("--peers", type=processes, default=3, help="peers that train already (default 3)")
    parser.add_argument("--joiners", type=processes, default=1, help="newcomers at once (default 1)")
    parser.add_argument(
        "--numel", type=positive_int, help="parameters (default 1 million, or as many as the state holds)"
    )
    parser.add_argument(
        "--epoch-seconds", type=at_least(0.001), default=1.0, help="length of an epoch (default 1)"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="two thirds of the state are zeros, as an optimizer's two moments before its first step",
    )
    parser.add_argument("--kill-donor", action="store_true", help="kill one donor when half is downloaded")
    parser.add_argument("--lab", metavar="TOPOLOGY", help="run on the hosts of a lab topology")
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.kill_donor and args.peers < 2:
        raise ConfigurationError("--kill-donor needs a second donor; say --peers 2 or more")
    result = measure(args)
    emit(args, result, _words(result), lambda figure: _draw(figure, result))
    return 0 if result["bit_identical"] else 1


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON data. Raises P2PAvgError when a worker fails."""
    count = args.peers + args.joiners
    held = args.state_mb * 1_000_000 // 4  # parameters, where the state is nothing else
    if args.numel is None:
        args.numel = min(1_000_000, held)
    if args.numel > held:
        raise ConfigurationError(
            f"--numel {args.numel} takes {args.numel * 4e-6:g} MB of state by itself: --state-mb that much "
            "at least, or fewer parameters"
        )
    config = {
        "target": args.peers * STEPS,
        "step_seconds": args.epoch_seconds / STEPS,
        "numel": args.numel,
        "compression": COMPRESSION,
        "extra_bytes": args.state_mb * 1_000_000 - 4 * args.numel,
        "zero_bytes": args.state_mb * 1_000_000 * 2 // 3 if args.fresh else 0,
    }
    with (
        progress("joining", None),
        Workers(count, "p2pavg.bench.join.worker", topology=args.lab) as workers,
    ):
        donors, newcomers = workers.workers[: args.peers], workers.workers[args.peers :]
        address = _train(donors, config)
        for newcomer in newcomers:
            newcomer.send(
                do="join",
                initial_peers=[address],
                after_epochs=AFTER_EPOCHS,
                say_half=args.kill_donor and newcomer is newcomers[0],
                **config,
            )
        if args.kill_donor:
            newcomers[0].receive(PATIENCE_S)  # half of the state has arrived
            donors.pop().process.kill()
        joined = [newcomer.receive(PATIENCE_S) for newcomer in newcomers]
        for donor in donors:
            donor.send(do="stop")
        trained = [donor.receive(PATIENCE_S) for donor in donors]
        verdict = workers.lab_verdict()
        topology = None if workers.lab is None else workers.lab.topology
    bar = None
    if topology is not None:
        result_bytes = codecs.for_results(codecs.get(COMPRESSION)).encoded_size(args.numel)
        bar = bars(joined, trained, topology, args.peers, args.epoch_seconds, result_bytes)
    return {
        **figures.figures(joined, trained, topology, args.peers),
        "bars": bar,
        "killed_a_donor": args.kill_donor,
        "epoch_seconds": args.epoch_seconds,
        "numel": args.numel,
        "joiners": args.joiners,
        "fresh": args.fresh,
        "peers": args.peers,
        "topology": args.lab,
        **verdict,
    }


def _train(donors: list[Worker], config: dict[str, Any]) -> str:
    """Start the swarm, and let it train for a while; returns the address of one peer."""
    first, *others = donors
    first.send(do="start", initial_peers=[], **config)
    address: str = first.receive(PATIENCE_S)["address"]
    for donor in others:
        donor.send(do="start", initial_peers=[address], **config)
    for donor in others:
        donor.receive(PATIENCE_S)
    for donor in donors:
        donor.send(do="train_on", epochs=BEFORE_EPOCHS)
    for donor in donors:
        donor.receive(PATIENCE_S)
    return address


def _words(result: dict[str, Any]) -> list[str]:
    same = "the same bits everywhere" if result["bit_identical"] else "PEERS DIFFER"
    share, kept = result["share_of_links"], result["donor_sps_ratio"]
    lines = [
        f"{result['joiners']} newcomers had {result['state_bytes'] / 1e6:.0f} MB from {result['donors']} "
        f"donors {result['seconds']:.2f} s after they started, at {result['gbps']:.2f} Gb/s, and contributed "
        f"{result['epochs_missed']} epochs later; {same}",
        f"the donors used {result['donor_extra_memory_bytes'] / 1e6:.0f} MB more memory, and kept "
        + (
            "their samples/s: it took less than an epoch"
            if kept is None
            else f"{kept:.1%} of their samples/s"
        ),
        f"{result['received_over_state']:.2f} of the state's bytes came over the links",
    ]
    found = result.get("bars")
    if found is not None:
        lines.append(
            f"over {found['link_mbps']:.0f} Mb/s the state alone takes {found['state_s']:.1f} s: newcomers "
            f"were in after {found['in_s']:.1f} s ({found['in_bar_s']:.1f} s allowed), "
            f"{found['sent_over_state']:.2f} of the state's bytes were sent of it, and the donors lost "
            f"{found['lost_over_state']:.2f} of its time"
        )
    if share is not None:
        lines.append(f"that is {share:.2f} of what the epochs' own traffic leaves of the links")
    return lines


def _draw(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots()
    axes.plot([at for at, _ in result["arrivals"]], [size / 1e6 for _, size in result["arrivals"]])
    axes.set_xlabel("seconds after the newcomer started")
    axes.set_ylabel("MB of state")
    axes.set_title(
        f"{result['state_bytes'] / 1e6:.0f} MB from {counted(result['donors'], 'donor')}, while they train"
    )
    rates = axes.twinx()
    rates.step(
        [epoch["at"] for epoch in result["donor_epochs"]],
        [epoch["sps"] for epoch in result["donor_epochs"]],
        where="pre",
        color="tab:orange",
    )
    from_zero(rates)
    rates.set_ylabel("samples/s of a donor, by epochs", color="tab:orange")
