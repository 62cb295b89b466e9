"""The tables of README.md and docs/numbers.md, made from bench/results: `python bench/tables.py [--check]`.

A table stands between `<!-- numbers: NAME -->` and `<!-- end -->`; the words around it are written by hand.
To renew a figure, run its script with --json bench/results/FILE and then this one. `p2pavg bench VERB` goes
into VERB.json or VERB_WHAT.json, `bench/versus.py` into versus.json, and the summary.json that `make demo`
leaves in out/demo into demo.json. A result that is not there leaves out its rows. --check changes nothing and
fails when a page differs from the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bars import bars

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "numbers.md")
PLACE = re.compile(r"(<!-- numbers: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = Sequence[str]


def results(prefix: str) -> Iterator[tuple[str, Any]]:
    """(file name, content) of PREFIX.json and PREFIX_*.json."""
    for path in sorted(RESULTS.glob(f"{prefix}*.json")):
        if path.stem == prefix or path.stem.startswith(f"{prefix}_"):
            yield path.name, json.loads(path.read_text())


def result(name: str) -> Any:
    """The content of NAME.json; None when it was not measured."""
    return next((content for file, content in results(name) if file == f"{name}.json"), None)


def table(head: Row, rows: Sequence[Row]) -> str:
    """Markdown; empty without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: Any, digits: int = 3) -> str:
    """`digits` significant ones, without an exponent; yes or no; a dash for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, list):
        return number(sum(value) / len(value), digits) if value else "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, digits - (whole if abs(value) >= 1 else 0))}f}"


def measured(content: Any) -> str:
    """When, on what."""
    about = content.get("environment") if isinstance(content, dict) else None
    if not about:
        return "–"
    load = about.get("load_1min")
    busy = f", load {load:.1f}" if load is not None else ""
    return f"{about['date'][:10]}, {about['cores']} × {about['cpu']}{busy}"


def fractions(content: Any, *names: str, part: str = "kernels") -> str:
    """Of the copy rate, one for each kernel."""
    found = {kernel["name"]: kernel["fraction_of_copy"] for kernel in content["cuda"][part]}
    return " / ".join(f"{found[name]:.2f}" for name in names)


# ------------------------------------------------------------------------------------------ docs/numbers.md


def same_training() -> str:
    demo, seeds = result("demo"), result("seeds")
    if demo is None or seeds is None:
        return ""
    row = [f"{demo['swarm_loss']:.4f}", f"{demo['alone_loss']:.4f}", f"{seeds['spread']:.4f}"]
    head = ["swarm", "one process, same batches", "max − min of five seeds (`bench/seeds.py`)"]
    return table(head, [row]) + f"\n`demo.json`; `seeds.json`: {measured(seeds)}.\n"


def gpu_kernels() -> str:
    content = result("gpu_kernels")
    if content is None:
        return ""
    codecs = ("fp16", "bf16", "int8")
    gradients = ("float32", "bfloat16", "float16")
    rows = [
        ["encode fp16 / bf16 / int8", fractions(content, *(f"encode {name}" for name in codecs))],
        ["decode and add fp16 / bf16 / int8", fractions(content, *(f"decode+add {name}" for name in codecs))],
        ["encode int8, stochastic rounding", fractions(content, "encode int8 stochastic")],
        [
            "accumulate float32 / bf16 / fp16 gradients",
            fractions(content, *(f"accumulate {name}" for name in gradients)),
        ],
        [
            "gradient to the host as fp16, encode included (of the pinned copy rate)",
            fractions(content, "fp16: encode, copy to host", part="host"),
        ],
    ]
    cuda = content["cuda"]
    about = (
        f"{cuda['implementation']}, {cuda['numel'] / 1e6:.0f}M values, copy {cuda['copy_gb_per_s']:,.0f} GB/s"
    )
    return (
        table(["kernel", "fraction of copy"], rows) + f"\n`gpu_kernels.json`: {about}; {measured(content)}.\n"
    )


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


def lab_rows() -> list[dict[str, str]]:
    return result("lab_truth") or []


def lab_truth() -> str:
    cells = [[row["what"], row["asked"], row["found"], row["difference"]] for row in lab_rows()]
    return table(["measured", "asked", "found", "difference"], cells)


def gpu_models() -> str:
    content = result("gpu")
    if content is None:
        return ""
    fields = (
        "plain_sps",
        "local_sps",
        "ratio_median",
        "ratio_low95",
        "control_ratio",
        "device_ratio_median",
        "device_control_ratio",
        "step_us_median",
    )
    found = {name: entry["found"] for name, entry in content["sections"].items() if "found" in entry}
    rows = [
        [
            name.removeprefix("model "),
            f"{model['parameters'] / 1e6:.0f}M",
            *(number(model.get(field)) for field in fields),
        ]
        for name, model in found.items()
        if name.startswith("model ")
    ]
    head = ["model", "parameters", *(f"`{field}`" for field in fields)]
    device = found.get("kernel rates", {}).get("implementation", "one GPU")
    theirs = [
        [
            name.removeprefix("hivemind "),
            *(number(way[key]) for way in ways.values() for key in HIVEMIND_FIELDS),
        ]
        for name, ways in found.items()
        if name.startswith("hivemind ")
    ]
    beside = table(HIVEMIND_HEAD, theirs)
    return (
        table(head, rows)
        + (f"\n{beside}" if beside else "")
        + f"\n`gpu.json`: {device}; {measured(content)}.\n"
    )


def gpu_epochs() -> str:
    content = result("gpu")
    if content is None:
        return ""
    found = {name: entry["found"] for name, entry in content["sections"].items() if "found" in entry}
    ends = [
        [
            name.removeprefix("model "),
            f"{model['parameters'] / 1e6:.0f}M",
            number(median(model["boundary"]["waiting_seconds"])),
            number(median(model["boundary"]["delayed_seconds_per_step"])),
            number(max(model["boundary"]["delayed_seconds_per_step"])),
        ]
        for name, model in found.items()
        if model.get("boundary")
    ]
    head = ["one peer", "parameters", "seconds, waiting", "delayed: median step", "longest step"]
    pair, beside = found.get("pair together"), []
    if pair is not None:
        plain, peers = pair["plain"], pair["peers"]
        waited = [seconds for worker in peers["workers"] for seconds in worker["waited"][2:]]
        beside = [
            [
                f"{plain['workers'][0]['parameters'] / 1e6:.0f}M",
                number(plain["samples_per_second"]),
                number(peers["samples_per_second"]),
                number(pair["ratio"]),
                number(max(waited)),
                number(pair["memory_saved"] / 1e9),
            ]
        ]
    words = [
        "plain, samples/s",
        "peers, samples/s",
        "of plain",
        "longest wait of a step, s",
        "GB less on the device",
    ]
    exact = [
        [name, f"{max(worker['relative_error'] for worker in workers):.1e}"]
        for name, workers in found.get("pair exact", {}).items()
    ]
    return "\n".join(
        [
            table(head, ends),
            table(["two processes, parameters", *words], beside),
            table(["two peers on one GPU, six epochs", "relative error to float64"], exact),
            f"`gpu.json`: {measured(content)}.\n",
        ]
    )


HIVEMIND_FIELDS = ("hivemind_sps", "ratio_median", "ratio_low95")
HIVEMIND_HEAD = [
    "Hivemind",
    *(f"{way}: `{field}`" for way in ("its own buffers", "in `.grad`") for field in HIVEMIND_FIELDS),
]


def cpu_kernels() -> str:
    content = result("codec")
    if content is None:
        return ""
    rows = [
        [kernel["name"], number(kernel["gb_per_s"]), f"{kernel['fraction_of_copy']:.2f}"]
        for kernel in content["kernels"]
    ]
    about = f"{content['implementation']}, {size(content)} values, copy {content['copy_gb_per_s']:.1f} GB/s"
    head = ["kernel", "GB/s read and written", "of copy"]
    return table(head, rows) + f"\n`codec.json`: {about}; {measured(content)}.\n"


def size(content: dict[str, Any]) -> str:
    values = content.get("numel", content.get("params"))
    return "–" if values is None else f"{values / 1e6:.3g}M"


def network(content: dict[str, Any]) -> str:
    where = content.get("topology") or content.get("lab") or "loopback"
    return f"{where}, encrypted" if content.get("encrypted") is True else where


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
    return table([*head, "lost over used"], rows) + f"\n`beside.json`: {measured(content)}.\n"


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


FIELDS: dict[str, tuple[str, ...]] = {
    "allreduce": ("compression", "seconds_median", "goodput_gbps", "cpu_seconds_per_peer", "bit_identical"),
    "penalty": ("compression", "local_over_baseline", "global_over_local", "epoch_seconds_median"),
    "accumulate": ("device", "ratio_median", "ratio_low95", "control_ratio", "step_us_median"),
    "rounds": ("overhead_ms_p50", "overhead_ms_p99", "commit_ms_p50", "failed_rounds"),
    "join": (
        "state_bytes",
        "joiners",
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


SECURITY = ("hostile", "encrypted", "line_rate_encrypted")


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
    *("kills", "simulation"),
    *FIELDS,
)


def security() -> str:
    """Training under hostile connections, and what encryption costs."""
    hostile, loopback, lab = (result(name) for name in SECURITY)
    rows: list[Row] = []
    if hostile is not None:
        words = f"longest epoch with {hostile['connections']:,} hostile connections, over the median without"
        rows.append([words, "≤ 1.2", f"{hostile['longest_ratio']:.2f}", measured(hostile)])
        grown = hostile["memory_bytes"]["under"] - hostile["memory_bytes"]["before"]
        rows.append(
            ["memory that they took, most of any peer", "", f"{grown / 1e6:.0f} MB", measured(hostile)]
        )
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
            sections.append(f"### `bench/{path.stem}.py`\n\n{rows}\n`{path.name}`: {measured(content)}.\n")
    return "\n".join(sections)


# ------------------------------------------------------------------------------------------------ README.md


def readme() -> str:
    """The figures that a reader should know first."""
    rows: list[Row] = []
    demo, seeds = result("demo"), result("seeds")
    if demo is not None:
        words = (
            "validation loss after `make demo`, with a kill and a newcomer: swarm / one process, same batches"
        )
        rows.append([words, f"{demo['swarm_loss']:.4f} / {demo['alone_loss']:.4f}"])
    if seeds is not None:
        rows.append(["max − min of five seeds in one process, for comparison", f"{seeds['spread']:.3f}"])
    ratios = {}
    for _, content in results("pump_loopback"):
        seconds = {contender["name"]: contender["seconds_median"] for contender in content["contenders"]}
        what = f"{content['peers']} × {content['numel'] / 1e6:g}M"
        ratios[what] = f"{seconds['pump fp16'] / seconds['gloo float32']:.2f}"
    if ratios:
        words = f"averaging over loopback in fp16, time over gloo's: {' / '.join(ratios)} values"
        rows.append([words, " / ".join(ratios.values())])
    rates = (result("line_rate") or {}).get("long")
    if rates is not None:
        words = "averaging 100M values over an emulated 300 ms: faster than over one stream"
        rows.append([words, f"{rates['over_one_stream']:.1f}×"])
    watched = result("monitor_cost")
    if watched is not None:
        loss, spread = watched["loss_percent_median"], watched["control_spread_percent"]
        words = "throughput of 4 peers lost to a monitor / spread of the same measurement without one"
        rows.append([words, f"{loss:.1f}% / {spread:.1f}%"])
    for _, content in results("penalty"):
        if content.get("topology") is None:
            words = f"throughput of {content['peers']} peers on one machine, of what each computes alone, "
            words += f"epochs of {content['calculating_seconds_median']:.1f} s"
            words += f", one peer {content['slow']:g} times slower" if content["slow"] != 1 else ""
            words += ", updates delayed" if content["delay"] else ""
            words += ", on one GPU" if content.get("device", "cpu") != "cpu" else ""
            rows.append([words, f"{content['global_over_local']:.2f}"])
    gpu = result("gpu_kernels")
    if gpu is not None:
        rows.append(
            [
                "CUDA kernels on an H100, of the device's copy rate: encode fp16 / decode and add fp16",
                fractions(gpu, "encode fp16", "decode+add fp16"),
            ]
        )
        rows.append(
            [
                "fp16 gradient from an H100 to the host, encode included, of the pinned copy rate",
                fractions(gpu, "fp16: encode, copy to host", part="host"),
            ]
        )
    off = [row["difference"] for row in lab_rows()]
    if off:
        most = [
            max(abs(float(text[: -len(unit)].replace("−", "-"))) for text in off if text.endswith(unit))
            for unit in (" ms", "%")
        ]
        rows.append(
            ["emulated links: largest error of round trips / of rates", f"{most[0]:.2f} ms / {most[1]:.1f}%"]
        )
    return table(["", ""], rows)


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


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "same_training": same_training,
    "gpu_kernels": gpu_kernels,
    "pump_loopback": pump_loopback,
    "gpu_models": gpu_models,
    "gpu_epochs": gpu_epochs,
    "cpu_kernels": cpu_kernels,
    "lab_truth": lab_truth,
    "line_rate": line_rate,
    "versus": versus,
    "beside": beside,
    "security": security,
    "benches": benches,
    "idle": idle,
    "faults": faults,
    "others": others,
}


def render(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n{place[3]}", page)


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail when a page is not up to date"
    )
    args = parser.parse_args()
    stale = [path for path in PAGES if render(path.read_text()) != path.read_text()]
    if args.check:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} differs from bench/results; run python bench/tables.py",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(render(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
