"""`bench chaos`: a swarm of real processes under injected faults, with every event recorded."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from p2pavg.allreduce.choosing import Topology
from p2pavg.bench.chaos.check import summarise
from p2pavg.bench.chaos.kinds import DATA_FAULTS, FAULTS, GRADIENT_FAULTS, LAB_FAULTS
from p2pavg.bench.chaos.passes import Data, count_passes, is_exact
from p2pavg.bench.chaos.sharing import SharingSwarm
from p2pavg.bench.chaos.swarm import NUMEL, Swarm
from p2pavg.bench.options import at_least, positive_int, processes, seed
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit, output_path
from p2pavg.errors import ConfigurationError
from p2pavg.printable import counted
from p2pavg.report.plot import from_zero, whole

EXAMPLE = "example: p2pavg bench chaos --peers 4 --epochs 100 --fault-every 2 --faults kill,stop"
STEPS = 10  # per epoch and peer
BATCH, BLOCK = 4, 16  # samples of a step and of a block, with --passes


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("chaos", epilog=EXAMPLE)
    parser.add_argument("--peers", type=processes, default=4, help="peers that the swarm is kept at")
    parser.add_argument("--epochs", type=positive_int, default=100)
    parser.add_argument("--epoch-seconds", type=at_least(0.001), default=0.5)
    parser.add_argument(
        "--fault-every", type=at_least(0.1), default=2.0, help="seconds between faults (default 2)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the choice of faults and victims")
    parser.add_argument(
        "--faults",
        default="kill,stop,leader,join",
        help=f"of {','.join(FAULTS)}; {', '.join(LAB_FAULTS)} need --lab, {', '.join(DATA_FAULTS)} needs "
        "--passes (default kill,stop,leader,join)",
    )
    parser.add_argument(
        "--passes",
        type=positive_int,
        help="share data out with a SwarmSampler, in about --epochs epochs, until so many passes are whole; "
        "twice all processes end, and another number of them goes on from a checkpoint (a closed run)",
    )
    parser.add_argument(
        "--plan", choices=tuple(map(str, Topology)), default="auto", help="of the rounds; default: auto"
    )
    parser.add_argument(
        "--regions", type=positive_int, default=0, help="that the peers say they are in, in turns"
    )
    parser.add_argument(
        "--numel", type=positive_int, default=NUMEL, help=f"float32 elements to average (default {NUMEL})"
    )
    parser.add_argument("--lab", metavar="TOPOLOGY", help="run on the hosts of a lab topology")
    parser.add_argument(
        "--encrypted", action="store_true", help="a closed run, whose members have credentials"
    )
    parser.add_argument("--events", metavar="PATH", type=output_path, help="write every event as JSONL")
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Inject faults and measure; returns 1 when a guarantee was broken."""
    faults = [name for name in args.faults.split(",") if name]
    for name in faults:
        if name not in FAULTS:
            raise ConfigurationError(f"there is no fault {name!r}; choose of {', '.join(FAULTS)}")
        if name in LAB_FAULTS and args.lab is None:
            raise ConfigurationError(f"the fault {name!r} needs a network to break; name one with --lab")
        if name in DATA_FAULTS and args.passes is None:
            raise ConfigurationError(f"the fault {name!r} needs samples that can be told apart; add --passes")
    alone = [name for name in faults if name != "join"]
    if args.peers == 1 and alone:
        raise ConfigurationError(f"the fault {alone[0]!r} needs a peer that outlives it; --peers 2 at least")
    if args.passes is not None and (args.numel != NUMEL or set(faults).intersection(GRADIENT_FAULTS)):
        raise ConfigurationError(
            "--passes averages a vector of its own, and does not go with --numel or stages"
        )
    data = None if args.passes is None else _data(args)
    with progress("breaking a swarm", args.epochs) as advance:
        swarm = _swarm(args, data)
        try:
            with swarm:
                swarm.run(faults, args.fault_every, advance)
        finally:  # they tell, too, why a swarm did not start
            if args.events:
                Path(args.events).write_text("".join(json.dumps(event) + "\n" for event in swarm.events))
        events = swarm.events
    per_step = 1 if data is None else data.batch
    epochs = args.epochs if data is None else 0
    result = summarise(events, epochs=epochs, capacity=per_step * STEPS / args.epoch_seconds)
    if data is not None:  # who leaves hands samples over: they are counted by what they are, not by how many
        result |= {"samples_lost": None, "samples_doubled": None, **count_passes(events, data)}
    result.update(
        {
            "peers": args.peers,
            "epochs": args.epochs,
            "epoch_seconds": args.epoch_seconds,
            "seed": args.seed,
            "faults": faults,
            "stages": dict(Counter(e["stage"] for e in events if e["t"] == "fault" and "stage" in e)),
            "plan": args.plan,
            "regions": args.regions,
            "numel": args.numel,
            "topology": args.lab,
            "encrypted": args.encrypted,
        }
    )
    emit(args, result, _words(result), lambda figure: _draw(figure, events, result))
    broken = sum(result[name] for name in ("hangs", "crashes", "divergences"))
    if data is None:
        broken += result["samples_lost"] + result["samples_doubled"]
    else:
        broken += not is_exact(result)
    return 0 if not broken and result["finished_by_all"] else 1


