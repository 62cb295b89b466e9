"""`python -m bench.world_check FOLDER`: the verdict on a run of `bench.world`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.world_check.data import count_indices
from bench.world_check.foretold import prediction
from bench.world_check.logs import Run
from bench.world_check.replay import losses, values

STALL_S = 0.5  # a step() longer than that is looked at
SLOWED = 1.05  # steps that take so many times longer than asked for void the run
LINGERS_S = 2.0  # after its end, in which a fault may still have effects
HALF_PRECISION, DIRECTIONS = 2, 2  # bytes of a value; of an all-reduce: contributions and results
GENTLE = ("loss", "corrupt", "clock", "disk", "flood", "lie", "address")  # they freeze nobody


def hashes(run: Run) -> dict[str, Any]:
    """SHA-256 of the parameters at every average of the surviving lineage, on all who told of it."""
    seen: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    strangers, mismatched, joined = [], [], 0
    for life in run.lives:
        made = {report["epoch"] + 1: report for report in life.reports if report["members"]}
        for event in life.of("theta"):
            report, epoch = made.get(event["epoch"]), event["epoch"]
            if report is None:  # a newcomer's first, or whoever was healed
                joined += 1
                strangers.append((epoch, event["sha256"], life.name))
                continue
            claimed = report["extra"].get("theta_sha256_low")
            if claimed is not None and f"{int(claimed):012x}" != event["sha256"][:12]:
                mismatched.append(f"{life.name} at epoch {epoch}")
            chained = run.chain.get(epoch - 1)
            if chained is not None and chained["lineage"] == report["lineage"]:
                seen[epoch][event["sha256"]].append(life.name)
    diverged = [f"epoch {epoch}: {dict(found)}" for epoch, found in seen.items() if len(found) > 1]
    elsewhere = 0
    for epoch, sha, name in strangers:
        if epoch in seen and sha not in seen[epoch]:
            elsewhere += 1
            diverged.append(f"{name} came to epoch {epoch} with other bits") if _is_last_word(
                run, name
            ) else None
    told = [sum(map(len, found.values())) for found in seen.values()]
    return {
        "averages": len(run.chain),
        "averages_hashed": len(seen),
        "hashes": sum(told),
        "hashes_of_newcomers": joined,
        "newcomers_on_another_lineage": elsewhere,
        "divergences": len(diverged),
        "divergence_details": diverged[:10],
        "hashes_misreported": len(mismatched),
    }


def _is_last_word(run: Run, name: str) -> bool:
    """Whether that life ended with the run, so that no other lineage excuses its bits."""
    life = next(life for life in run.lives if life.name == name)
    return bool(life.of("end")) and len(life.of("theta")) == 1


def ended(run: Run) -> dict[str, Any]:
    """Who ended how."""
    codes = {e["who"]: e["code"] for e in run.of("ended")}
    wanted = {f["who"]: f["fault"] for f in run.faults if f["fault"] in ("kill", "spot")}
    entered = {life.name for life in run.lives if life.up is not None}
    failed = [name for name, code in codes.items() if code and name not in wanted]
    crashes = [f"{name} ended with code {codes[name]}" for name in failed if name in entered]
    finals = {life.name: life.of("end")[0]["sha256"] for life in run.lives if life.of("end")}
    return {
        "hangs": len(run.of("hang")),
        "crashes": len(crashes),
        "failed_entries": len(failed) - len(crashes),
        "crash_details": crashes,
        "overstayed_notices": len(run.of("overstayed")),
        "peers_at_the_end": len(finals),
        "hashes_at_the_end": len(set(finals.values())),
    }


def stalls(run: Run) -> dict[str, Any]:
    """The longest step() by the fault around it, beyond that of a median boundary; of peers that were not
    themselves stopped or cut off then.
    """
    usual = _usual(run)
    worst: dict[str, float] = {}
    for life in run.lives:
        away = [*life.frozen, *life.cut]
        for step in life.steps:
            begin, end = step["at"] - step["seconds"], step["at"]
            if step["seconds"] < STALL_S or any(a - 1 < end and begin < b + LINGERS_S for a, b in away):
                continue
            near = [f["fault"] for f in run.faults if f["at"] <= end and f["until"] + LINGERS_S >= begin]
            hard = [name for name in near if name not in GENTLE]
            cause = (hard or near or ["none"])[0]
            worst[cause] = max(worst.get(cause, 0.0), step["seconds"] - usual)
    return {
        "boundary_s_median": round(usual, 3),
        "longest_stall_s_by_fault": {name: round(max(0.0, s), 2) for name, s in sorted(worst.items())},
    }


def _usual(run: Run) -> float:
    found = []
    for life in run.lives:
        for before, after in zip(life.steps, life.steps[1:], strict=False):
            if after["epoch"] == before["epoch"] + 1:
                found.append(after["seconds"])
    return statistics.median(found) if found else 0.0


def efficiency(run: Run) -> dict[str, Any]:
    """Local steps in averages of the surviving lineage, beside those that the living had time for."""
    batch, pace = run.facts["batch"], run.facts["pace_s"]
    slowness = {place["name"]: place["slowness"] for place in run.facts["places"]}
    possible = sum(life.alive_s / (pace * slowness[life.place]) for life in run.lives)
    taken = sum(len(life.steps) for life in run.lives)
    kept = sum(report["samples"] for report in run.chain.values()) / batch
    alive = sum(life.alive_s for life in run.lives)
    span = max(life.until for life in run.lives) - min(life.up["at"] for life in run.lives if life.up)
    return {
        "steps_possible": round(possible),
        "steps_taken": taken,
        "steps_kept": round(kept),
        "step_efficiency": round(kept / possible, 4) if possible else None,
        "kept_of_taken": round(kept / taken, 4) if taken else None,
        "alive_share": round(alive / (span * len(slowness)), 4),
        "samples_per_second": round(kept * batch / span, 2),
        "seconds": round(span, 1),
    }


def pace(run: Run) -> float:
    """Seconds from one local step to the next, beside those that were asked for: the mean over all lives, of
    steps that no average ended and in which nobody stood.
    """
    slowness = {place["name"]: place["slowness"] for place in run.facts["places"]}
    ratios = []
    for life in run.lives:
        asked = run.facts["pace_s"] * slowness[life.place]
        for before, after in zip(life.steps, life.steps[1:], strict=False):
            took = after["at"] - before["at"]
            if after["epoch"] == before["epoch"] and took < asked + STALL_S:
                ratios.append(took / asked)
    return statistics.fmean(ratios) if ratios else 0.0


def void(run: Run) -> str | None:
    """Why the seconds of this run prove nothing; None: router and trainers were on time."""
    late = next((lab["void_reason"] for lab in run.of("lab")), "the run did not end")
    if late is None and pace(run) > SLOWED:
        return f"the trainers waited for a CPU: their steps took {pace(run):.2f} times what was asked for"
    return late


def traffic(run: Run, values: int) -> dict[str, Any]:
    """Bytes that peers sent, by their reports and by the emulated network's router, beside data-parallel."""
    peers = len(run.facts["places"])
    batch = run.facts["batch"]
    samples = sum(report["samples"] for report in run.chain.values())
    steps = samples / (batch * peers)
    parallel = steps * DIRECTIONS * values * HALF_PRECISION * (peers - 1) / peers
    reported: dict[str, int] = defaultdict(int)
    for life in run.lives:
        reported[life.place] += sum(report["wire_bytes_sent"] for report in life.reports)
    mean = statistics.mean(reported.values()) if reported else 0.0
    routed: dict[str, int] = defaultdict(int)
    for lab in run.of("lab"):
        for path in lab["paths"]:
            if "stranger" not in (path["src"], path["dst"]):
                routed[path["src"]] += path["sent_bytes"]
    on_wire = [routed[place["name"]] for place in run.facts["places"] if routed]
    wire = statistics.mean(on_wire) if on_wire else None
    return {
        "bytes_sent_by_peer_reported": dict(reported),
        "bytes_sent_by_peer_routed": {name: routed[name] for name in reported} if routed else {},
        "bytes_per_peer_reported": round(mean),
        "bytes_per_peer_routed": wire and round(wire),
        "bytes_of_data_parallel": round(parallel),
        "share_of_data_parallel_one_in": round(parallel / (wire or mean), 1) if (wire or mean) else None,
    }


