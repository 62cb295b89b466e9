"""Kernels on the CPU and the GPU, and training on a GPU."""

from __future__ import annotations

from statistics import median

from bench.tables.markdown import number, table
from bench.tables.results import fractions, measured, result, size


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


def gpu_outer() -> str:
    content = result("gpu_outer")
    if content is None:
        return ""
    alone, ways, four = content["alone"], content["transfer"], content["four"]
    longest = max(step for one in four["replicas"] for step in one["longest_steps"])
    plain = max(step for one in four["replicas"] for step in one["plain_seconds_per_step"])
    to_host = {name: f"{1e3 * ways['seconds'][name]:.1f} ms" for name in ways["seconds"]}
    rows = [
        ["a step of plain PyTorch", f"{alone['milliseconds_per_step']:.1f} ms"],
        ["samples/s with outer steps, between two averages, of plain", f"{alone['ratio_median']:.4f}"],
        ["the same, lower end of the 95% interval", f"{alone['ratio_low95']:.4f}"],
        ["plain PyTorch beside itself", f"{alone['control_ratio']:.4f}"],
        ["device memory beyond plain", f"{alone['memory_beyond_plain'] / 1e6:.0f} MB"],
        ["gradient to the host as fp16", to_host["fp16"]],
        ["as int8 / int4 with what is owed", f"{to_host['int8']} / {to_host['int4']}"],
        ["the same, of fp16", f"{ways['of_fp16']['int8']:.2f} / {ways['of_fp16']['int4']:.2f}"],
        ["samples/s of whole outer steps of 100 local ones, of plain", f"{four['utilisation']:.3f}"],
        ["the longest local step of all replicas, beside the plain one", f"{longest:.2f} s, {plain:.2f} s"],
        ["θ_ref equal to the bit after all", "yes" if four["bit_identical"] else "no"],
    ]
    about = f"`gpu_outer.json`: {content['device']}, {alone['parameters'] / 1e6:.0f}M parameters"
    return table(["outer steps of a GPT", "measured"], rows) + f"\n{about}; {measured(content)}.\n"


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
