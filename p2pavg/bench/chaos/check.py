"""The verdicts on a chaos run, as pure functions of its events, so that anyone can compute them again."""

from __future__ import annotations

import signal
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
HANG_S = 60.0  # seconds without an event after which a live peer counts as hanging
ORDERED_ENDS = (0, -signal.SIGKILL)  # exit codes
FREEZING = ("stop", "cut", "cut-one-way", "slow")
HARMLESS = ("join", "corrupt", "duplicate")
LINGERS_S = 1.0  # seconds after its end in which a fault may still have effects


def summarise(events: Sequence[Event], *, epochs: int, capacity: float) -> dict[str, Any]:
    """Count the faults of a run.

    events: in order of arrival; each has "who" (the process), "t" (its kind) and "at" (time.monotonic()).
    capacity: samples per second of one peer that never waits.
    """
    applied = [e for e in events if e["t"] == "epoch"]
    survivors = _survivors(events)
    surviving = surviving_lineage(applied, [e for e in events if e["t"] == "finished"])
    stalls = _stalls(applied, events)
    lost, doubled = _samples(events, surviving)
    crashes = _crashes(events)
    finished = {e["who"] for e in events if e["t"] == "finished"}
    last_epoch = max((e["epoch"] for e in applied), default=-1)
    return {
        "epochs_finished": last_epoch + 1,
        "finished_by_all": bool(survivors) and survivors == finished and last_epoch >= epochs - 1,
        "faults_injected": sum(e["t"] == "fault" for e in events),
        "hangs": sum(e["t"] == "hang" for e in events),
        "crashes": len(crashes),
        "crash_details": crashes[:20],
        "divergences": len(_divergences(applied)),
        "divergence_details": _divergences(applied)[:20],
        "samples_lost": lost,
        "samples_doubled": doubled,
        "samples_discarded": sum(e["discarded"] for e in events if e["t"] in ("epoch", "finished")),
        "longest_stall_s": max((s["seconds"] for s in stalls), default=0.0),
        "longest_stall_s_by_fault": _by_fault(stalls),
        "stalls": stalls,
        "longest_death_s": max(_deaths(events), default=None),
        "attempts_failed": sum(e["attempts"] - 1 for e in applied),
        "throughput_share": _throughput(events, applied, capacity),
        "capacity_share": _capacity(events),
        "peers_alive": len(survivors),
        "usage": _usage(events),
        "cpu_share": cpu_share(events),
    }


def _survivors(events: Iterable[Event]) -> set[str]:
    """Processes that trained to the end: they finished, or are still alive."""
    lived, finished = set(), set()
    for e in events:
        if e["t"] == "joined":
            lived.add(e["who"])
        elif e["t"] == "ended":
            lived.discard(e["who"])
        elif e["t"] == "finished":
            finished.add(e["who"])
    return lived | finished


def _crashes(events: Sequence[Event]) -> list[str]:
    """Processes that ended by themselves. Not counted: one of two that were given the same identity, and
    newcomers all of whose initial peers were gone.
    """
    shared = {who for e in events if e["t"] == "fault" and e["fault"] == "duplicate" for who in e["share"]}
    errors = {e["who"]: e["error"] for e in events if e["t"] == "error"}
    joined = {e["who"] for e in events if e["t"] == "joined"}
    lonely = {e["who"] for e in events if e["t"] == "error" and e["raised"] == "UnreachableError"} - joined
    refused = {e["who"] for e in events if e["t"] == "error" and e["raised"] == "IdentityInUseError"}
    return [
        f"{e['who']} ended with code {e['code']}: {errors.get(e['who'], 'see its standard error')}"
        for e in events
        if e["t"] == "ended" and e["code"] not in ORDERED_ENDS and e["who"] not in (refused & shared) | lonely
    ]


def surviving_lineage(applied: Sequence[Event], finished: Sequence[Event]) -> dict[int, str]:
    """Epoch -> lineage, of the history that the survivors hold at the end.

    A peer that healed from another lineage has applied epochs that are not in its history, so the reports of
    one peer do not suffice. For epochs that no history holds, or when nobody finished, the lineage that most
    peers reported counts.
    """
    votes: dict[int, list[str]] = defaultdict(list)
    for e in applied:
        votes[e["epoch"]].append(e["lineage"])
    chain = {epoch: statistics.mode(voted) for epoch, voted in votes.items()}
    for e in sorted(finished, key=lambda e: max(map(int, e["history"]), default=-1)):
        chain |= {int(epoch): lineage for epoch, lineage in e["history"].items()}
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


def _samples(events: Sequence[Event], surviving: Mapping[int, str]) -> tuple[int, int]:
    """(lost, doubled): counted = averaged + discarded + pending, of every process as long as it lived.

    A killed process is judged at the last epoch that it applied in the surviving lineage. A finished one is
    judged by its own history, as a peer that was cut off in the last epoch has averaged alone. An average
    that a process never applied may hold its samples, too: others committed the average, and the process
    healed to a later epoch.
    """
    lost = doubled = 0
    peers = {e["who"]: e["peer"] for e in events if e["t"] == "up"}
    made = {(e["epoch"], e["lineage"]): e["members"] for e in events if e["t"] == "epoch"}
    for who, mine in _by_process(events).items():
        ends = [
            index
            for index, e in enumerate(mine)
            if e["t"] == "finished" or (e["t"] == "epoch" and surviving.get(e["epoch"]) == e["lineage"])
        ]
        if not ends:
            continue
        last = mine[ends[-1]]
        before = [e for e in mine[: ends[-1] + 1] if e["t"] == "epoch"]
        history = {int(epoch): lineage for epoch, lineage in last.get("history", {}).items()}
        held = {**surviving, **history}
        own = {e["epoch"]: e["local_samples"] for e in before if held.get(e["epoch"]) == e["lineage"]}
        if list(peers.values()).count(peers.get(who)) == 1:
            for epoch in range(max([*own, *history], default=-1) + 1):
                own.setdefault(epoch, made.get((epoch, held.get(epoch)), {}).get(peers[who], 0))
        averaged = sum(own.values())
        named = sum(e["discarded"] for e in mine[: ends[-1] + 1] if e["t"] in ("epoch", "finished"))
        rest = last["counted"] - averaged - named - last["pending"]
        lost += max(0, rest)
        doubled += max(0, -rest)
    return lost, doubled


