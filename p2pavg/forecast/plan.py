"""`p2pavg plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from p2pavg.errors import ConfigurationError
from p2pavg.forecast import trace
from p2pavg.forecast.evidence import from_reports
from p2pavg.forecast.inventory import EXAMPLE, Inventory, load
from p2pavg.forecast.laws import dollars_per_hour, dollars_per_million, epoch
from p2pavg.forecast.output import emit, usage
from p2pavg.forecast.search import Goal, Judge, MachinePlan, front, search
from p2pavg.report.plot import from_zero, save_plot
from p2pavg.report.reading import load as load_reports


def register(subparsers: Any) -> None:
    """Add the verb to the command line's sub-parsers."""
    plan = subparsers.add_parser(
        "plan",
        description="Chooses how many of each offer train fastest for the money, or cheapest at a speed.",
        epilog="example: p2pavg plan inventory.toml --most-samples-per-second --dollars-per-hour 5\n\n"
        "an inventory:\n\n" + EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = plan.add_argument
    add("inventory", metavar="INVENTORY", help="a TOML file, see below")
    add("--most-samples-per-second", action="store_true", help="within --dollars-per-hour")
    add("--least-dollars", action="store_true", help="at --samples-per-second or more")
    add("--dollars-per-hour", type=float, metavar="D")
    add("--samples-per-second", type=float, metavar="S")
    add(
        "--from",
        dest="reports",
        nargs="+",
        default=[],
        metavar="JSONL",
        help="reports that show the overheads",
    )
    add("--run", metavar="RUN", help="which run, when the files hold several")
    add("--trace", metavar="CSV", help="lines 'seconds,TYPE@REGION,count': replay what is on offer over time")
    add(
        "--join-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="with --trace: what a newcomer waits (20)",
    )
    add("--plot", metavar="PATH", help="draw samples/s over dollars per hour of the best plans")
    add("--json", metavar="PATH", help="write the plan as JSON; - is stdout, alone")
    plan.set_defaults(func=lambda args: usage(plan, args, run_plan))


def run_plan(args: argparse.Namespace) -> int:
    """Choose the machines."""
    goal = _goal(args)
    evidence = from_reports(load_reports(args.reports, args.run).reports) if args.reports else None
    inventory = load(args.inventory, evidence.speed_of) if evidence else load(args.inventory)
    judge = Judge(inventory, evidence.overheads if evidence else None)
    if args.trace:
        return emit(args.json, *_replayed(inventory, judge, goal, args))
    plan = search(judge, goal)
    if plan is None:
        raise ConfigurationError(_infeasible(judge, goal))
    ways = front(judge)
    figures = _told(judge, plan) | {
        "left_out": _left_out(judge, goal, plan),
        "front": [_brief(judge, one) for one in ways],
    }
    lines = [f"{n} x {name}" for name, n in figures["peers"].items()]
    lines.append(
        f"{figures['samples_per_second']:,.1f} samples/s, ${figures['dollars_per_hour']:,.2f} an hour, "
        f"${figures['dollars_per_million']:,.2f} a million samples; binds: {figures['binds']}"
    )
    lines += [f"left out: {name}: {why}" for name, why in figures["left_out"].items()]
    if args.plot:
        _draw(ways, plan, args.plot)
    return emit(args.json, figures, lines)


def _goal(args: argparse.Namespace) -> Goal:
    if args.most_samples_per_second == args.least_dollars:
        raise ConfigurationError(
            "there is one goal: --most-samples-per-second --dollars-per-hour D, or "
            "--least-dollars --samples-per-second S"
        )
    wanted = "dollars_per_hour" if args.most_samples_per_second else "samples_per_second"
    other = "samples_per_second" if args.most_samples_per_second else "dollars_per_hour"
    value, surplus = getattr(args, wanted), getattr(args, other)
    names = {"dollars_per_hour": "--dollars-per-hour", "samples_per_second": "--samples-per-second"}
    if value is None or surplus is not None:
        verb = "--most-samples-per-second" if args.most_samples_per_second else "--least-dollars"
        raise ConfigurationError(f"{verb} goes with {names[wanted]}, and with it alone")
    if not 0 < value < 1e15:
        raise ConfigurationError(f"{names[wanted]} must be above 0 and below 1e15, not {value:g}")
    return Goal(dollars_hour=value) if args.most_samples_per_second else Goal(sps=value)


def _infeasible(judge: Judge, goal: Goal) -> str:
    if goal.sps is None:
        fitting = [row for row in _ones(judge) if all(judge.limits >= row)]
        if not fitting:
            return "no offer has the memory that [job] memory_gb asks for"
        cheapest = min(judge.plan(row).dollars_hour for row in fitting)
        return f"nothing costs so little; the cheapest peer is ${cheapest:,.2f} an hour"
    fastest = search(judge, Goal(dollars_hour=1e9))
    most = fastest.sps if fastest else 0.0
    return f"nothing on offer reaches {goal.sps:g} samples/s; the most is {most:,.1f}"


def _ones(judge: Judge) -> list[list[int]]:
    n = len(judge.inventory.offers)
    return [[int(i == j) for j in range(n)] for i in range(n)]


def _brief(judge: Judge, plan: MachinePlan) -> dict[str, Any]:
    peers = {offer.name: n for offer, n in zip(judge.inventory.offers, plan.counts, strict=True) if n}
    return {"peers": peers, "samples_per_second": plan.sps, "dollars_per_hour": plan.dollars_hour}


def _told(judge: Judge, plan: MachinePlan) -> dict[str, Any]:
    """The plan with its prediction by the laws."""
    members, links = judge.swarm(plan)
    found = epoch(judge.inventory.job, members, links, judge.overheads)
    rent, traffic = dollars_per_hour(found, members, judge.inventory.per_gb)
    return _brief(judge, plan) | {
        "samples_per_second": found.samples_per_second,
        "epoch_s": found.total,
        "communication_s": found.communication,
        "granularity": found.granularity if found.communication else None,
        "dollars_per_hour": rent + traffic,
        "dollars_per_hour_traffic": traffic,
        "dollars_per_million": dollars_per_million(found, rent + traffic),
        "binds": found.transfer.binds,
        "plan": found.transfer.plan,
    }


def _left_out(judge: Judge, goal: Goal, plan: MachinePlan) -> dict[str, str]:
    """Why no more of each offer is in the plan."""
    found = {}
    for offer, have, one in zip(judge.inventory.offers, plan.counts, _ones(judge), strict=True):
        if have >= offer.count:
            continue
        if not offer.fits(judge.inventory.job):
            found[offer.name] = "it has less memory than [job] memory_gb"
            continue
        more = judge.plan([a + b for a, b in zip(plan.counts, one, strict=True)])
        dearer = more.dollars_hour - plan.dollars_hour
        if more.sps <= plan.sps:
            found[offer.name] = f"one more makes epochs longer: {more.sps / plan.sps - 1:+.1%} samples/s"
        elif goal.dollars_hour is not None and more.dollars_hour > goal.dollars_hour:
            egress = dearer - offer.dollars_hour
            traffic = f", ${egress:,.2f} of it traffic" if egress > 0.005 else ""
            found[offer.name] = f"one more costs ${dearer:,.2f} an hour{traffic}, which is over the budget"
        else:
            found[offer.name] = f"not needed: one more costs ${dearer:,.2f} an hour"
    return found


def _replayed(
    inventory: Inventory, judge: Judge, goal: Goal, args: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    steps = trace.replay(judge, goal, trace.load(args.trace, inventory), args.join_seconds)
    summary = trace.summary(steps)
    lines = [
        f"{step.begin:>9,.0f} s  {sum(step.plan.counts) if step.plan else 0} peers, "
        f"{step.plan.sps if step.plan else 0.0:,.1f} samples/s" + ("  (changed)" if step.changed else "")
        for step in steps
    ]
    lines.append(
        f"{summary['samples']:,.0f} samples for ${summary['dollars']:,.2f} in {summary['seconds']:,.0f} s; "
        f"{summary['changes']} changes cost {summary['join_seconds']:,.0f} s of peers' time"
    )
    return summary, lines


def _draw(ways: Sequence[MachinePlan], chosen: MachinePlan, path: str) -> None:
    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.set_title("The best plans of this inventory")
        axes.plot([plan.dollars_hour for plan in ways], [plan.sps for plan in ways], marker="o", label="best")
        axes.plot([chosen.dollars_hour], [chosen.sps], "*", markersize=14, label="chosen")
        axes.set_xlabel("dollars per hour")
        axes.set_ylabel("samples per second")
        axes.legend(loc="lower right")
        from_zero(axes)

    save_plot(path, draw)
