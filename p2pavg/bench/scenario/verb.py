"""`bench scenario`: a published swarm, predicted and then replayed in the lab."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from p2pavg.bench.options import at_least, positive_int
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit, keep
from p2pavg.bench.scenario.foretell import foretell
from p2pavg.bench.scenario.published import MODELS, NETWORK_SCALE, SCENARIOS, TARGET, Scenario
from p2pavg.bench.scenario.replay import WARM_UP, Replay, Sleeper, Training, among, replay, replay_of
from p2pavg.errors import P2PAvgError
from p2pavg.forecast.laws import EpochForecast
from p2pavg.lab.topology import Topology
from p2pavg.report.plot import from_zero

STEP_S = 0.5  # of a microbatch
MATCHMAKING_S = 5.0  # Hivemind's, as in the study
HIVEMIND = str(Path(__file__).with_name("hivemind_peer.py"))
HIVEMIND_EPOCH_S = 300.0  # of an epoch, on average; the slowest published one took 171


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "scenario",
        description="Replays a published swarm at a part of its scale: bytes and rates times --scale, round "
        "trips as they were, calculation that sleeps. Says before what an epoch will take.",
        epilog="example: p2pavg bench scenario C-8 --model language",
    )
    add = parser.add_argument
    add("name", choices=tuple(SCENARIOS), help="4 or 8 T4 on four continents; a campus and four A10 overseas")
    add("--model", choices=tuple(MODELS), default="language", help="default: language")
    add("--scale", type=at_least(1e-4), default=NETWORK_SCALE, help="of bytes and rates (default 0.1)")
    add("--target-batch-size", type=positive_int, default=TARGET, help=f"samples of an epoch ({TARGET})")
    add("--epochs", type=positive_int, default=4, help=f"measured, after {WARM_UP} of warm-up (default 4)")
    add("--delay", action="store_true", help="delayed parameter updates")
    add(
        "--hivemind",
        metavar="VENV",
        type=interpreter,
        help="a virtual environment with hivemind, which is replayed too",
    )
    add("--predict-only", action="store_true", help="run nothing")
    add_output_options(parser)
    parser.set_defaults(func=run)


def interpreter(text: str) -> str:
    """An argparse type: the Python of a virtual environment, checked before anything runs."""
    path = Path(text) / "bin" / "python"
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"{path} does not exist; name a virtual environment that has hivemind"
        )
    return str(path)


def run(args: argparse.Namespace) -> int:
    """Predict, replay and print."""
    scenario, model = SCENARIOS[args.name], MODELS[args.model]
    network = among(scenario.network(), tuple(scenario.devices)).scaled(args.scale / NETWORK_SCALE)
    sleepers = peers(scenario, args.model)
    training = Training(args.target_batch_size, round(args.scale * model.values), args.delay)
    found = foretell(network, sleepers, training)
    result = predicted(found, sleepers) | {
        "scenario": args.name,
        "model": args.model,
        "scale": args.scale,
        "target_batch_size": args.target_batch_size,
        "delay": args.delay,
        "printed_hivemind_epoch_s": scenario.printed.get(args.model)
        if args.target_batch_size == TARGET
        else None,
        "measured_epoch_s": None,
        "hivemind_epoch_s": None,
        "hivemind_failed": None,
    }
    if not args.predict_only:
        with progress("training", None):
            result |= replayed(replay(network, sleepers, training, args.epochs))
            if args.hivemind:
                keep(args, result)
                result |= hivemind(args, network, sleepers, training)
    emit(args, result, words(result), lambda figure: draw(figure, result))
    return 0


def peers(scenario: Scenario, model: str) -> list[Sleeper]:
    """The swarm's peers, each as fast as its device."""
    speeds = MODELS[model].sps
    return [
        Sleeper(host, host.rstrip("0123456789"), speeds[device], max(1, round(STEP_S * speeds[device])))
        for host, device in scenario.devices.items()
    ]


def predicted(found: EpochForecast, sleepers: list[Sleeper]) -> dict[str, Any]:
    crossing = sum(
        count for (i, j), count in found.transfer.sent.items() if sleepers[i].region != sleepers[j].region
    )
    return {
        "predicted_epoch_s": found.total,
        "predicted_calculation_s": found.calculation,
        "predicted_communication_s": found.communication,
        "predicted_bytes_between_regions": crossing,
        "predicted_samples_per_second": found.samples_per_second,
        "binds": found.transfer.binds,
    }


