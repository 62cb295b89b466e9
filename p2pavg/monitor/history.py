"""A run's reports, read back from files and summed up, as data and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from p2pavg.monitor.health import duration
from p2pavg.printable import counted, figure, size
from p2pavg.report import PHASES, RoundReport, is_number
from p2pavg.report.distance import Distance
from p2pavg.report.prices import PriceTable, per_hour, per_million
from p2pavg.report.reading import Run

MOST_CAUSES = 5


def losses(run: Run) -> list[tuple[int, float]]:
    """(epoch, mean over the peers) of the figure that was logged as "loss"."""
    found = []
    for epoch, reports in run.epochs().items():
        values = [r.extra["loss"] for r in reports if is_number(r.extra.get("loss"))]
        if values:
            found.append((epoch, sum(values) / len(values)))
    return found


def summary(run: Run, prices: PriceTable | None = None) -> dict[str, Any]:
    """Totals as JSON data: seconds, samples, bytes. Shares are of all peers' wall clock."""
    reports, epochs = run.rounds(), run.epochs()
    began = min(report.finished_at - report.seconds_total for report in reports)
    seconds = max(report.finished_at for report in reports) - began
    samples = sum(max(report.samples for report in row) for row in epochs.values())
    total = sum(report.seconds_total for report in reports) or 1.0
    communication = sum(report.seconds_communication for report in reports)
    calculation = sum(report.seconds_calculation for report in reports)
    discarded: Counter[str] = Counter()
    for report in run.reports:
        counts = report.discarded_samples or (0,) * len(report.discarded_why)
        for why, count in zip(report.discarded_why, counts, strict=False):
            discarded[why] += count
    lost: dict[tuple[int, str], int] = {}  # by epoch and peer; survivors may have heard of it at other times
    for report in run.reports:
        for peer, count in report.samples_lost.items():
            lost[report.epoch, peer] = max(count, lost.get((report.epoch, peer), 0))
    wire = sum(report.wire_bytes_sent for report in run.reports)
    found = losses(run)
    made: dict[str, Any] = {
        "run_id": run.run_id,
        "peers": len({report.peer for report in reports}),
        "members_least": min(len(report.members) for report in reports),
        "members_most": max(len(report.members) for report in reports),
        "first_epoch": reports[0].epoch,
        "last_epoch": reports[-1].epoch,
        "epochs": len(epochs),
        "seconds": seconds,
        "samples": samples,
        "samples_per_second": samples / seconds if seconds > 0 else 0.0,
        "granularity": calculation / communication if communication > 0 else None,
        "share": {name: sum(getattr(r, f"seconds_{name}") for r in reports) / total for name in PHASES},
        "share_overlapped": sum(report.seconds_overlapped for report in reports) / total,
        "bytes_sent": sum(report.bytes_sent for report in reports),
        "wire_bytes_sent": wire,
        "wire_bytes_sent_by_distance": {str(where): count for where, count in sent(reports).items()},
        "bytes_by_stage": dict(stages(reports)),
        "egress_dollars": sum(report.egress_dollars for report in reports),
        "egress_dollars_flat": sum(report.egress_dollars_flat for report in reports),
        "seconds_stretched": sum(report.seconds_stretched for report in reports),
        "plans": dict(Counter(row[0].plan for row in epochs.values() if row[0].plan)),
        "egress_bytes_per_hour": 3600 * wire / seconds if seconds > 0 else 0.0,
        "failed_attempts": max_attempts(epochs.values()),
        "causes": _causes(reports),
        "samples_discarded": sum(report.samples_discarded for report in run.reports),
        "discarded_why": dict(discarded),
        "samples_lost": sum(lost.values()),
        "lineages_most": max(len({report.lineage for report in row}) for row in epochs.values()),
        "loss_first": found[0][1] if found else None,
        "loss_last": found[-1][1] if found else None,
        "cut": list(run.cut),
    }
    if prices is not None:
        dollars = sum(
            prices.dollars(r.region, r.seconds_total, r.sent_by_distance, r.sent_to_regions) for r in reports
        )
        made["dollars"] = dollars
        made["dollars_per_hour"] = per_hour(dollars, seconds)
        made["dollars_per_million_samples"] = per_million(dollars, samples)
        made["prices_unmatched"] = prices.unmatched({report.region for report in reports})
    return made


