"""The verbs of `p2pavg bench`, and every result that no other table tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bench.tables.markdown import Row, number, table
from bench.tables.results import RESULTS, measured, network, results, size
from bench.tables.swarms import SECURITY

FIELDS: dict[str, tuple[str, ...]] = {
    "allreduce": ("compression", "seconds_median", "goodput_gbps", "cpu_seconds_per_peer", "bit_identical"),
    "penalty": ("compression", "local_over_baseline", "global_over_local", "epoch_seconds_median"),
    "accumulate": ("device", "ratio_median", "ratio_low95", "control_ratio", "step_us_median"),
    "rounds": ("overhead_ms_p50", "overhead_ms_p99", "commit_ms_p50", "failed_rounds"),
    "join": (
        "state_bytes",
        "joiners",
        "received_over_state",
        "seconds",
        "gbps",
        "share_of_links",
        "epochs_missed",
        "donor_sps_ratio",
        "donor_extra_memory_bytes",
        "bit_identical",
    ),
    "chaos": (
        "epochs_finished",
        "faults_injected",
        "hangs",
        "divergences",
        "samples_lost",
        "samples_doubled",
        "longest_stall_s",
        "throughput_share",
    ),
    "dht": ("loss", "kill", "store_ms_p50", "get_ms_p50", "get_ms_p99", "found_fraction", "stale_fraction"),
    "net": ("rtt_ms", "window_bytes", "rate_gbps", "best_streams"),
}


def benches() -> str:
    """One section for each `p2pavg bench` verb whose results are there."""
    sections = []
    for verb, fields in FIELDS.items():
        rows = [
            [
                f"`{file}`",
                number(content.get("peers", content.get("nodes"))),
                size(content),
                network(content),
                *(number(content.get(field)) for field in fields),
                measured(content),
            ]
            for file, content in results(verb)
            if fields[-1] in content
        ]
        if rows:
            head = ["file", "peers", "values", "network", *(f"`{field}`" for field in fields), "measured"]
            sections.append(f"### `p2pavg bench {verb}`\n\n{table(head, rows)}")
    return "\n".join(sections)


def idle() -> str:
    """What members of a run send and receive when nothing happens."""
    rows = [
        [
            f"`{file}`",
            number(content["members"]),
            "simulated" if content.get("simulated") else "real processes",
            number(content.get("settle_seconds")),
            number(content["member_bytes_per_s_mean"]),
            number(content["member_bytes_per_s_max"]),
            "–" if content.get("simulated") else f"{content['member_core_fraction']:.2%}",
            number(content["members_seen_min"]),
            measured(content),
        ]
        for file, content in results("dht")
        if "members" in content
    ]
    head = ["file", "members", "how", "seconds after the last joined", "bytes/s, mean", "most", "of a core"]
    return table(
        [*head, "each sees at least", "measured"], sorted(rows, key=lambda row: int(row[1].replace(",", "")))
    )


TOLD = (
    *("codec", "demo", "seeds", "gpu", "gpu_kernels", "pump_loopback", "lab_truth", "line_rate", "versus"),
    "beside",
    *SECURITY,
    *("kills", "scenario", "simulation", "world"),
    *FIELDS,
)

SCRIPTS = {  # the results of scripts of other names
    "monitor_cost": "watching.cost",
    "predicted": "lab.predicted",
    "reach_direct": "reach",
    "reach_far": "reach",
    "reach_relayed": "reach",
    "without_udp": "reach.without_udp",
}


def leaves(content: dict[str, Any], path: str = "") -> Iterator[Row]:
    """Figures of a result of any shape, by their place in it; lists of single runs are left out."""
    for name, value in content.items():
        at = f"{path} {name}".strip()
        if name == "environment" or isinstance(value, list):
            continue
        if isinstance(value, dict):
            yield from leaves(value, "" if name in ("sections", "found") else at)
        elif isinstance(value, bool | int | float) or name == "void_reason":
            yield [f"`{at}`", number(value)]


def others() -> str:
    """Everything else in bench/results, one section for each file."""
    sections = []
    for path in sorted(RESULTS.glob("*.json")):
        if not any(path.stem == name or path.stem.startswith(f"{name}_") for name in TOLD):
            content = json.loads(path.read_text())
            rows = table(["figure", "value"], list(leaves(content)))
            head = f"### `{path.name}`, by `bench.{SCRIPTS.get(path.stem, path.stem)}`"
            sections.append(f"{head}\n\n{rows}\nMeasured: {measured(content)}.\n")
    return "\n".join(sections)
