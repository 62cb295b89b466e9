"""`p2pavg predict`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from p2pavg import codecs
from p2pavg.allreduce.choosing import Topology
from p2pavg.errors import ConfigurationError
from p2pavg.forecast.evidence import Evidence, from_reports
from p2pavg.forecast.inventory import Inventory, load
from p2pavg.forecast.laws import (
    BYTES,
    EpochForecast,
    LinkProfile,
    PeerProfile,
    Workload,
    dollars_per_hour,
    dollars_per_million,
    epoch,
    smallest_target,
)
from p2pavg.forecast.output import emit, usage
from p2pavg.plan import MOST_MEMBERS
from p2pavg.report.distance import distance
from p2pavg.report.prices import PriceTable
from p2pavg.report.reading import load as load_reports

EFFICIENCIES = (0.8, 0.9, 0.95)
_ADDED = re.compile(r"(\d+)x([^@]+)@(.+)")


def register(subparsers: Any) -> None:
    """Add the verb to the command line's sub-parsers."""
    predict = subparsers.add_parser(
        "predict",
        description="Reads what P2PAVG_REPORTS=PATH made peers write, and says what an epoch takes and\n"
        "costs, also with peers added or left out, another target batch, or communication that hides.",
        epilog="example: p2pavg predict --from reports.jsonl --add 4xT4@europe-west1 --inventory offers.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = predict.add_argument
    add("--from", dest="reports", nargs="+", required=True, metavar="JSONL", help="reports of one run")
    add("--run", metavar="RUN", help="which run, when the files hold several")
    add(
        "--add",
        nargs="+",
        default=[],
        metavar="NxTYPE@REGION",
        help="peers more; TYPE: of --inventory, or samples/s",
    )
    add("--without", nargs="+", default=[], metavar="REGION", help="leave a region's peers out")
    add("--target-batch-size", type=float, metavar="N", help="another target batch")
    add("--delay", action="store_true", help="as with delay_updates: communication hides behind calculation")
    add("--plan", choices=("auto", "flat", "two-level"), default="auto", help="of a round's bytes")
    add("--outer", metavar="H:CODEC", help="an average every H epochs' worth of samples, in this codec")
    add("--inventory", metavar="TOML", help="speeds, links and prices of types; see 'p2pavg plan --help'")
    add("--prices", metavar="TOML", help="a price table; see 'p2pavg report --help'")
    add("--json", metavar="PATH", help="write the figures as JSON; - is stdout, alone")
    predict.set_defaults(func=lambda args: usage(predict, args, run_predict))


def run_predict(args: argparse.Namespace) -> int:
    """Say what an epoch will take."""
    evidence = from_reports(load_reports(args.reports, args.run).reports)
    inventory = load(args.inventory, evidence.speed_of) if args.inventory else None
    prices = PriceTable.load(args.prices) if args.prices else None
    job = _job(evidence.job, args)
    members, links = _swarm(evidence, inventory, args.add, args.without)
    money = _Money(inventory, prices, members, links)
    plan = Topology(args.plan)
    found = epoch(job, members, links, evidence.overheads, plan)
    figures = _figures(job, members, found, evidence.half_width, money)
    figures["without"] = [
        {"region": region, **_change(job, members, links, region, evidence, found, money, plan)}
        for region in sorted({member.region for member in members})
        if len({member.region for member in members}) > 1
    ]
    figures["hides_from"] = _hides_from(job, members, links, evidence)
    figures["overshoot_at_most"] = job.steps if args.target_batch_size is not None else 0.0
    lines = _words(figures, members, found)
    if figures["overshoot_at_most"]:
        lines.append(
            f"Peers end an epoch with whole steps: averages of up to {job.target + job.steps:,.0f} samples "
            f"where {job.target:,.0f} are asked, and epochs as much longer. Figures here are of "
            f"{job.target:,.0f}."
        )
    if evidence.epochs < 5:
        lines.append(f"Few epochs were looked at ({evidence.epochs}): the interval is wide.")
    return emit(args.json, figures, lines)


def _job(job: Workload, args: argparse.Namespace) -> Workload:
    if args.target_batch_size is not None:
        if not 0 < args.target_batch_size < 1e15:
            raise ConfigurationError(f"--target-batch-size must be above 0, not {args.target_batch_size:g}")
        job = job.with_target(args.target_batch_size)
    if args.outer:
        steps, colon, codec = args.outer.partition(":")
        if not steps.isdecimal() or not 1 <= int(steps) < 1e9 or (colon and codec not in BYTES):
            raise ConfigurationError(f"--outer is H:CODEC, such as 30:int8, not {args.outer!r}")
        codec = codec or job.contribution
        result = codecs.for_results(codecs.get(codec)).name
        job = replace(job, target=job.target * int(steps), contribution=codec, result=result)
    return replace(job, delayed=job.delayed or args.delay)


def _swarm(
    evidence: Evidence, inventory: Inventory | None, added: Sequence[str], without: Sequence[str]
) -> tuple[list[PeerProfile], dict[tuple[int, int], LinkProfile]]:
    """The members to predict, and their links: measured ones, else those of their regions."""
    kept = [i for i, member in enumerate(evidence.members) if member.region not in without]
    members = [evidence.members[i] for i in kept]
    more = [member for text in added for member in _added(text, inventory, evidence)]
    for region in without:
        if region not in {member.region for member in (*evidence.members, *more)}:
            raise ConfigurationError(f"--without {region!r}: no peer of these reports is there")
    members += [member for member in more if member.region not in without]
    if not members:
        raise ConfigurationError("nobody is left; leave fewer regions out")
    by_region = dict(inventory.links) if inventory else {}
    for (i, j), link in evidence.links.items():
        by_region.setdefault((evidence.members[i].region, evidence.members[j].region), link)
    links: dict[tuple[int, int], LinkProfile] = {}
    for a in range(len(members)):
        for b in range(len(members)):
            if a == b:
                continue
            known = evidence.links.get((kept[a], kept[b])) if max(a, b) < len(kept) else None
            known = known or by_region.get((members[a].region, members[b].region))
            if known is not None:
                links[a, b] = known
            elif max(a, b) >= len(kept):
                raise ConfigurationError(
                    f"no link between {members[a].region!r} and {members[b].region!r} is known; measure it "
                    "with 'p2pavg bench net' and name it in --inventory"
                )
    return members, links


def _added(text: str, inventory: Inventory | None, evidence: Evidence) -> list[PeerProfile]:
    found = _ADDED.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"--add is NxTYPE@REGION, such as 4xT4@europe-west1, not {text!r}")
    count, kind, region = int(found[1]), found[2], found[3]
    if not 1 <= count <= MOST_MEMBERS:
        raise ConfigurationError(f"--add {text}: a swarm has 1 to {MOST_MEMBERS} peers")
    offers = [offer for offer in (inventory.offers if inventory else ()) if offer.kind == kind]
    here = next((offer for offer in offers if offer.region == region), offers[0] if offers else None)
    measured = here.sps if here else evidence.speed_of(kind)
    try:
        speed = float(kind) if measured is None else measured
    except ValueError:
        speed = math.nan
    if not 0 < speed < 1e15:
        raise ConfigurationError(
            f"--add {text}: {kind!r} was never measured: no report is of it; name its samples/s, or an "
            "--inventory with it"
        )
    rent = here.dollars_hour if here else 0.0
    up, down = (here.up, here.down) if here else (None, None)
    return [PeerProfile(f"{kind}@{region}#{n + 1}", region, speed, up, down, rent) for n in range(count)]


