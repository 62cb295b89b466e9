"""The runs of `bench.world`: for their own page, and for the first one that a reader sees."""

from __future__ import annotations

from typing import Any

from bench.tables.markdown import Row, number, table
from bench.tables.results import ROOT, measured, result
from bench.world.page import STALL_BARS, bars
from bench.world_check.__main__ import STALL_S

WRONG = ("hangs", "crashes", "divergences", "indices_lost", "indices_doubled", "averages_misnamed")


def world() -> str:
    """Each promise, its bar, and what came of it in each run."""
    found = result("world")
    if found is None:
        return ""
    runs: list[dict[str, Any]] = found["runs"]
    came = [{words: (said, holds) for words, _, said, holds in bars(run)} for run in runs]
    wanted = {words: bar for run in runs for words, bar, _, _ in bars(run)}
    rows: list[Row] = [
        [words, bar, *(_cell(*told.get(words, ("–", None))) for told in came)]
        for words, bar in wanted.items()
    ]
    head = ["promise", "bar", *(f"seed {run['run']['seed']}" for run in runs)]
    notes = [
        f"Seed {run['run']['seed']}: {measured({'environment': run['run']})}"
        + (f"; void as a measurement of time: {run['void']}" if run["void"] else "")
        for run in runs
    ]
    return table(head, rows) + "\n" + ".\n".join(notes) + ".\n"


def _cell(said: str, holds: bool | None) -> str:
    return f"**{said}**" if holds is False else said


def world_first() -> str:
    """For the README: the picture of a run, and four figures of all runs together or of the worst."""
    found = result("world")
    if found is None:
        return ""
    runs = found["runs"]
    faults, minutes = sum(run["faults"] for run in runs), sum(run["seconds"] for run in runs) / 60
    wrong = sum(run[name] for run in runs for name in WRONG)
    stalls = [run["longest_stall_s_by_fault"] for run in runs]
    longest = max(stall.get(fault, 0.0) for stall in stalls for fault in STALL_BARS)
    share = min(run["share_of_data_parallel_one_in"] for run in runs)
    rows: list[Row] = [
        [
            f"faults in {minutes:.0f} minutes; hangs, crashes, other bits, samples lost or doubled",
            f"{faults}; {wrong}",
        ],
        [
            "local steps of living peers that ended in averages",
            f"{min(r['step_efficiency'] for r in runs):.0%}",
        ],
        ["bytes sent, joins and control included, beside data-parallel training's", f"1/{share:.0f}"],
        [
            "longest stall of the others after a kill, a stop, a cut or a sleep",
            f"{longest:.1f} s" if longest else f"none of {STALL_S} s",
        ],
    ]
    void = " The machine was too busy to count seconds." if any(run["void"] for run in runs) else ""
    told = (
        "`make world`: three homes behind NATs, a campus and two clouds in an emulated internet, and what "
        f"befalls them there; [docs/world.md](docs/world.md) tells it.{void}"
    )
    picture = (
        "![The web page of that run](docs/world.png)\n\n" if (ROOT / "docs" / "world.png").exists() else ""
    )
    return f"{told}\n\n{picture}{table(['', ''], rows)}"


def world_others() -> str:
    """Others in the same places, and p2pavg beside them."""
    found = result("world_others")
    if found is None:
        return ""
    rows: list[Row] = []
    failed = [f"{name} failed: {each['failed']}" for name, each in _systems(found) if "failed" in each]
    for system, each in _systems(found):
        for name, peer in each.get("peers", {}).items():
            groups = ", ".join(f"{size} ({times}×)" for size, times in peer["averaged_with"].items()) or "–"
            killed = " (killed)" if name == found["victim"] else ""
            rows.append(
                [
                    system, name + killed, "yes" if peer["joined"] else "no", str(peer["epochs"]), groups,
                    number(peer["longest_step_s"]), str(peer["epochs_after_kill"]),
                    number(peer["longest_step_after_kill_s"]), str(peer["failed_steps"]),
                ]
            )  # fmt: skip
    head = ["system", "peer", "joined", "averages before the kill", "peers in its averages"]
    head += ["longest `step()`, s", "averages after the kill", "longest `step()` then, s", "failed steps"]
    late = [name for name, each in _systems(found) if each.get("void")]
    failed += [f"void as a measurement of time: {', '.join(late)}"] if late else []
    return table(head, rows) + f"\n`world_others.json`: {'; '.join([measured(found), *failed])}.\n"


def _systems(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, each) for name, each in found.items() if isinstance(each, dict) and name != "environment"]
