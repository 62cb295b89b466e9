"""`p2pavg predict`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from p2pavg import codecs
from p2pavg.allreduce.choosing import Topology
from p2pavg.errors import ConfigurationError
from p2pavg.forecast.evidence import FEW, Evidence, from_reports
from p2pavg.forecast.fit import fits, more, told
from p2pavg.forecast.inventory import Inventory, load
from p2pavg.forecast.joins import JoinForecast, Newcomers, TooManyJoinsError, with_newcomers
from p2pavg.forecast.laws import (
    BYTES,
    EpochForecast,
    LinkProfile,
    Overheads,
    PeerProfile,
    Swarm,
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
_HARDLY = 0.005  # of the samples/s: for so few more, nobody pays
_MENTIONED = 0.005  # of the samples: fewer that are discarded are not told of
NOWHERE = "peers without region="
HELP_OUTER = "an average every H epochs' worth of samples, in this codec; default: the run's"
HELP_JOINS = "peers that come and need the state: newcomers, restarts, returns after long absences"
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
    more = "peers more; TYPE: of --inventory, or samples/s"
    add("--add", nargs="+", default=[], metavar="NxTYPE@REGION", help=more)
    add("--without", nargs="+", default=[], metavar="REGION", help="leave a region's peers out")
    add("--target-batch-size", type=float, metavar="N", help="another target batch")
    add("--delay", action="store_true", help="as with delay_updates: communication hides behind calculation")
    add("--plan", choices=("auto", "flat", "two-level"), default="auto", help="of a round's bytes")
    add("--outer", metavar="H[:CODEC]", help=HELP_OUTER)
    add("--joins-per-hour", type=float, metavar="N", help=HELP_JOINS)
    add("--inventory", metavar="TOML", help="speeds, links and prices of types; see 'p2pavg plan --help'")
    add("--prices", metavar="TOML", help="a price table; see 'p2pavg report --help'")
    add("--json", metavar="PATH", help="write the figures as JSON; - is stdout, alone")
    predict.set_defaults(func=lambda args: usage(predict, args, run_predict))


@dataclass(frozen=True, slots=True)
class _Terms:
    """On which swarms are compared. per_gb: dollars for 1e9 bytes from region to region; None: no prices."""

    overheads: Overheads
    plan: Topology
    per_gb: Mapping[tuple[str, str], float] | None
    newcomers: Newcomers

    def epoch(self, job: Workload, swarm: Swarm) -> EpochForecast:
        return self.with_joins(job, swarm)[0]

    def with_joins(self, job: Workload, swarm: Swarm) -> tuple[EpochForecast, JoinForecast | None]:
        return with_newcomers(
            job, swarm, self.newcomers, lambda job, swarm: epoch(job, swarm, self.overheads, self.plan)
        )

    def dollars_hour(self, found: EpochForecast, swarm: Swarm) -> float | None:
        if self.per_gb is None:
            return None
        return sum(dollars_per_hour(found, swarm, self.per_gb))


def run_predict(args: argparse.Namespace) -> int:
    """Say what an epoch will take."""
    evidence = from_reports(load_reports(args.reports, args.run).reports)
    inventory = load(args.inventory, evidence) if args.inventory else None
    prices = PriceTable.load(args.prices) if args.prices else None
    job = _job(evidence.job, args)
    swarm = _swarm(evidence, inventory, args.add, args.without)
    per_gb = dict(inventory.per_gb) if inventory else None
    if prices is not None:
        swarm, per_gb = _priced(swarm, per_gb or {}, prices)
    newcomers = _newcomers(evidence, args.joins_per_hour, len(swarm.members))
    terms = _Terms(evidence.overheads, Topology(args.plan), per_gb, newcomers)
    found, joins = terms.with_joins(job, swarm)
    if newcomers.each_hour and joins is None:
        raise ConfigurationError(
            "no peer has a link to another that could give newcomers the state; leave --joins-per-hour out"
        )
    figures = _figures(swarm, found, evidence.half_width, terms)
    places = sorted({member.region for member in swarm.members})
    figures["without"] = [
        {"region": place, **_change(found, job, swarm, place, terms)} for place in places if len(places) > 1
    ]
    figures["hides_from"] = _hides_from(job, swarm, terms)
    figures["overshoot_at_most"] = job.steps if args.target_batch_size is not None else 0.0
    delay, outer = job.delayed and not evidence.job.delayed, args.outer is not None and not evidence.outer
    figures["prices_unmatched"] = None if prices is None else prices.unmatched(places)
    extra = more(job.values, delay=delay, outer=outer)
    figures["memory"] = fits(swarm.members, extra)
    lines = _words(figures, found) + told(figures["memory"], extra)
    if figures["prices_unmatched"]:
        lines.append(f"In the price table: {figures['prices_unmatched']}.")
    if joins is not None:
        figures["joins"] = {
            "per_hour": args.joins_per_hour,
            "state_bytes": evidence.state,
            "seconds_each": joins.seconds,
            "share_of_time": joins.share,
            "bytes_each": joins.nbytes,
            "bytes_of_a_result": joins.result,
        }
        figures["bytes_per_epoch"]["joins"] = joins.an_epoch
        lines.append(
            f"{args.joins_per_hour:g} joins an hour: each downloads {joins.nbytes / 1e6:,.1f} MB of state "
            f"and results in {joins.seconds:,.0f} s, {joins.share:.1%} of the peers' time and "
            f"{joins.an_epoch / sum(found.wire.values()):.0%} of the traffic."
        )
    if figures["overshoot_at_most"]:
        lines.append(
            f"Peers end an epoch with whole steps: averages of up to {job.target + job.steps:,.0f} samples "
            f"where {job.target:,.0f} are asked, and epochs as much longer. Figures here are of "
            f"{job.target:,.0f}."
        )
    figures["discarded"] = evidence.discarded
    if evidence.discarded >= _MENTIONED:
        lines.append(
            f"Of the samples that peers trained on, {evidence.discarded:.1%} were discarded, for faults or "
            "because others had drawn them too; predictions are of epochs without."
        )
    if len(evidence.seconds) < FEW:
        lines.append(f"Few epochs were looked at ({len(evidence.seconds)}): the interval is wide.")
    return emit(args.json, figures, lines)


def _newcomers(evidence: Evidence, per_hour: float | None, peers: int) -> Newcomers:
    if per_hour is None:
        return Newcomers()
    if not 0 < per_hour < 1e15:
        raise ConfigurationError(f"--joins-per-hour must be above 0 and below 1e15, not {per_hour:g}")
    if not evidence.state:
        raise ConfigurationError(
            "no report tells how large the state is that newcomers download; take reports of two epochs or "
            "more"
        )
    return Newcomers(per_hour / peers, evidence.state)


def _job(job: Workload, args: argparse.Namespace) -> Workload:
    if args.target_batch_size is not None:
        if not 0 < args.target_batch_size < 1e15:
            raise ConfigurationError(
                f"--target-batch-size must be above 0 and below 1e15, not {args.target_batch_size:g}"
            )
        job = replace(job, target=args.target_batch_size)
    if args.outer is not None:
        steps, colon, codec = args.outer.partition(":")
        if not steps.isdecimal() or not 1 <= int(steps[:20]) < 1e9 or (colon and codec not in BYTES):
            raise ConfigurationError(f"--outer is H or H:CODEC, such as 30:int8, not {args.outer!r}")
        job = _encoded(replace(job, target=job.target * int(steps)), codec or job.contribution)
    return replace(job, delayed=job.delayed or args.delay)


def _encoded(job: Workload, codec: str) -> Workload:
    return replace(job, contribution=codec, result=codecs.for_results(codecs.get(codec)).name)


def _swarm(
    evidence: Evidence, inventory: Inventory | None, added: Sequence[str], without: Sequence[str]
) -> Swarm:
    """The members to predict, and their links: what rounds measured between the same peers or regions comes
    before what an inventory tells.
    """
    there, measured = evidence.swarm.members, evidence.swarm.links
    members = [*there, *(member for text in added for member in _added(text, inventory, evidence))]
    for region in without:
        if region not in {member.region for member in members}:
            raise ConfigurationError(f"--without {region!r}: no peer of these reports is there")
    between: dict[tuple[str, str], list[LinkProfile]] = {}
    for (i, j), link in measured.items():
        between.setdefault((there[i].region, there[j].region), []).append(link)
    by_region = dict(inventory.links) if inventory else {}
    by_region |= {ends: sorted(of, key=lambda k: k.rate)[len(of) // 2] for ends, of in between.items()}
    kept = [i for i, member in enumerate(members) if member.region not in without]
    if not kept:
        raise ConfigurationError("nobody is left; leave fewer regions out")
    links = dict(measured)
    for i, j in permutations(kept, 2):
        ends = members[i].region, members[j].region
        if (i, j) not in links and ends in by_region:
            links[i, j] = by_region[ends]
        elif (i, j) not in links and max(i, j) >= len(there):
            raise ConfigurationError(_unknown(*ends))
    return Swarm(members, links).only(kept)


def _unknown(one: str, other: str) -> str:
    if one and other:
        return (
            f"no link between {one!r} and {other!r} is known; measure it with 'p2pavg bench net' and name it "
            "in --inventory"
        )
    return (
        f"the peers of these reports told no region, so that their links to {one or other!r} are not known: "
        "start them with region=, and take the reports of that run"
    )


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
            f"--add {text}: {kind!r} was never measured: no report is of it; name its samples/s, above 0 and "
            "below 1e15, or an --inventory with it"
        )
    rent = here.dollars_hour if here else 0.0
    up, down = (here.up, here.down) if here else (None, None)
    memory = evidence.memory_of(kind)
    if here and here.memory:
        memory = replace(memory, **{"device" if memory.device_peak else "host": round(here.memory)})
    return [
        PeerProfile(f"{kind}@{region}#{n + 1}", region, speed, up, down, rent, f"{kind}@{region}", memory)
        for n in range(count)
    ]


def _priced(
    swarm: Swarm, per_gb: Mapping[tuple[str, str], float], prices: PriceTable
) -> tuple[Swarm, dict[tuple[str, str], float]]:
    """The swarm with rents, and dollars for 1e9 bytes from region to region, by a table of prices."""
    members = [
        replace(member, dollars_hour=member.dollars_hour or prices.hourly(member.region))
        for member in swarm.members
    ]
    told = dict(per_gb)
    for (i, j), link in swarm.links.items():
        here, there = members[i].region, members[j].region
        if link.on_host:
            continue
        if here and there:
            told[here, there] = prices.between(here, there)
        else:
            where = distance(here, there, same_host=False, rtt_s=link.rtt)
            told[here, there] = prices.gb.get(where, 0.0)
    return replace(swarm, members=members), told


def _figures(swarm: Swarm, found: EpochForecast, half_width: float, terms: _Terms) -> dict[str, Any]:
    sps, members = found.samples_per_second, swarm.members
    between: dict[str, float] = {}
    traffic: dict[str, dict[str, float]] = {}
    for (i, j), count in found.wire.items():
        ends = members[i].region, members[j].region
        named = f"{ends[0] or '?'} to {ends[1] or '?'}"
        between[named] = between.get(named, 0.0) + count
        link = swarm.links.get((i, j)) or LinkProfile(0.0, 0.0)
        where = distance(*ends, same_host=link.on_host, rtt_s=link.rtt)
        of = traffic.setdefault(where, {"bytes": 0.0, "dollars": 0.0})
        million = 1e6 * count / found.samples
        of["bytes"] += million
        if not link.on_host:
            of["dollars"] += million / 1e9 * (terms.per_gb or {}).get(ends, 0.0)
    parts = {member.region: 0.0 for member in members}
    for member, share in zip(members, found.transfer.shares, strict=True):
        parts[member.region] += share
    return {
        **found.to_dict(terms.dollars_hour(found, swarm)),
        "interval": [sps / (1 + half_width), sps * (1 + half_width)],
        "traffic_per_million": traffic,
        "smallest_target_batch": {f"{e:g}": smallest_target(swarm, found, e) for e in EFFICIENCIES},
        "smallest_target_batch_delayed": smallest_target(swarm, found),
        "shares": list(found.transfer.shares),
        "parts": parts,
        "bytes_between_regions": between,
        "bytes_per_epoch": {
            "averages": sum(found.transfer.sent.values()),
            "wire": sum(found.wire.values()),
        },
        "peers": len(members),
    }


def _change(
    before: EpochForecast, job: Workload, swarm: Swarm, region: str, terms: _Terms
) -> dict[str, float | None]:
    """The changes when a region is left out, as shares. before: with it."""
    fewer = swarm.only([i for i, member in enumerate(swarm.members) if member.region != region])
    try:
        after = terms.epoch(job, fewer)
    except TooManyJoinsError:  # over the links that are left
        return {"samples_per_second": -1.0, "dollars_per_million": None}
    costs = [
        dollars_per_million(found, terms.dollars_hour(found, who) or 0.0)
        for found, who in ((before, swarm), (after, fewer))
    ]
    return {
        "samples_per_second": after.samples_per_second / before.samples_per_second - 1,
        "dollars_per_million": costs[1] / costs[0] - 1 if costs[0] else None,
    }


def _hides_from(job: Workload, swarm: Swarm, terms: _Terms) -> dict[str, int]:
    """For each codec, how many epochs' worth of local steps communication would hide behind."""
    epochs = {codec: terms.epoch(_encoded(job, codec), swarm) for codec in ("fp16", "int8", "int4")}
    return {codec: max(1, math.ceil(one.communication / one.calculation)) for codec, one in epochs.items()}


