"""What `p2pavg predict` said after the quiet beginning, beside what came: samples/s, bytes and dollars."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.world_check.logs import Event, Interval, Life, Run

PAYLOAD = 1448 / 1500  # of an IP packet's bytes
NEAR_S = 3.0  # of an average's begin or end, in which a newcomer's download may count for either


def prediction(folder: Path, run: Run) -> dict[str, Any]:
    """Said and came. A prediction knows joins, and no other faults: it is held against what the living had
    time for, and against what averages of as many peers, and as long lives, send.
    """
    path = folder / "predict.json"
    said = json.loads(path.read_text()) if path.exists() else None
    asked = next(iter(run.of("predicted")), None)
    if said is None or asked is None:
        return {}
    later = [r for epoch, r in run.chain.items() if epoch >= asked["epoch"]]
    begin, end = asked["at"], max(life.until for life in run.lives)
    came = sum(report["samples"] for report in later) / (end - begin)
    slowness = {place["name"]: place["slowness"] for place in run.facts["places"]}
    every = sum(1 / one for one in slowness.values())
    alive = _alive_between(run.lives, slowness, begin, end) / ((end - begin) * every)
    joining = said.get("joins", {}).get("share_of_time", 0.0)  # nobody is alive before it has joined
    expected = float(said["samples_per_second"]) / (1 - joining)
    return {
        "samples_per_second_predicted": round(float(said["samples_per_second"]), 2),
        "samples_per_second_came": round(came, 2),
        "alive_share": round(alive, 4),
        "came_of_predicted_for_the_living": round(came / (expected * alive), 4) if expected * alive else None,
        "said": {key: said[key] for key in ("epoch_s", "dollars_per_million", "binds") if key in said},
        **(_bytes(run, said, asked) if "bytes_per_epoch" in said else {}),
        "dollars_per_million_came": _dollars(run),
    }


def _alive_between(lives: list[Life], slowness: dict[str, float], begin: float, end: float) -> float:
    """Seconds of the living, each by how fast its place is."""
    total = 0.0
    for life in lives:
        for since, until in _awake(life):
            total += max(0.0, min(end, until) - max(begin, since)) / slowness[life.place]
    return total


def _awake(life: Life) -> list[Interval]:
    """When it was in the run and ran."""
    found = [] if life.up is None else [(float(life.up["at"]), life.until)]
    for a, b in life.frozen:
        found = [piece for since, to in found for piece in ((since, min(to, a)), (max(since, b), to))]
    return [(since, to) for since, to in found if to > since]


def _together(lives: list[Life]) -> float:
    """Seconds in which two were awake, for each ordered pair of places."""
    spans = [(life.place, _awake(life)) for life in lives]
    return sum(
        max(0.0, min(to, until) - max(since, begin))
        for place, one in spans
        for other, theirs in spans
        if place != other
        for since, to in one
        for begin, until in theirs
    )


def _bytes(run: Run, said: dict[str, Any], asked: Event) -> dict[str, Any]:
    """IP bytes of averages beside what was foretold for as many members: of the median one without a
    newcomer, by its members' reports; and of all that the router counted, repairs included, beside averages,
    results for whoever missed one, links between the living, and the joins that were foretold.
    """
    since, joins, each = asked["epoch"], said.get("joins", {}), said["bytes_per_epoch"]
    reports: dict[int, list[Event]] = defaultdict(list)
    for life in run.lives:
        for report in life.reports:
            chained = run.chain.get(report["epoch"])
            if report["members"] and chained and report["lineage"] == chained["lineage"]:
                reports[report["epoch"]].append(report)
    times: dict[int, list[float]] = defaultdict(list)
    for life in run.lives:
        for event in life.of("theta"):
            times[event["epoch"]].append(event["at"])
    ends = {epoch: statistics.median(at) for epoch, at in times.items()}
    averages, beside = _law(said)
    expected = beside * _together(run.lives) + asked.get("joins", 0) * joins.get("bytes_each", 0.0)
    whole = []
    for epoch, chained in run.chain.items():
        begin, end = ends.get(epoch), ends.get(epoch + 1)
        seconds = said["epoch_s"] if begin is None or end is None else end - begin
        members, told = sum(member["voter"] for member in chained["members"]), reports[epoch]
        expected += averages * (members - 1) + _handed(told) * joins.get("bytes_of_a_result", 0.0)
        due = averages * (members - 1) + beside * members * (members - 1) * seconds
        if begin is None or end is None or epoch < since or not _all_there(told) or due == 0:
            continue
        if not any(life.up and begin - NEAR_S < life.up["at"] < end + NEAR_S for life in run.lives):
            whole.append(sum(report["wire_bytes_sent"] for report in told) / due)
    routed = sum(count for _, _, count in _routed(run))
    return {
        "bytes_per_average_predicted": round(each["wire"] - each.get("joins", 0.0)),
        "averages_without_a_newcomer": len(whole),
        "bytes_of_averages_of_predicted": round(statistics.median(whole), 4) if whole else None,
        "all_bytes_of_predicted": round(routed / expected, 4) if routed and expected else None,
    }


def _law(said: dict[str, Any]) -> tuple[float, float]:
    """IP bytes: of an average for each member but one, which sends its vector once each way; and in a second
    of each link beside.
    """
    n, each = said["peers"], said["bytes_per_epoch"]
    averages = each["averages"] / PAYLOAD
    beside = (each["wire"] - averages - each.get("joins", 0.0)) / (n * (n - 1) * said["epoch_s"])
    return averages / (n - 1), beside


def _handed(told: list[Event]) -> int:
    """How many got the result of this average later."""
    voters = {member["peer"] for report in told[:1] for member in report["members"] if member["voter"]}
    return len({report["peer"] for report in told} - voters)


def _all_there(told: list[Event]) -> bool:
    """Whether each member told of it, and nobody else, who has got the result later, did."""
    members = {member["peer"] for report in told[:1] for member in report["members"] if member["voter"]}
    healed = any("healed" in report["discarded_why"] for report in told)
    return not healed and members == {report["peer"] for report in told} != set()


def _routed(run: Run) -> list[tuple[str, str, int]]:
    """(from, to, bytes) of what the peers sent, but to the stranger."""
    names = {place["name"] for place in run.facts["places"]}
    return [
        (path["src"], path["dst"], path["sent_bytes"])
        for lab in run.of("lab")
        for path in lab["paths"]
        if path["src"] in names and path["dst"] != "stranger"
    ]


def _dollars(run: Run) -> float | None:
    """For a million samples: the rent of who was alive, and what each machine sent to other regions."""
    places = {place["name"]: place for place in run.facts["places"]}
    rent = sum(life.alive_s / 3600 * places[life.place].get("dollars_per_hour", 0.0) for life in run.lives)
    region = {name: place.get("region") for name, place in places.items()}
    traffic = sum(
        count / 1e9 * places[src].get("dollars_per_gb", 0.0)
        for src, dst, count in _routed(run)
        if region[src] != region.get(dst)
    )
    samples = sum(report["samples"] for report in run.chain.values())
    return round(1e6 * (rent + traffic) / samples, 3) if samples else None
