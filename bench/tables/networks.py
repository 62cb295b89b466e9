"""Averaging over loopback and over emulated links, alone and beside other systems."""

from __future__ import annotations

from typing import Any

from bench.line_rate.bars import bars
from bench.tables.markdown import number, table
from bench.tables.results import lab_rows, measured, network, result, results, size


def pump_loopback() -> str:
    rows, when = [], ""
    for file, content in results("pump_loopback"):
        by = {contender["name"]: contender for contender in content["contenders"]}
        base = by["gloo float32"]

        def times(contender: dict[str, Any]) -> str:
            return f"{1e3 * contender['seconds_median']:.0f} / {1e3 * contender['cpu_s']:.0f}"

        def ratio(contender: dict[str, Any], base: dict[str, Any] = base) -> str:
            wall = contender["seconds_median"] / base["seconds_median"]
            return f"{wall:.2f} / {contender['cpu_s'] / base['cpu_s']:.2f}"

        row = [f"{content['peers']} × {content['numel'] / 1e6:g}M (`{file}`)", times(base)]
        for name in ("pump fp16", "pump none"):
            row += [times(by[name]), ratio(by[name])]
        rows.append(row)
        when = measured(content)
    head = ["peers × values", "gloo float32", "pump fp16", "ratio", "pump none", "ratio"]
    return table(head, rows) + (f"\nLast: {when}.\n" if rows else "")


def lab_truth() -> str:
    cells = [[row["what"], row["asked"], row["found"], row["difference"]] for row in lab_rows()]
    return table(["measured", "asked", "found", "difference"], cells)


VERSUS = ["peers × values", "network", "system", "seconds", "of gloo", "CPU s a peer", "of gloo", "max error"]


def versus() -> str:
    rows, when = [], []
    for file, content in results("versus"):
        when.append(f"`{file}`: {measured(content)}")
        for row in content["rows"]:
            cells = (
                row["seconds_median"],
                row["time_over_gloo"],
                row["cpu_seconds_per_peer"],
                row["cpu_over_gloo"],
                row["max_abs_error"],
            )
            rows.append([f"{row['peers']} × {size(row)}", network(row), row["name"], *map(number, cells)])
    return table(VERSUS, rows) + ("\n" + "; ".join(when) + ".\n" if when else "")


BESIDE = {"none": "nothing", "python": "a Python-bound thread", "torch": "a torch training loop"}


def beside() -> str:
    """Averaging while the peers compute."""
    content = result("beside")
    if content is None:
        return ""
    rows = [
        [
            network,
            BESIDE[kind],
            number(row["seconds"]),
            number(row["rate_of_idle"]),
            number(row["averaging_cpu_seconds"]),
            number(row["bytes_per_cpu_of_idle"]),
            number(row.get("lost_over_used")),
            number(row.get("slower_over_used")),
        ]
        for network in ("loopback", "two-300ms")
        for kind, row in content[network].items()
    ]
    head = [
        "network",
        "in every peer",
        "seconds",
        "rate of idle",
        "CPU s of averaging",
        "bytes per CPU s of idle",
    ]
    return (
        table([*head, "lost over used", "slower over used"], rows)
        + f"\n`beside.json`: {measured(content)}.\n"
    )


def line_rate() -> str:
    content = result("line_rate")
    if content is None:
        return ""
    rows = [
        [
            bar.what,
            f"{number(bar.ours)} {bar.unit}",
            f"{bar.against}: {number(bar.reference)} {bar.unit}",
            number(bar.ratio),
            bar.bar,
            bar.void or "no",
        ]
        for bar in bars(content)
    ]
    head = ["measured", "ours", "beside", "ratio", "bar", "router late"]
    return table(head, rows) + f"\n`line_rate.json`: {measured(content)}.\n"