def _data(args: argparse.Namespace) -> Data:
    """So many samples that the passes take about as many epochs as asked for."""
    length = max(1, args.peers * STEPS * BATCH * args.epochs // args.passes)
    return Data(length=length, passes=args.passes, block=BLOCK, seed=args.seed, batch=BATCH)


def _swarm(args: argparse.Namespace, data: Data | None) -> Swarm:
    options = {
        "peers": args.peers,
        "steps": STEPS,
        "epoch_seconds": args.epoch_seconds,
        "topology": args.lab,
        "seed": args.seed,
        "encrypted": args.encrypted,
        "plan": args.plan,
        "regions": args.regions,
        "numel": args.numel,
    }
    return Swarm(epochs=args.epochs, **options) if data is None else SharingSwarm(data, **options)


def _words(result: dict[str, Any]) -> list[str]:
    by_fault = ", ".join(
        f"{name} {s:.2f} s" for name, s in sorted(result["longest_stall_s_by_fault"].items())
    )
    struck = f"{result['faults_injected']} faults"
    if result["faults"] and not result["faults_injected"]:
        struck = "no fault, as the run ended before one was due (--epochs, --fault-every)"
    shared = []
    lost = f"{result['samples_lost']} samples lost, {result['samples_doubled']} doubled, "
    if "data" in result:
        lost = ""
        shared = [
            f"{result['data']['passes']} passes over {result['data']['length']} samples: "
            f"{result['indices_missing']} in no average, {result['indices_doubled']} in two, "
            f"{result['averages_misnamed']} averages that hold others than they name, "
            f"{result['averages_unseen']} of which nobody lived to tell "
            f"({result['indices_untold']} samples), "
            f"{result['indices_returned']} discarded and drawn again; "
            f"no loop waited longer than {result['longest_draw_s'] * 1e3:.1f} ms for a batch"
        ]
    return [
        *shared,
        f"{result['epochs_finished']} epochs, {struck}: {result['hangs']} hangs, "
        f"{result['crashes']} crashes, "
        f"{result['divergences']} divergences, {lost}{result['samples_discarded']} discarded and named",
        f"longest stall {result['longest_stall_s']:.2f} s ({by_fault or 'none'})",
        *(
            [f"killed processes were gone after at most {result['longest_death_s']:.2f} s"]
            if result["longest_death_s"] is not None
            else []
        ),
        f"throughput {result['throughput_share']:.0%} of a swarm without faults, with "
        f"{result['capacity_share']:.0%} of its capacity alive",
        *(
            [f"averaging takes {result['cpu_share']:.1%} of a core from each peer"]
            if result["cpu_share"] is not None
            else []
        ),
        *(
            f"{name} of the peer that lived longest: {used['first']:.0f} at first, {used['last']:.0f} at last"
            for name, used in result["usage"].items()
        ),
        *result["divergence_details"],
        *result["crash_details"],
    ]


def _draw(figure: Any, events: list[dict[str, Any]], result: dict[str, Any]) -> None:
    start = events[0]["at"]
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    living, times, counts = set(), [], []
    for event in events:
        if event["t"] == "joined":
            living.add(event["who"])
        elif event["t"] == "ended":
            living.discard(event["who"])
        times.append(event["at"] - start)
        counts.append(len(living))
    top.set_title(
        f"{counted(len([e for e in events if e['t'] == 'fault']), 'fault')} in a swarm of processes"
    )
    top.step(times, counts, where="post")
    top.set_ylabel("peers")
    from_zero(top)
    whole(top.yaxis, middle.yaxis)
    applied = [e for e in events if e["t"] == "epoch"]
    middle.plot([e["at"] - start for e in applied], [e["epoch"] for e in applied], ".", markersize=2)
    middle.set_ylabel("epoch")
    bottom.vlines([s["at"] - start for s in result["stalls"]], 0, [s["seconds"] for s in result["stalls"]])
    for fault in (e for e in events if e["t"] == "fault"):
        bottom.axvline(fault["at"] - start, color="red", linewidth=0.3)
    bottom.set_ylabel("stall, s")
    bottom.set_xlabel("seconds; red lines are faults")