def resources(run: Run) -> dict[str, Any]:
    """Of the life with most samples: medians of the first and the last third, after the first tenth."""
    longest = max((life.of("usage") for life in run.lives), key=len, default=[])
    longest = longest[max(1, len(longest) // 10) :]
    third = max(1, len(longest) // 3)
    if len(longest) < 2:
        return {}
    return {
        name: [statistics.median(e[name] for e in part) for part in (longest[:third], longest[-third:])]
        for name in ("rss_kib", "descriptors", "threads")
    }


def harm(run: Run) -> dict[str, Any]:
    """What the member that lied and the stranger that flooded achieved."""
    found: dict[str, Any] = {"lies": sum(len(life.of("lie")) for life in run.lives)}
    found["floods"] = [{k: v for k, v in e.items() if k not in ("t", "at")} for e in run.of("flooded")]
    for kind in ("lie", "flood"):
        spans = [(f["at"], f["until"]) for f in run.faults if f["fault"] == kind]
        during = [
            step["seconds"]
            for life in run.lives
            for step in life.steps
            if step["seconds"] > STALL_S and any(a <= step["at"] <= b + LINGERS_S for a, b in spans)
        ]
        found[f"longest_step_s_during_{kind}"] = round(max(during, default=0.0), 2)
    return found


def attempts(run: Run) -> dict[str, Any]:
    """Of the surviving averages: how many attempts failed, and why, in the peers' own words."""
    causes: dict[str, int] = defaultdict(int)
    for report in run.chain.values():
        for failed in report["failed_attempts"]:
            causes[str(failed["why"]).split(":")[0][:60]] += 1
    told = {
        (report["epoch"], report["lineage"]): report["plan"]
        for life in run.lives
        for report in life.reports
        if report["plan"]  # who missed the round and was given its result later knows of none
    }
    plans: dict[str, int] = defaultdict(int)
    for epoch, report in run.chain.items():
        plans[told.get((epoch, report["lineage"]), "untold")] += 1
    return {"attempts_failed": sum(causes.values()), "causes": dict(causes), "plans": dict(plans)}


def check(folder: Path, *, replay: bool) -> dict[str, Any]:
    """The verdict: figures by name, and `broken`, the promises that were."""
    run = Run.read(folder)
    by_kind: dict[str, int] = defaultdict(int)
    for fault in run.faults:
        by_kind[fault["fault"]] += 1
    began = next((e["at"] for e in run.events if e["t"] == "run"), 0.0)
    first = [e["at"] for life in run.lives for e in life.of("theta") if e["epoch"] == 1]
    result: dict[str, Any] = {
        "run": {key: value for key, value in run.facts.items() if key not in ("t", "at")},
        "faults": len(run.faults),
        "faults_by_kind": dict(by_kind),
        "faults_spared": len(run.of("spared")),
        "seconds_to_first_average": round(min(first) - began, 1) if first else None,
        "void": void(run),
        "step_seconds_of_asked": round(pace(run), 3),
        **ended(run),
        **hashes(run),
        **count_indices(run),
        **efficiency(run),
        **stalls(run),
        **attempts(run),
        "resources": resources(run),
        "harm": harm(run),
        "prediction": prediction(folder, run),
    }
    result |= traffic(run, values())
    if replay:
        result |= losses(folder, run)
    counted = (
        *("hangs", "crashes", "divergences", "hashes_misreported", "indices_doubled", "indices_lost"),
        *("indices_untrained", "averages_misnamed"),
    )
    result["broken"] = [name for name in counted if result[name]]
    if result["hashes_at_the_end"] != 1:
        result["broken"].append("hashes_at_the_end")
    return result


def main() -> int:
    """Judge, and write verdict.json beside the logs."""
    parser = argparse.ArgumentParser(prog="python -m bench.world_check", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-replay", action="store_true", help="leave the losses out: they take longest")
    args = parser.parse_args()
    result = check(args.folder, replay=not args.no_replay)
    path = args.folder / "verdict.json"
    if args.no_replay and path.exists():  # what was replayed before still holds
        before = json.loads(path.read_text())
        result |= {name: value for name, value in before.items() if name.startswith("loss")}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