def sent(reports: Iterable[RoundReport]) -> dict[Distance, int]:
    """IP bytes that all peers sent, by class of link."""
    counts: Counter[Distance] = Counter()
    for report in reports:
        counts.update(report.sent_by_distance)
    return {where: counts[where] for where in Distance if counts[where]}


def stages(reports: Iterable[RoundReport]) -> Counter[str]:
    """Encoded bytes that all peers sent, by stage of the plans."""
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report.bytes_by_stage)
    return counts


def max_attempts(epochs: Iterable[Sequence[RoundReport]]) -> int:
    """How many attempts failed, each counted once though every member reports it."""
    return sum(max(max(0, report.attempts - 1) for report in row) for row in epochs)


def _causes(reports: Iterable[RoundReport]) -> dict[str, int]:
    counts = Counter(cause for report in reports for cause in set(report.causes))
    return dict(counts.most_common(MOST_CAUSES))


def words(made: Mapping[str, Any]) -> list[str]:
    """The summary in sentences."""
    few, many = made["members_least"], made["members_most"]
    members = counted(many, "member") if few == many else f"{few} to {many} members"
    share = made["share"]
    lines = [
        f"run {made['run_id']}: {counted(made['epochs'], 'epoch')} "
        f"({made['first_epoch']} to {made['last_epoch']}) in {duration(made['seconds'])}, "
        f"{members} a round, reports of {counted(made['peers'], 'peer')}",
        f"{made['samples']} samples, {figure(made['samples_per_second'], 4)} per second",
        "of the time: "
        + ", ".join(f"{name} {100 * share[name]:.1f}%" for name in PHASES if share[name] > 5e-4),
    ]
    if made["share_overlapped"] > 0:
        lines.append(
            f"{100 * made['share_overlapped']:.1f}% of the time, round or update ran behind the calculation"
        )
    if made["granularity"] is not None:
        lines.append(f"granularity {figure(made['granularity'])} (calculation over communication)")
    by_distance = ", ".join(f"{size(n)} {where}" for where, n in made["wire_bytes_sent_by_distance"].items())
    lines.append(
        f"sent {size(made['wire_bytes_sent'])} ({by_distance or 'nothing'}), "
        f"{size(made['egress_bytes_per_hour'])} an hour"
    )
    if made["bytes_by_stage"]:
        by_stage = ", ".join(f"{size(n)} of {stage}" for stage, n in made["bytes_by_stage"].items())
        plans = ", ".join(f"{counted(n, 'round')} {kind}" for kind, n in made["plans"].items())
        lines.append(f"by stage: {by_stage} ({plans})")
    if made["egress_dollars_flat"] > 0:
        spared = made["egress_dollars_flat"] - made["egress_dollars"]
        lines.append(
            f"gradients cost $ {figure(made['egress_dollars'], 4)} by the plans of the rounds, "
            f"$ {figure(spared, 4)} less than flat plans would have"
        )
    if made["seconds_stretched"] > 0:
        lines.append(
            f"epochs were {duration(made['seconds_stretched'])} longer in all than their samples needed, "
            "to keep to max_egress_usd_per_hour"
        )
    if made["failed_attempts"]:
        causes = "; ".join(f"{cause} ({count})" for cause, count in made["causes"].items())
        lines.append(
            f"{counted(made['failed_attempts'], 'attempt')} failed and had to be made again: "
            f"{causes or 'no cause told'}"
        )
    else:
        lines.append("every round succeeded at the first attempt")
    if made["samples_discarded"]:
        why = ", ".join(f"{count} {reason}" for reason, count in made["discarded_why"].items())
        lines.append(f"discarded {counted(made['samples_discarded'], 'sample')}: {why}")
    if made["samples_lost"]:
        lines.append(
            f"{counted(made['samples_lost'], 'sample')} of peers that died or were cut off were in no "
            "average then; they are lost, but for those of peers that came back"
        )
    if made["lineages_most"] > 1:
        lines.append(
            "at some epoch, parts of the swarm had averaged apart; the others' later reports say who healed"
        )
    if made["loss_first"] is not None:
        lines.append(f"loss {made['loss_first']:.4g} to {made['loss_last']:.4g}")
    if "dollars" in made:
        lines.append(
            f"$ {figure(made['dollars'], 4)}: {figure(made['dollars_per_hour'], 4)} an hour, "
            f"{figure(made['dollars_per_million_samples'], 4)} per million samples"
        )
    if made.get("prices_unmatched"):
        lines.append(made["prices_unmatched"])
    return lines