def _words(figures: Mapping[str, Any], found: EpochForecast) -> list[str]:
    low, high = figures["interval"]
    parts = ", ".join(f"{region or NOWHERE} {share:.0%}" for region, share in figures["parts"].items())
    lines = [
        f"{figures['samples_per_second']:,.1f} samples/s ({low:,.1f} to {high:,.1f}), "
        f"{figures['peers']} peers: an epoch of {found.total:.2f} s, {found.calculation:.2f} calculation and "
        f"{found.communication:.2f} communication"
        + (f", {found.hidden:.2f} of it hidden" if found.hidden else "")
        + (f": granularity {found.granularity:.2f}" if found.communication else ""),
        f"What binds a transfer of {found.transfer.seconds:.2f} s ({found.transfer.plan}): "
        f"{found.transfer.binds}. Parts: {parts}.",
    ]
    priced = figures["dollars_per_hour"] is not None
    if priced:
        lines.append(
            f"${figures['dollars_per_hour']:,.2f} an hour, "
            f"${figures['dollars_per_million']:,.2f} a million samples."
        )
    traffic = ", ".join(
        f"{of['bytes'] / 1e9:,.1f} GB over links of class {where}"
        + (f" (${of['dollars']:,.2f})" if priced else "")
        for where, of in figures["traffic_per_million"].items()
    )
    lines += [f"Traffic of a million samples: {traffic}."] if traffic else []
    targets = ", ".join(f"{float(e):.0%} from {n:,.0f}" for e, n in figures["smallest_target_batch"].items())
    delayed = figures["smallest_target_batch_delayed"]
    lines.append(f"Efficiency by target batch, samples: {targets}; delayed: all from {delayed:,.0f}.")
    hides = ", ".join(f"{n} with {codec}" for codec, n in figures["hides_from"].items())
    lines.append(f"With outer steps, epochs' worth of local steps that hide the communication: {hides}.")
    for row in figures["without"]:
        cost = "" if row["dollars_per_million"] is None else f", {row['dollars_per_million']:+.0%} $ a sample"
        least = -_HARDLY if (row["dollars_per_million"] or 0.0) < 0 else 0.0
        verdict = "leave it out" if row["samples_per_second"] > least else "keep it"
        where = row["region"] or NOWHERE
        lines.append(f"Without {where}: {row['samples_per_second']:+.0%} samples/s{cost}: {verdict}.")
    return lines
