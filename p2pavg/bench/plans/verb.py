"""`bench plans`: what each plan of a round is predicted to take over a lab topology, and what it takes."""

from __future__ import annotations

import argparse
from typing import Any

from p2pavg import codecs
from p2pavg.bench.allreduce import verb as allreduce
from p2pavg.bench.options import positive_int
from p2pavg.bench.plans.predicting import CHEAPEST, FLAT, GATHER, TWO_LEVEL, names_of_groups, predict
from p2pavg.bench.result import add_output_options, emit
from p2pavg.errors import ConfigurationError
from p2pavg.lab.topology import Topology, load
from p2pavg.report.plot import from_zero
from p2pavg.report.prices import PriceTable

SIXTY_FOURTH = "p2pavg.bench.plans.predicting:sixty_fourth"
COLUMNS = (
    *("plan", "predicted s", "measured s", "round s"),
    *("predicted MB", "measured MB", "predicted $", "bits"),
)


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "plans",
        help="the plans of a round beside each other",
        description="For each plan over a lab topology: the seconds of its transfer as predicted from the "
        "network's rates, the bytes between regions, dollars with --prices, and seconds and bytes measured "
        "with real processes. The all-gather is that of outer steps which send a 64th.",
        epilog="example: p2pavg bench plans --lab clouds-4 --numel 2000000",
    )
    add = parser.add_argument
    add("--lab", metavar="TOPOLOGY", required=True, help="the network")
    add("--peers", type=positive_int, help="on its first hosts; default: one on each")
    add("--numel", type=positive_int, default=2_000_000, help="float32 elements (default 2 million)")
    add("--rounds", type=positive_int, default=3, help="measured rounds of each plan")
    add("--compression", choices=tuple(codecs.WIRE_IDS), default="fp16", help="default: fp16")
    add("--prices", metavar="TOML", help="a price table, whose regions are the hosts' names")
    add("--predict-only", action="store_true", help="measure nothing")
    add_output_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Predict, measure and print."""
    topology = load(args.lab)
    peers = args.peers or len(topology.hosts)
    if not 2 <= peers <= len(topology.hosts):
        raise ConfigurationError(
            f"topology {topology.name!r} has {len(topology.hosts)} hosts, so --peers is from 2 to that"
        )
    prices = None if args.prices is None else PriceTable.load(args.prices)
    rows: list[dict[str, Any]] = []
    for found in predict(topology, peers, args.numel, codecs.get(args.compression), prices):
        row: dict[str, Any] = {
            "plan": found.name,
            "predicted_s": found.seconds,
            "predicted_bytes_between_regions": found.crossing,
            "predicted_dollars": found.dollars,
        }
        if not args.predict_only:
            row |= measured(args, topology, peers, found.name)
        rows.append(row)
    least = {row["plan"]: row["predicted_bytes_between_regions"] for row in rows}
    result = {
        "plans": rows,
        "bytes_between_regions": least.get(TWO_LEVEL),
        "bytes_between_regions_flat": least[FLAT],
        "peers": peers,
        "numel": args.numel,
        "compression": args.compression,
        "topology": topology.name,
    }
    emit(args, result, table(rows), lambda figure: draw(figure, rows))
    return 0


def measured(args: argparse.Namespace, topology: Topology, peers: int, plan: str) -> dict[str, Any]:
    """What real processes took with this plan."""
    parser = argparse.ArgumentParser()
    allreduce.add_arguments(parser)
    wanted = {"--peers": peers, "--numel": args.numel, "--rounds": args.rounds, "--lab": args.lab}
    wanted["--compression"] = SIXTY_FOURTH if plan == GATHER else args.compression
    if plan != GATHER:
        wanted["--plan"] = plan
    if plan == CHEAPEST:
        wanted["--prices"] = args.prices
    given = parser.parse_args([str(word) for pair in wanted.items() for word in pair])
    # The regions are named: on a busy machine round trips inside one look longer than they are.
    found = allreduce.measure(given, names_of_groups(topology, peers))
    return {
        "transfer_s": found["phases"]["transfer"],
        "seconds_median": found["seconds_median"],
        "seconds_first": found["seconds_first"],
        "measured_bytes_between_regions": found["bytes_between_regions"],
        "bit_identical": found["bit_identical"],
        "lab": found["lab"],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The plans as lines of columns."""
    cells = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(COLUMNS))]
    used = [at for at in range(len(COLUMNS)) if any(row[at] for row in cells[1:])]
    return ["  ".join(row[at].rjust(widths[at]) for at in used) for row in cells]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    known = row["predicted_s"] is not None
    told = [row["plan"], f"{row['predicted_s']:.2f}" if known else "not known"]
    ran = "transfer_s" in row
    told += [f"{row[name]:.2f}" if ran else "" for name in ("transfer_s", "seconds_median")]
    told.append(f"{row['predicted_bytes_between_regions'] / 1e6:.2f}")
    told.append(f"{row['measured_bytes_between_regions'] / 1e6:.2f}" if ran else "")
    told.append(f"{row['predicted_dollars']:.6f}" if row["predicted_dollars"] else "")
    told.append(("equal" if row["bit_identical"] else "UNEQUAL") if ran else "")
    return tuple(told)


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Predicted and measured seconds of transfer, plan by plan."""
    axes = figure.subplots()
    places = range(len(rows))
    for shift, name in ((-0.2, "predicted_s"), (0.2, "transfer_s")):
        heights = [row.get(name) or 0.0 for row in rows]
        axes.bar([place + shift for place in places], heights, 0.4, label=name.split("_")[0])
    axes.set_xticks(list(places), [row["plan"] for row in rows])
    axes.set_ylabel("seconds of transfer")
    axes.legend()
    from_zero(axes)
