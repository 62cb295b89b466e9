"""What a chaos run's events prove: pure functions of the JSONL, so that every claim can be recomputed."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
HANG_S = 60.0  # a live peer that says nothing for so long hangs


def summarise(events: Sequence[Event], *, epochs: int, capacity: float) -> dict[str, Any]:
    """Count what went wrong.

    events: in order of arrival; each has "who" (the process), "t" (its kind) and "at" (time.monotonic()).
    capacity: samples per second of one peer that never waits.
    """
    applied = [e for e in events if e["t"] == "epoch"]
    alive = _alive(events)
    surviving = _surviving_lineage(applied, alive)
    stalls = _stalls(applied, events)
    lost, doubled = _samples(events, applied, surviving, alive)
    return {
        "epochs_finished": max((e["epoch"] for e in applied), default=-1) + 1,
        "finished_by_all": all(_last_epoch(applied, who) >= epochs - 1 for who in alive),
        "faults_injected": sum(e["t"] == "fault" for e in events),
        "hangs": sum(e["t"] == "hang" for e in events),
        "divergences": len(_divergences(applied)),
        "divergence_details": _divergences(applied)[:20],
        "samples_lost": lost,
        "samples_doubled": doubled,
        "samples_discarded": sum(e["discarded"] for e in applied),
        "longest_stall_s": max((s["seconds"] for s in stalls), default=0.0),
        "longest_stall_s_by_fault": _by_fault(stalls),
        "stalls": stalls,
        "attempts_failed": sum(e["attempts"] - 1 for e in applied),
        "throughput_share": _throughput(events, applied, capacity),
        "capacity_share": _capacity(events),
        "peers_alive": len(alive),
        "usage": _usage(events),
    }


def _alive(events: Iterable[Event]) -> set[str]:
    """Processes that were started and not killed for good."""
    alive = set()
    for e in events:
        if e["t"] == "joined":
            alive.add(e["who"])
        elif e["t"] == "ended":
            alive.discard(e["who"])
    return alive


def _last_epoch(applied: Iterable[Event], who: str) -> int:
    return max((e["epoch"] for e in applied if e["who"] == who), default=-1)


def _surviving_lineage(applied: Sequence[Event], alive: set[str]) -> dict[int, str]:
    """Epoch -> lineage, of the history that the living peers agree on at the end."""
    furthest = max((e for e in applied if e["who"] in alive), key=lambda e: e["epoch"], default=None)
    if furthest is None:
        return {}
    chain: dict[int, str] = {}
    own = [e for e in applied if e["who"] == furthest["who"]]
    for e in own:
        chain[e["epoch"]] = e["lineage"]
    for epoch in range(furthest["epoch"] + 1):  # a late joiner has no early epochs: most peers' word counts
        if epoch not in chain:
            votes = [e["lineage"] for e in applied if e["epoch"] == epoch]
            if votes:
                chain[epoch] = statistics.mode(votes)
    return chain


def _divergences(applied: Sequence[Event]) -> list[str]:
    """Peers of one lineage that hold different bits, and results that are not the mean of their members."""
    found: list[str] = []
    by_lineage: dict[tuple[int, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for e in applied:
        for name in ("result", "parameters"):
            by_lineage[e["epoch"], e["lineage"]][name].add(e[name])
        if e["wrong"]:
            found.append(f"epoch {e['epoch']} of {e['who']}: {e['wrong']}")
    for (epoch, _), values in by_lineage.items():
        found += [f"epoch {epoch}: {len(v)} different {name}" for name, v in values.items() if len(v) > 1]
    return found


def _samples(
    events: Sequence[Event], applied: Sequence[Event], surviving: Mapping[int, str], alive: set[str]
) -> tuple[int, int]:
    """(lost, doubled) over the peers that lived to the end: counted = averaged + discarded + pending."""
    lost = doubled = 0
    for who in alive:
        done = next((e for e in events if e["who"] == who and e["t"] == "finished"), None)
        if done is None:
            continue
        mine = [e for e in applied if e["who"] == who]
        averaged = sum(e["local_samples"] for e in mine if surviving.get(e["epoch"]) == e["lineage"])
        rest = done["counted"] - averaged - sum(e["discarded"] for e in mine) - done["pending"]
        lost += max(0, rest)
        doubled += max(0, -rest)
    return lost, doubled


def _stalls(applied: Sequence[Event], events: Sequence[Event]) -> list[dict[str, Any]]:
    """Time in step() beyond the fault-free median, for peers that were not stopped themselves meanwhile."""
    usual = statistics.median([e["seconds_in_step"] for e in applied]) if applied else 0.0
    faults = [e for e in events if e["t"] == "fault"]
    stalls = []
    for e in (e for e in events if e["t"] == "stall"):
        begin = e["at"] - e["seconds"]
        victims = [f for f in faults if f["victim"] == e["who"] and begin - 1 < f.get("until", f["at"]) + 1]
        if any(f["at"] < e["at"] for f in victims if f.get("until", f["at"]) > begin - 1):
            continue  # it was the stopped, cut or slowed one
        cause = max((f for f in faults if f["at"] <= e["at"]), key=lambda f: f["at"], default=None)
        seconds = max(0.0, e["seconds"] - usual)
        stalls.append(
            {
                "who": e["who"],
                "at": e["at"],
                "seconds": seconds,
                "epoch": e["epoch"],
                "fault": cause["fault"] if cause else "none",
            }
        )
    return stalls


def _by_fault(stalls: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for stall in stalls:
        worst[stall["fault"]] = max(worst.get(stall["fault"], 0.0), stall["seconds"])
    return worst


def _usage(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """What the process that lived longest used: median of the first and of the last third of its samples.

    The first tenth is left out: buffers and caches fill.
    """
    samples: dict[str, list[Event]] = defaultdict(list)
    for e in events:
        if e["t"] == "usage":
            samples[e["who"]].append(e)
    longest = max(samples.values(), key=len, default=[])
    longest = longest[len(longest) // 10 :]
    third = len(longest) // 3
    if third == 0:
        return {}
    return {
        name: {
            "first": statistics.median(e[name] for e in longest[:third]),
            "last": statistics.median(e[name] for e in longest[-third:]),
        }
        for name in ("descriptors", "threads", "rss_kib", "dht_records")
    }


def _lives(events: Sequence[Event]) -> list[tuple[float, float]]:
    """(from, to) of every spell in which a process could compute."""
    end = max((e["at"] for e in events), default=0.0)
    since: dict[str, float] = {}
    spells: list[tuple[float, float]] = []
    for e in events:
        who = e["who"]
        if e["t"] == "joined":
            since[who] = e["at"]
        elif e["t"] in ("ended", "finished") and who in since:
            spells.append((since.pop(who), e["at"]))
    spells += [(start, end) for start in since.values()]
    return spells


def _capacity(events: Sequence[Event]) -> float:
    """The share of the full swarm's time in which its peers lived and ran."""
    lives = _lives(events)
    if not lives:
        return 0.0
    begin, end = min(s for s, _ in lives), max(e for _, e in lives)
    full = max((e["peers"] for e in events if e["t"] == "run"), default=1) * (end - begin)
    stopped = sum(e["until"] - e["at"] for e in events if e["t"] == "fault" and e["fault"] == "stop")
    return (sum(to - start for start, to in lives) - stopped) / full if full > 0 else 0.0


def _throughput(events: Sequence[Event], applied: Sequence[Event], capacity: float) -> float:
    """Samples in averages per second, over what the full swarm computes without waiting."""
    lives = _lives(events)
    if not lives or not applied:
        return 0.0
    begin = min(s for s, _ in lives)
    per_epoch = {e["epoch"]: e["samples"] for e in applied}
    end = max(e["at"] for e in applied)
    peers = max((e["peers"] for e in events if e["t"] == "run"), default=1)
    return sum(per_epoch.values()) / (capacity * peers * (end - begin)) if end > begin else 0.0
