"""The figures that a reader should know first."""

from __future__ import annotations

from bench.tables.markdown import Row, table
from bench.tables.results import fractions, lab_rows, result, results


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
        loss, (low, high) = watched["loss_percent_mean"], watched["loss_percent_interval"]
        words = (
            f"throughput of 4 peers lost to a monitor with {watched['pages']} browsers, and the 95% interval"
        )
        rows.append([words, f"{loss:.2f}% ({low:.2f} to {high:.2f})"])
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
