"""The run's page, for a sceptic: what was promised, what came, and how to count it again."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;width:100%}td,th{border-bottom:1px solid #ddd;
padding:.3rem .6rem;text-align:left;vertical-align:top}.no{color:#b00020;font-weight:600}.yes{color:#17652b}
img{width:100%;border:1px
solid #ddd;margin:.5rem 0}code{background:#f4f4f4;padding:0 .2rem}"""
STALL_BARS = {"kill": 3.0, "stop": 5.0, "cut": 5.0, "cut-one-way": 5.0, "sleep": 5.0}
Row = tuple[str, str, str, bool | None]


def bars(verdict: dict[str, Any]) -> list[Row]:
    """(what, bar, came, whether it holds; None: there is nothing to tell)."""
    zero = (
        ("hangs", "hangs"),
        ("crashes", "processes that ended by themselves"),
        ("divergences", "averages after which peers held different bits"),
        ("indices_doubled", "indices in two averages of a pass"),
        ("indices_lost", "indices in none"),
        ("indices_untrained", "indices averaged that no script trained on"),
        ("averages_misnamed", "averages with other numbers of samples than indices"),
    )
    rows: list[Row] = [("faults, and their kinds", "", _faults(verdict), None)]
    rows += [(words, "0", str(verdict[name]), verdict[name] == 0) for name, words in zero]
    share, best = verdict["step_efficiency"], verdict["share_of_data_parallel_one_in"]
    if share is not None:
        rows.append(
            ("local steps of the living that ended in averages", "≥ 90%", f"{share:.1%}", share >= 0.9)
        )
    if best is not None and not verdict["run"]["gradients"]:
        rows.append(("bytes beside data-parallel's, all included", "≤ 1/200", f"1/{best:.0f}", best >= 200))
    for fault, seconds in verdict["longest_stall_s_by_fault"].items():
        bar = STALL_BARS.get(fault)
        holds = None if bar is None else seconds <= bar
        rows.append(
            (f"longest stall of the others: {fault}", f"≤ {bar:g} s" if bar else "", f"{seconds} s", holds)
        )
    first = verdict["seconds_to_first_average"]
    if first is not None:
        rows.append(("from the command to the first average", "≤ 120 s", f"{first} s", first <= 120))
    predicted = verdict["prediction"].get("came_of_predicted_for_the_living")
    if predicted is not None:
        said = f"{predicted - 1:+.1%}"
        rows.append(
            ("samples/s of the living beside the prediction", "± 10%", said, abs(predicted - 1) <= 0.1)
        )
    for words, name in (
        (
            "bytes of averages without a newcomer beside the prediction, median",
            "bytes_of_averages_of_predicted",
        ),
        ("all bytes, joins and repairs included, beside the prediction", "all_bytes_of_predicted"),
    ):
        if (ratio := verdict["prediction"].get(name)) is not None:
            rows.append((words, "± 5%", f"{ratio - 1:+.1%}", abs(ratio - 1) <= 0.05))
    said = verdict["prediction"].get("said", {}).get("dollars_per_million")
    came = verdict["prediction"].get("dollars_per_million_came")
    if said is not None and came is not None:
        rows.append(("dollars for a million samples, and as foretold", "", f"{came:.2f}, {said:.2f}", None))
    if verdict.get("loss_of_one_process") is not None:
        apart = verdict["loss"] - verdict["loss_of_one_process"]
        said = f"{apart:+.4f}"
        if (again := verdict.get("loss_of_one_process_moved")) is not None:
            moved = again - verdict["loss_of_one_process"]
            said += f" (that process again, from weights 0.01% apart: {moved:+.4f})"
        rows.append(("loss above one process of the same algorithm", "≤ 0.002", said, apart <= 0.002))
    if (parallel := verdict.get("loss_of_data_parallel")) and not verdict["run"]["gradients"]:
        more = verdict["loss"] / parallel - 1
        rows.append(("loss above data-parallel's at equal tokens", "≤ 4%", f"{more:+.1%}", more <= 0.04))
    return rows


def _faults(verdict: dict[str, Any]) -> str:
    minutes = verdict["seconds"] / 60
    return f"{verdict['faults']} of {len(verdict['faults_by_kind'])} in {minutes:.0f} minutes"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _mark(holds: bool | None) -> str:
    return (
        ""
        if holds is None
        else f'<span class="{"yes" if holds else "no"}">{"holds" if holds else "fails"}</span>'
    )


def _events(folder: Path) -> list[list[str]]:
    """What happened, second by second."""
    rows, began = [], None
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        began = event["at"] if event["t"] == "complete" else began
        if event["t"] in ("fault", "born", "joined", "ended", "overstayed", "hang") and began is not None:
            what = event.get("fault") or event["t"]
            lasts = f"{event['until'] - event['at']:.0f} s" if event["t"] == "fault" else ""
            if event["t"] == "ended":
                lasts = f"code {event['code']}"
            rows.append([f"{event['at'] - began:.1f}", html.escape(what), html.escape(event["who"]), lasts])
    return rows


def write(folder: Path, verdict: dict[str, Any], command: str) -> Path:
    """Write world.html into the run's folder."""
    run = verdict["run"]
    rows = [[html.escape(a), html.escape(b), html.escape(c), _mark(d)] for a, b, c, d in bars(verdict)]
    void = verdict["void"]
    pictures = sorted(folder.glob("page*.png"))
    details = {k: v for k, v in verdict.items() if k != "run"}
    text = [
        "<!doctype html><meta charset=utf-8><title>p2pavg: the world</title>",
        f"<style>{STYLE}</style><h1>A swarm of strangers, and what befell it</h1>",
        f"<p>{len(run['places'])} peers and a bootstrap on one machine ({html.escape(str(run['cpu']))}, "
        f"{run['cores']} cores), joined by an emulated network; {verdict['faults']} faults of "
        f"{len(verdict['faults_by_kind'])} kinds in {verdict['seconds']:.0f} s, drawn by seed {run['seed']}. "
        f"{verdict['averages']} averages over {verdict['samples_trained']} samples; "
        f"{verdict['peers_at_the_end']} peers ended with {verdict['hashes_at_the_end']} SHA-256 of their "
        "parameters.</p>",
    ]
    if void:
        text.append(f'<p class="no">VOID as a measurement of time: {html.escape(str(void))}</p>')
    text += [
        f"<p>Again: <code>{html.escape(command)}</code>. Counted from the logs beside this page, without "
        "p2pavg: <code>python -m bench.world_check FOLDER</code>.</p>",
        _table(("promise", "bar", "came", ""), rows),
        "<h2>What the liar and the flooder achieved</h2>",
        f"<pre>{html.escape(json.dumps(verdict['harm'], indent=1))}</pre>",
        "<h2>Event by event</h2>",
        _table(("s", "what", "who", "for"), _events(folder)),
        "<h2>As a browser saw it</h2>",
        *(f'<img src="{picture.name}" alt="the web page of the run">' for picture in pictures),
        "<h2>All figures</h2>",
        f"<pre>{html.escape(json.dumps(details, indent=1))}</pre>",
    ]
    path = folder / "world.html"
    path.write_text("\n".join(text) + "\n")
    return path
