"""What `p2pavg predict` said after the quiet beginning, beside what came: samples/s, bytes and dollars."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.world_check.logs import Event, Life, Run

PAYLOAD = 1448 / 1500  # of an IP packet's bytes
NEAR_S = 3.0  # of an average's begin or end, in which a newcomer's download may count for either


def prediction(folder: Path, run: Run) -> dict[str, Any]:
    """Said and came. A prediction knows no faults: it is held against what the living had time for, and
    against what averages of as many peers send.
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
    expected = float(said["samples_per_second"])
    return {
        "samples_per_second_predicted": round(expected, 2),
        "samples_per_second_came": round(came, 2),
        "alive_share": round(alive, 4),
        "came_of_predicted_for_the_living": round(came / (expected * alive), 4) if expected * alive else None,
        "said": {key: said[key] for key in ("epoch_s", "dollars_per_million", "binds") if key in said},
        **(_bytes(run, said, asked["epoch"]) if "bytes_per_epoch" in said else {}),
        "dollars_per_million_came": _dollars(run),
    }


def _alive_between(lives: list[Life], slowness: dict[str, float], begin: float, end: float) -> float:
    """Seconds of the living, each by how fast its place is."""
    total = 0.0
    for life in lives:
        if life.up is not None:
            since, until = max(begin, float(life.up["at"])), min(end, life.until)
            away = sum(max(0.0, min(until, b) - max(since, a)) for a, b in life.frozen)
            total += max(0.0, until - since - away) / slowness[life.place]
    return total


def _bytes(run: Run, said: dict[str, Any], since: int) -> dict[str, Any]:
    """IP bytes of averages beside what was foretold for as many members: of the median one without a
    newcomer, by its members' reports; and of all that the router counted, joins and repairs included.
    """
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
    whole, expected = [], 0.0
    for epoch, chained in run.chain.items():
        begin, end = ends.get(epoch), ends.get(epoch + 1)
        seconds = said["epoch_s"] if begin is None or end is None else end - begin
        due = _due(said, sum(member["voter"] for member in chained["members"]), seconds)
        expected += due
        told = reports[epoch]
        if begin is None or end is None or epoch < since or not _all_there(told) or due == 0:
            continue
        if not any(life.up and begin - NEAR_S < life.up["at"] < end + NEAR_S for life in run.lives):
            whole.append(sum(report["wire_bytes_sent"] for report in told) / due)
    routed = sum(count for _, _, count in _routed(run))
    return {
        "bytes_per_average_predicted": round(said["bytes_per_epoch"]["wire"]),
        "averages_without_a_newcomer": len(whole),
        "bytes_of_averages_of_predicted": round(statistics.median(whole), 4) if whole else None,
        "all_bytes_of_predicted": round(routed / expected, 4) if routed and expected else None,
    }


def _due(said: dict[str, Any], members: int, seconds: float) -> float:
    """What was foretold for n peers, of so many: each but one of them sends its vector once each way, and
    what links carry beside grows with time and pairs.
    """
    n, each = said["peers"], said["bytes_per_epoch"]
    averages = each["averages"] / PAYLOAD
    beside = (each["wire"] - averages) / (n * (n - 1) * said["epoch_s"])
    return float(averages * (members - 1) / (n - 1) + beside * members * (members - 1) * seconds)


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