def replayed(run: Replay) -> dict[str, Any]:
    return {f"measured_{name}": value for name, value in run.figures().items()} | {
        "bytes_between_regions": run.bytes_between_regions,
        "epoch_seconds": [report.seconds_total for report in run.first],
        "lab": run.lab,
    }


def hivemind(
    args: argparse.Namespace, network: Topology, sleepers: list[Sleeper], training: Training
) -> dict[str, Any]:
    """The same swarm under Hivemind; where it fails, why."""
    argv = [args.hivemind, HIVEMIND]
    try:
        answers, lab = replay_of(
            argv, network, sleepers, training, args.epochs, slowest_epoch_s=HIVEMIND_EPOCH_S,
            matchmaking_s=MATCHMAKING_S, scale=args.scale,
        )  # fmt: skip
    except (P2PAvgError, OSError) as error:
        return {"hivemind_failed": str(error)}
    return {"hivemind_lab": lab} | under_hivemind(answers)


def under_hivemind(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of an epoch, which ends when its slowest peer has stepped, and of how many peers averages were
    (0: it failed, and the peer stepped alone). Epochs count that all peers ended, after the warm-up.
    """
    ends = [{int(epoch): at for epoch, at in answer["ends"].items()} for answer in answers]
    last = {epoch: max(one[epoch] for one in ends) for epoch in set.intersection(*map(set, ends))}
    measured = [epoch for epoch in sorted(last) if epoch > WARM_UP and epoch - 1 in last]
    if not measured:
        came = ", ".join(str(max(one, default=0)) for one in ends)
        return {"hivemind_failed": f"its peers ended no two epochs in a row together; they came to {came}"}
    sizes = Counter(
        size for answer in answers for epoch in measured for size in answer["groups"].get(str(epoch), ())
    )
    seconds = [last[epoch] - last[epoch - 1] for epoch in measured]
    return {
        "hivemind_epoch_s": median(seconds),
        "hivemind_epoch_seconds": seconds,
        "hivemind_averages_by_peers": {str(size): sizes[size] for size in sorted(sizes)},
    }


def words(result: dict[str, Any]) -> list[str]:
    """The figures, for people."""
    lines = [
        f"predicted: an epoch of {result['predicted_epoch_s']:.1f} s, "
        f"{result['predicted_calculation_s']:.1f} calculation and "
        f"{result['predicted_communication_s']:.2f} communication; binds: {result['binds']}"
    ]
    if result["measured_epoch_s"] is not None:
        off = result["predicted_epoch_s"] / result["measured_epoch_s"] - 1
        lines.append(
            f"measured: {result['measured_epoch_s']:.1f} s, "
            f"{result['measured_communication_s']:.2f} communication ({off:+.1%} predicted); "
            f"{result['bytes_between_regions'] / 1e6:.1f} MB between regions"
        )
        lines += [f"VOID: {result['lab']['void_reason']}"] if result["lab"]["void"] else []
    if result["hivemind_epoch_s"] is not None:
        sizes = ", ".join(f"{n} ({t}×)" for n, t in result["hivemind_averages_by_peers"].items())
        lines.append(
            f"Hivemind on the same network: {result['hivemind_epoch_s']:.1f} s; "
            f"peers in its averages (0: failed): {sizes}"
        )
        lines += [f"VOID: {result['hivemind_lab']['void_reason']}"] if result["hivemind_lab"]["void"] else []
    if result["hivemind_failed"] is not None:
        lines.append(f"Hivemind on the same network: failed: {result['hivemind_failed']}")
    if result["printed_hivemind_epoch_s"] is not None:
        lines.append(f"published for Hivemind: {result['printed_hivemind_epoch_s']:.1f} s")
    return lines


def draw(figure: Any, result: dict[str, Any]) -> None:
    """Epochs: predicted, measured, Hivemind's and the published one."""
    rows = {
        "predicted": result["predicted_epoch_s"],
        "measured": result["measured_epoch_s"],
        "Hivemind": result["hivemind_epoch_s"],
        "published": result["printed_hivemind_epoch_s"],
    }
    known = {name: value for name, value in rows.items() if value is not None}
    axes = figure.subplots()
    axes.bar(list(known), list(known.values()))
    axes.set_ylabel("seconds of an epoch")
    axes.set_title(f"{result['scenario']}, {result['model']}, times {result['scale']:g}")
    from_zero(axes)