def _by_process(events: Iterable[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for e in events:
        found[e["who"]].append(e)
    return found


def _stalls(applied: Sequence[Event], events: Sequence[Event]) -> list[dict[str, Any]]:
    """Time in step() beyond the median without faults, of peers that were not stopped themselves then."""
    usual = statistics.median([e["seconds_in_step"] for e in applied]) if applied else 0.0
    faults = [e for e in events if e["t"] == "fault"]
    stalls = []
    for e in (e for e in events if e["t"] == "stall"):
        begin = e["at"] - e["seconds"]
        victims = [f for f in faults if f["victim"] == e["who"] and begin - 1 < f["until"] + 1]
        if any(f["at"] < e["at"] for f in victims if f["until"] > begin - 1):
            continue  # the peer itself was stopped, cut or slowed
        near = [f["fault"] for f in faults if f["at"] <= e["at"] and f["until"] >= begin - LINGERS_S]
        seconds = max(0.0, e["seconds"] - usual)
        stalls.append(
            {
                "who": e["who"],
                "at": e["at"],
                "seconds": seconds,
                "epoch": e["epoch"],
                "fault": _cause(near),
                "faults": near,
            }
        )
    return stalls


def _deaths(events: Sequence[Event]) -> list[float]:
    """Seconds from each kill until the process was gone. Its connections close then, so before that nobody
    can know by them: on a machine without a processor to spare that takes seconds.
    """
    struck: dict[str, float] = {}
    for e in events:
        if e["t"] == "dies" or (e["t"] == "fault" and e["victim"] and e["fault"] not in FREEZING):
            struck.setdefault(e["victim"] if e["t"] == "fault" else e["who"], e["at"])
    gone = [e for e in events if e["t"] == "ended" and e["code"] == -signal.SIGKILL]
    return [e["at"] - struck[e["who"]] for e in gone if e["who"] in struck]


def _cause(near: Sequence[str]) -> str:
    """The costliest fault around a stall: one that freezes a peer, or else one that ends a peer."""
    for kinds in (FREEZING, [name for name in near if name not in HARMLESS], HARMLESS):
        for name in near:
            if name in kinds:
                return name
    return "none"


def _by_fault(stalls: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for stall in stalls:
        worst[stall["fault"]] = max(worst.get(stall["fault"], 0.0), stall["seconds"])
    return worst


def _usage(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Resources of the process that lived longest: the medians of the first and the last third of its
    samples.

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


def cpu_share(events: Iterable[Event]) -> float | None:
    """The share of a core that averaging takes from a peer: the median over processes, each from its first
    sample to its last. None: nobody lived for two.
    """
    samples: dict[str, list[Event]] = defaultdict(list)
    for e in events:
        if e["t"] == "usage" and "cpu_s" in e:
            samples[e["who"]].append(e)
    shares = [
        (row[-1]["cpu_s"] - row[0]["cpu_s"]) / (row[-1]["at"] - row[0]["at"])
        for row in samples.values()
        if len(row) > 1
    ]
    return statistics.median(shares) if shares else None


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
    """The share of the full swarm's time in which its peers lived, ran, and could reach each other."""
    lives = _lives(events)
    if not lives:
        return 0.0
    begin, end = min(s for s, _ in lives), max(e for _, e in lives)
    full = max((e["peers"] for e in events if e["t"] == "run"), default=1) * (end - begin)
    frozen = sum(e["until"] - e["at"] for e in events if e["t"] == "fault" and e["fault"] in FREEZING)
    return (sum(to - start for start, to in lives) - frozen) / full if full > 0 else 0.0


def _throughput(events: Sequence[Event], applied: Sequence[Event], capacity: float) -> float:
    """Samples in averages per second, over those of the full swarm without faults."""
    lives = _lives(events)
    if not lives or not applied:
        return 0.0
    begin = min(s for s, _ in lives)
    per_epoch = {e["epoch"]: e["samples"] for e in applied}
    end = max(e["at"] for e in applied)
    peers = max((e["peers"] for e in events if e["t"] == "run"), default=1)
    usual = _undisturbed(applied, peers) or capacity * peers
    return sum(per_epoch.values()) / (usual * (end - begin)) if end > begin else 0.0


def _undisturbed(applied: Sequence[Event], peers: int) -> float | None:
    """Samples per second of the median epoch among those to which, as to the epoch before, all peers
    contributed.

    None: there is no such epoch.
    """
    first: dict[int, Event] = {}
    for e in applied:
        if e["epoch"] not in first or e["at"] < first[e["epoch"]]["at"]:
            first[e["epoch"]] = e
    rates = [
        e["samples"] / (e["at"] - first[epoch - 1]["at"])
        for epoch, e in first.items()
        if epoch - 1 in first and len(e["members"]) == len(first[epoch - 1]["members"]) == peers
    ]
    return statistics.median(rates) if rates else None
