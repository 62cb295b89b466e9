"""The table in docs/lab.md: what the lab does against what its topologies say. Run it on a quiet machine.

python -m bench.lab_truth [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from p2pavg.lab import Lab, Topology, load, parse

ROOT = Path(__file__).resolve().parent.parent
TRAFFIC = ROOT / "tests" / "wan" / "traffic.py"
TCP_SHARE = 1448 / 1500
ATTEMPTS = 3


def argv(*words: object) -> list[str]:
    return [sys.executable, str(TRAFFIC), *map(str, words)]


def client(lab: Lab, host: str, *words: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(lab.run(host, argv(*words)))
    return result


class Sink:
    """A server of traffic.py on host b; `result` waits for what it measured."""

    def __init__(self, lab: Lab, *words: object) -> None:
        self._process = lab.spawn("b", argv(*words), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def result(self) -> dict[str, Any]:
        output: dict[str, Any] = json.loads(self._process.communicate(timeout=60)[0])
        return output


def rtt(lab: Lab) -> float:
    Sink(lab, "echo", 7)
    return min(client(lab, "a", "ping", lab.address("b"), 7, 20, 2000)["rtts"])


def udp(lab: Lab, mbps: float) -> dict[str, Any]:
    sink = Sink(lab, "udp-sink", 9)
    client(lab, "a", "udp-send", lab.address("b"), 9, mbps, 3, 1200)
    return sink.result()


def tcp(lab: Lab, streams: int, skip_s: float, seconds: float) -> float:
    sink = Sink(lab, "tcp-sink", 5000, streams, skip_s, seconds)
    sender = lab.spawn(
        "a",
        argv("tcp-send", lab.address("b"), 5000, streams, 0),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    mbps = sink.result()["mbps"]
    sender.kill()
    return float(mbps)


def two(paths: str) -> Topology:
    return parse(f'hosts = ["a", "b"]\n[[paths]]\n{paths}', "two")


def rows() -> list[tuple[str, str, str, str]]:
    """(what, asked, measured, difference); a measurement during which the router was late is taken again."""
    found = []

    def row(what: str, shape: Topology, asked: float, unit: str, measure: Any) -> None:
        for _ in range(ATTEMPTS):
            with Lab(shape) as lab:
                value = measure(lab)
                reason = lab.void_reason()
            if reason is None:
                break
        difference = f"{value / asked - 1:+.1%}"
        if unit == "ms":
            difference = f"{value - asked:+.2f} ms"
        elif unit == "%":
            difference = f"{(value - asked) / (asked * (100 - asked) / 18000) ** 0.5:+.1f} σ"
        found.append(
            (
                what,
                f"{asked:g} {unit}",
                f"{value:.4g} {unit}",
                difference if reason is None else f"void: {reason}",
            )
        )

    for name in ("lan-4", "join-4", "six-100ms", "two-300ms"):
        shape = load(name)
        row(f"round trip, `{name}`", shape, shape.rtt_ms("a", "b"), "ms", rtt)
    for mbps in (5, 50, 200):
        shape = two(f"rtt_ms = 20\nrate_mbps = {mbps}\nqueue_kb = {40 * mbps}")

        def datagrams(lab: Lab, mbps: float = mbps) -> float:
            got = udp(lab, 1.3 * mbps)
            return float(got["bytes"] * 8e-6 / got["seconds"])

        row("datagrams through a rate", shape, mbps, "Mb/s", datagrams)
    for mbps, rtt_ms in ((100, 20), (500, 100), (1000, 20)):
        shape = two(f"rtt_ms = {rtt_ms}\nrate_mbps = {mbps}")
        row(f"10 TCP streams, {rtt_ms} ms", shape, mbps, "Mb/s", lambda lab: tcp(lab, 10, 4, 6) / TCP_SHARE)
    capped = two("rtt_ms = 20\nrate_mbps = 1000\nflow_rate_mbps = 40")
    for streams in (1, 4):
        what = f"{streams} TCP stream{'s' if streams > 1 else ''}, 40 Mb/s per flow"
        row(what, capped, 40 * streams, "Mb/s", lambda lab, n=streams: tcp(lab, n, 3, 4) / TCP_SHARE)

    for loss in (0.01, 0.1):

        def lost(lab: Lab) -> float:
            udp(lab, 60)
            counters = lab.stats().paths["a", "b"]
            return 100 * counters.lost_packets / counters.sent_packets

        row("lost of 18 000 datagrams", two(f"rtt_ms = 2\nloss = {loss}"), 100 * loss, "%", lost)
    with Lab(two("rtt_ms = 60\njitter_ms = 20")) as lab:
        got = udp(lab, 40)
    found.append(
        ("reordered inside a flow, 20 ms of jitter", "0", f"{got['reordered']} of {got['packets']}", "")
    )
    with Lab(two("rtt_ms = 0")) as lab:
        best = max(tcp(lab, streams, 1, 2) for streams in (1, 2, 4, 1))
    found.append(("capacity, one pair, no caps", "≥ 5 Gb/s", f"{best / 1e3:.1f} Gb/s", ""))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    table = rows()
    print(f"| measured (load {os.getloadavg()[0]:.1f}) | asked | found | difference |\n|---|---|---|---|")
    for cells in table:
        print("| " + " | ".join(cells) + " |")
    if args.json:
        names = ("what", "asked", "found", "difference")
        Path(args.json).write_text(
            json.dumps([dict(zip(names, cells, strict=True)) for cells in table], indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