class _Money:
    """The cost of an epoch, by the prices at hand."""

    def __init__(
        self,
        inventory: Inventory | None,
        prices: PriceTable | None,
        members: Sequence[PeerProfile],
        links: Mapping[tuple[int, int], LinkProfile],
    ) -> None:
        self.known = prices is not None or inventory is not None
        self._prices = prices
        self.per_gb = dict(inventory.per_gb) if inventory else {}
        if prices is not None:
            for (i, j), link in links.items():
                a, b = members[i].region, members[j].region
                where = distance(a, b, same_host=False, rtt_s=link.rtt)
                self.per_gb[a, b] = prices.gb.get(where, 0.0)

    def dollars(self, found: EpochForecast, members: Sequence[PeerProfile]) -> tuple[float, float]:
        rented = [
            replace(member, dollars_hour=member.dollars_hour or self._hourly(member.region))
            for member in members
        ]
        return dollars_per_hour(found, rented, self.per_gb)

    def _hourly(self, region: str) -> float:
        return self._prices.hourly(region) if self._prices else 0.0


def _figures(
    job: Workload, members: Sequence[PeerProfile], found: EpochForecast, half_width: float, money: _Money
) -> dict[str, Any]:
    rent, traffic = money.dollars(found, members)
    sps = found.samples_per_second
    sent: dict[str, float] = {}
    for (i, j), count in found.transfer.sent.items():
        where = f"{members[i].region or '?'} to {members[j].region or '?'}"
        sent[where] = sent.get(where, 0.0) + count
    return {
        "samples_per_second": sps,
        "interval": [sps / (1 + half_width), sps * (1 + half_width)],
        "epoch_s": found.total,
        "calculation_s": found.calculation,
        "communication_s": found.communication,
        "hidden_s": found.hidden,
        "granularity": found.granularity if found.communication else None,
        "dollars_per_hour": rent + traffic if money.known else None,
        "dollars_per_million": dollars_per_million(found, rent + traffic) if money.known else None,
        "binds": found.transfer.binds,
        "plan": found.transfer.plan,
        "smallest_target_batch": {f"{e:g}": smallest_target(job, members, found, e) for e in EFFICIENCIES},
        "shares": list(found.transfer.shares),
        "bytes_between_regions": sent,
        "peers": len(members),
    }


