"""`p2pavg plan`."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from p2pavg.errors import ConfigurationError
from p2pavg.forecast import trace
from p2pavg.forecast.evidence import from_reports
from p2pavg.forecast.inventory import EXAMPLE, load
from p2pavg.forecast.laws import dollars_per_hour, epoch
from p2pavg.forecast.output import emit, usage, write
from p2pavg.forecast.search import Goal, Judge, MachinePlan, front, next_best, search
from p2pavg.report.plot import from_zero, plot_path, save_plot
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
    add("--dollars-per-hour", type=float, metavar="D", help="at most; also beside --least-dollars")
    add("--samples-per-second", type=float, metavar="S", help="at least; also beside the other goal")
    add("--from", dest="reports", nargs="+", metavar="JSONL", help="reports that show overheads and speeds")
    add("--run", metavar="RUN", help="which run, when the files hold several")
    add("--trace", metavar="CSV", help="lines 'seconds,TYPE@REGION,count': replay what is on offer over time")
    add("--join-seconds", type=float, default=20.0, metavar="S", help="of a newcomer of --trace (20)")
    add("--swarm", metavar="TOML", help="write the machines as a file for 'p2pavg launch --swarm'")
    add(
        "--plot",
        metavar="PATH",
        type=plot_path,
        help="draw samples/s over $/h of the best plans",
    )
    add("--json", metavar="PATH", help="write the plan as JSON; - is stdout, alone")
    plan.set_defaults(func=lambda args: usage(plan, args, run_plan))


def run_plan(args: argparse.Namespace) -> int:
    """Choose the machines."""
    goal = _goal(args)
    if not 0 <= args.join_seconds < 1e9:
        raise ConfigurationError(
            f"--join-seconds must be at least 0 and below 1e9, not {args.join_seconds:g}"
        )
    evidence = from_reports(load_reports(args.reports, args.run).reports) if args.reports else None
    judge = Judge(load(args.inventory, evidence), evidence.overheads if evidence else None)
    if args.trace:
        return emit(args.json, *_replayed(judge, goal, args))
    plan = search(judge, goal)
    if plan is None:
        raise ConfigurationError(_infeasible(judge, goal))
    other = next_best(judge, goal, plan)
    figures = _told(judge, plan) | {
        "left_out": _left_out(judge, goal, plan),
        "next_best": _brief(judge, other) if other else None,
    }
    ways = front(judge) if args.json or args.plot else []
    figures["front"] = [_brief(judge, one) for one in ways]
    if args.swarm:
        write(args.swarm, _machines(judge, plan))
    if args.plot:
        _draw(ways, plan, args.plot)
    return emit(args.json, figures, _words(figures))


def _goal(args: argparse.Namespace) -> Goal:
    if args.most_samples_per_second == args.least_dollars:
        raise ConfigurationError(
            "there is one goal: --most-samples-per-second --dollars-per-hour D, or "
            "--least-dollars --samples-per-second S"
        )
    limits = {"--dollars-per-hour": args.dollars_per_hour, "--samples-per-second": args.samples_per_second}
    for name, value in limits.items():
        if value is not None and not 0 < value < 1e15:
            raise ConfigurationError(f"{name} must be above 0 and below 1e15, not {value:g}")
    if args.most_samples_per_second and args.dollars_per_hour is None:
        raise ConfigurationError("--most-samples-per-second goes with --dollars-per-hour")
    if args.least_dollars and args.samples_per_second is None:
        raise ConfigurationError("--least-dollars goes with --samples-per-second")
    return Goal(args.least_dollars, args.dollars_per_hour or math.inf, args.samples_per_second or 0.0)


def _infeasible(judge: Judge, goal: Goal) -> str:
    """Which limit no plan meets, and how near one comes."""
    fastest = search(judge, Goal())
    if fastest is None:
        least = min(offer.needed for offer in judge.inventory.offers)
        return f"no offer holds the model: a peer takes {least / 1e9:,.1f} GB, and none has as much memory"
    if fastest.sps < goal.sps:
        return f"nothing on offer reaches {goal.sps:g} samples/s; the most is {fastest.sps:,.1f}"
    cheapest = search(judge, Goal(cheapest=True, sps=goal.sps)) or fastest
    if goal.sps == 0:
        return f"nothing costs so little: the cheapest plan is ${cheapest.dollars_hour:,.2f}/h"
    return f"the cheapest that reaches {goal.sps:g} samples/s costs ${cheapest.dollars_hour:,.2f}/h"


def _brief(judge: Judge, plan: MachinePlan) -> dict[str, Any]:
    peers = {offer.name: n for offer, n in zip(judge.inventory.offers, plan.counts, strict=True) if n}
    return {"peers": peers, "samples_per_second": plan.sps, "dollars_per_hour": plan.dollars_hour}


def _told(judge: Judge, plan: MachinePlan) -> dict[str, Any]:
    """The plan with its prediction by the laws."""
    swarm = judge.swarm(plan.counts)
    found = epoch(judge.inventory.job, swarm, judge.overheads)
    _, traffic = dollars_per_hour(found, swarm, judge.inventory.per_gb)
    return _brief(judge, plan) | found.to_dict(plan.dollars_hour) | {"dollars_per_hour_traffic": traffic}


def _machines(judge: Judge, plan: MachinePlan) -> str:
    """The plan as a swarm file, one machine a peer."""
    kinds = [offer for offer, n in zip(judge.inventory.offers, plan.counts, strict=True) for _ in range(n)]
    lines = ['run = "my-run"  # as in the script']
    for number, offer in enumerate(kinds, 1):
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"peer-{number}-{offer.kind}-{offer.region}")[:63]
        resources = f"accelerators = {_quoted(offer.kind)}, region = {_quoted(offer.region)}"
        lines += ["", "[[machine]]", f"name = {_quoted(name)}", f"resources = {{ {resources} }}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _left_out(judge: Judge, goal: Goal, plan: MachinePlan) -> dict[str, str]:
    """Why no more of each offer is in the plan."""
    found = {}
    for index, offer in enumerate(judge.inventory.offers):
        if plan.counts[index] >= offer.count:
            continue
        if offer.memory is not None and not offer.fits:
            found[offer.name] = (
                f"it does not hold the model: a peer takes {offer.needed / 1e9:,.1f} GB, and it has "
                f"{offer.memory / 1e9:,.1f}"
            )
            continue
        more = judge.plan([count + (at == index) for at, count in enumerate(plan.counts)])
        dearer = more.dollars_hour - plan.dollars_hour
        if more.sps <= plan.sps:
            found[offer.name] = f"one more makes epochs longer: {more.sps / plan.sps - 1:+.1%} samples/s"
        elif goal.cheapest:
            found[offer.name] = f"not needed: one more costs ${dearer:,.2f} an hour"
        elif more.dollars_hour > goal.dollars_hour:
            egress = dearer - offer.dollars_hour
            traffic = f", ${egress:,.2f} of it traffic" if egress > 0.005 else ""
            found[offer.name] = f"one more costs ${dearer:,.2f} an hour{traffic}, which is over the budget"
        else:
            found[offer.name] = f"a swarm of {sum(plan.counts)} peers has no room for more"
    return found


def _words(figures: dict[str, Any]) -> list[str]:
    lines = [f"{n} x {name}" for name, n in figures["peers"].items()]
    lines.append(
        f"{figures['samples_per_second']:,.1f} samples/s, ${figures['dollars_per_hour']:,.2f} an hour, "
        f"${figures['dollars_per_million']:,.2f} a million samples; {figures['plan']}; "
        f"binds: {figures['binds']}"
    )
    lines += [f"left out: {name}: {why}" for name, why in figures["left_out"].items()]
    other = figures["next_best"]
    if other:
        peers = ", ".join(f"{n} x {name}" for name, n in other["peers"].items())
        lines.append(
            f"next best: {peers}: {other['samples_per_second']:,.1f} samples/s, "
            f"${other['dollars_per_hour']:,.2f} an hour"
        )
    return lines


def _replayed(judge: Judge, goal: Goal, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    steps = trace.replay(judge, goal, trace.load(args.trace, judge.inventory), args.join_seconds)
    summary = trace.summary(steps)
    changes = "1 change costs" if summary["changes"] == 1 else f"{summary['changes']} changes cost"
    lines = [
        f"{step.begin:>9,.0f} s  "
        + (
            f"{sum(step.plan.counts)} peers, {step.plan.sps:,.1f} samples/s"
            if step.plan
            else "nobody: no plan was found that meets the goal"
        )
        + ("  (changed)" if step.changed else "")
        for step in steps
    ]
    lines.append(
        f"{summary['samples']:,.0f} samples for ${summary['dollars']:,.2f} in {summary['seconds']:,.0f} s; "
        f"{changes} {summary['join_seconds']:,.0f} s of peers' time"
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
