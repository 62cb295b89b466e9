"""Swarms: training, faults, hostile connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.tables.markdown import Row, number, table
from bench.tables.results import measured, network, result, results


def same_training() -> str:
    demo, seeds = result("demo"), result("seeds")
    if demo is None or seeds is None:
        return ""
    row = [f"{demo['swarm_loss']:.4f}", f"{demo['alone_loss']:.4f}", f"{seeds['spread']:.4f}"]
    head = ["swarm", "one process, same batches", "max − min of five seeds (`bench.seeds`)"]
    return table(head, [row]) + f"\n`demo.json`; `seeds.json`: {measured(seeds)}.\n"


SECURITY = ("hostile", "hostile_requests", "encrypted", "line_rate_encrypted")


def security() -> str:
    """Training under hostile connections, and what encryption costs."""
    hostile, requests, loopback, lab = (result(name) for name in SECURITY)
    rows: list[Row] = []
    if hostile is not None:
        words = f"longest epoch with {hostile['connections']:,} hostile connections, over the median without"
        rows.append([words, "≤ 1.2", f"{hostile['longest_ratio']:.2f}", measured(hostile)])
        grown = hostile["memory_bytes"]["under"] - hostile["memory_bytes"]["before"]
        rows.append(
            ["memory that they took, most of any peer", "", f"{grown / 1e6:.0f} MB", measured(hostile)]
        )
    if requests is not None:
        words = f"epoch with {requests['requests_per_second']:,} requests a second of the relay, and as many "
        words += "of the table over TCP, over one without, medians"
        rows.append([words, "≤ 1.1", f"{requests['ratio']:.2f}", measured(requests)])
    if loopback is not None:
        rate, cpu = loopback["rate_over_plain"], loopback["cpu_seconds_per_gb_more"]
        rows.append(
            ["all-reduce on loopback, encrypted over plain rate", "≥ 0.45", f"{rate:.2f}", measured(loopback)]
        )
        rows.append(["CPU seconds for each GB more, on each side", "≤ 0.5", f"{cpu:.2f}", measured(loopback)])
        share = cpu * 2 * 0.125  # GB/s, sent and received
        rows.append(["of a core, at 1 Gb/s in each direction", "", f"{share:.1%}", measured(loopback)])
    if lab is not None:
        found = lab["encrypted"]
        void = (
            " (the lab was late)"
            if found["plain"]["void_reason"] or found["encrypted"]["void_reason"]
            else ""
        )
        words = f"all-reduce over {found.get('scale', 1):g} Gb/s and 300 ms, encrypted over plain rate"
        rows.append([words, "≥ 0.98", f"{found['rate_over_plain']:.3f}{void}", measured(lab)])
    return table(["measured", "bar", "found", "when, on what"], rows)


KILLS = (
    "kill",
    "leader",
    "leader-proposed",
    "leader-begun",
    "leader-done",
    "leader-committed",
    "all-but-one",
)

STALLS = {
    "killed": KILLS,
    "stopped": ("stop",),
    "cut off": ("cut", "cut-one-way"),
    "1 kB/s": ("slow",),
    "corrupted": ("corrupt",),
}


def _longest(content: dict[str, Any], names: Sequence[str]) -> float | None:
    """Of the stalls by these faults; None when there were no such faults."""
    if not set(names) & set(content["faults"]):
        return None
    return max(content["longest_stall_s_by_fault"].get(name, 0.0) for name in names)


def faults() -> str:
    """What faults cost: in swarms that were broken, beside others, and in the simulation."""
    rows = []
    for file, content in results("chaos"):
        rows.append(
            [
                f"`{file}`",
                network(content),
                number(content["faults_injected"]),
                *(number(_longest(content, names)) for names in STALLS.values()),
                f"{content['throughput_share']:.0%} / {content['capacity_share']:.0%}",
                number(content["samples_discarded"]),
            ]
        )
    head = ["file", "network", "faults", *STALLS, "throughput / capacity", "samples named as lost"]
    kills = result("kills")
    systems = {row["system"]: None for row in kills["rows"]} if kills is not None else {}
    beside = [
        [name, *(number(kills[f"{name}_{fault}_stall_s"]) for fault in ("kill", "stop")), measured(kills)]
        for name in systems
    ]
    schedules = [
        [
            f"`{file}`",
            number(content["peers"]) if content["peers"] else "1 to 8",
            *(number(content[name]) for name in ("schedules", "broken", "seconds", "events", "commits")),
            *(number(content[name]) for name in ("heals", "stall_s_p99", "stall_s_longest")),
            measured(content),
        ]
        for file, content in results("simulation")
    ]
    words = ["schedules", "broken", "seconds on two cores", "events", "commits", "heals"]
    return "\n".join(
        [
            table(head, rows),
            table(["one of four processes", "killed", "stopped", "measured"], beside),
            table(["file", "peers", *words, "stall, p99", "longest", "measured"], schedules),
        ]
    )