def _change(
    job: Workload,
    members: Sequence[PeerProfile],
    links: Mapping[tuple[int, int], LinkProfile],
    region: str,
    evidence: Evidence,
    before: EpochForecast,
    money: _Money,
    plan: Topology,
) -> dict[str, float | None]:
    """The changes when a region is left out, as shares."""
    kept = [i for i, member in enumerate(members) if member.region != region]
    place = {i: n for n, i in enumerate(kept)}
    fewer = [members[i] for i in kept]
    between = {(place[i], place[j]): link for (i, j), link in links.items() if i in place and j in place}
    after = epoch(job, fewer, between, evidence.overheads, plan)
    costs = [
        dollars_per_million(found, sum(money.dollars(found, who)))
        for found, who in ((before, members), (after, fewer))
    ]
    return {
        "samples_per_second": after.samples_per_second / before.samples_per_second - 1,
        "dollars_per_million": costs[1] / costs[0] - 1 if costs[0] else None,
    }


def _hides_from(
    job: Workload,
    members: Sequence[PeerProfile],
    links: Mapping[tuple[int, int], LinkProfile],
    evidence: Evidence,
) -> dict[str, int]:
    """For each codec, how many epochs' worth of local steps communication would hide behind."""
    found = {}
    for codec in ("fp16", "int8", "int4"):
        result = codecs.for_results(codecs.get(codec)).name
        one = epoch(replace(job, contribution=codec, result=result), members, links, evidence.overheads)
        found[codec] = max(1, math.ceil(one.communication / one.calculation))
    return found


def _words(figures: Mapping[str, Any], members: Sequence[PeerProfile], found: EpochForecast) -> list[str]:
    low, high = figures["interval"]
    lines = [
        f"{figures['samples_per_second']:,.1f} samples/s ({low:,.1f} to {high:,.1f}), {len(members)} peers: "
        f"an epoch of {found.total:.2f} s, {found.calculation:.2f} calculation and "
        f"{found.communication:.2f} communication"
        + (f", {found.hidden:.2f} of it hidden" if found.hidden else ""),
        f"What binds a transfer of {found.transfer.seconds:.2f} s ({found.transfer.plan}): "
        f"{found.transfer.binds}.",
    ]
    if figures["dollars_per_hour"] is not None:
        lines.append(
            f"${figures['dollars_per_hour']:,.2f} an hour, "
            f"${figures['dollars_per_million']:,.2f} a million samples."
        )
    targets = ", ".join(f"{float(e):.0%} from {n:,.0f}" for e, n in figures["smallest_target_batch"].items())
    lines.append(f"Efficiency by target batch, samples: {targets}.")
    hides = ", ".join(f"{n} with {codec}" for codec, n in figures["hides_from"].items())
    lines.append(f"With outer steps, epochs' worth of local steps that hide the communication: {hides}.")
    for row in figures["without"]:
        cost = "" if row["dollars_per_million"] is None else f", {row['dollars_per_million']:+.0%} $ a sample"
        verdict = "leave it out" if row["samples_per_second"] > 0 else "keep it"
        where = row["region"] or "unnamed"
        lines.append(f"Without {where}: {row['samples_per_second']:+.0%} samples/s{cost}: {verdict}.")
    return lines
