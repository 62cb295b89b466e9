"""bench net finds the truth of the lab, agrees with iperf3, and its advice holds."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pavg.lab import Lab, shipped
from tests.ports import free_port

PAYLOAD = 1448 / 1500  # of the IP bytes of a full segment
BENCH = [sys.executable, "-m", "p2pavg.bench", "net"]
ATTEMPTS = 2
CAPPED = str(Path(__file__).parent / "capped.toml")
pytestmark = pytest.mark.timeout(400)
FLOWCAPS = ("clouds-4", "us1:eu1")
OFTEN = [  # the other links take too long for every run, 300 ms about a minute: `pytest -m long`
    ("lan-4", None),
    ("six-100ms", None),
    FLOWCAPS,
    ("mixed", "a:home"),
]
SELDOM = [
    *((name, None) for name in shipped() if (name, None) not in OFTEN),
    (CAPPED, None),
    ("clouds-4", "eu1:aus1"),
]
PAIRS = [*OFTEN, *(pytest.param(*pair, marks=pytest.mark.long) for pair in SELDOM)]


@functools.cache
def measured(topology: str, pair: str | None) -> dict[str, Any]:
    """The result as JSON, void when the lab, or the machine, was too busy each time.

    A sweep takes long: tests that look at one link share its result.
    """
    words = [*BENCH, "--lab", topology, "--json", "-", *(["--pair", pair] if pair else [])]
    for _ in range(ATTEMPTS):
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.stdout, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (1 if result["void_reason"] else 0)
        if not result["void_reason"]:
            break
    return result


def bench(topology: str, pair: str | None) -> dict[str, Any]:
    """A result that is not void."""
    result = measured(topology, pair)
    if result["void_reason"]:
        pytest.skip(f"void {ATTEMPTS} times: {result['void_reason']}")
    return result


def with_sysctls(name: str, tmp_path: Path, sysctls: dict[str, str]) -> str:
    """A topology of the package with kernel settings, as a file."""
    folder = Path(sys.modules["p2pavg.lab"].__file__ or "").parent
    lines = "\n".join(f'"{key}" = "{value}"' for key, value in sysctls.items())
    path = tmp_path / f"{name}-set.toml"
    path.write_text((folder / "topologies" / f"{name}.toml").read_text() + f"\n[sysctl]\n{lines}\n")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pair"), PAIRS, ids=lambda given: given and Path(given).stem)
def test_rate_and_round_trip_are_the_labs(name: str, pair: str | None) -> None:
    """Both ways the rate is within 10 % of the topology's payload rate, the RTT within 2 % or 0.3 ms."""
    result = bench(name, pair)
    truth = result["lab"]
    assert result["filled"]
    assert result["rate_gbps"] == pytest.approx(truth["true_rate_gbps"] * PAYLOAD, rel=0.1)
    assert result["reverse"]["rate_gbps"] == pytest.approx(truth["true_reverse_rate_gbps"] * PAYLOAD, rel=0.1)
    assert result["rtt_ms"] == pytest.approx(truth["true_rtt_ms"], rel=0.02, abs=0.3)
    assert result["seconds"] <= 62


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rtt", "fewest", "most"),
    [("six-100ms", "100 ms", 3, 5), pytest.param("two-300ms", "300 ms", 9, 13, marks=pytest.mark.long)],
)
def test_a_long_link_is_explained(name: str, rtt: str, fewest: int, most: int) -> None:
    """The sweep takes a minute at most, blames the send buffer and counts the streams right."""
    result = bench(name, None)
    assert result["seconds"] <= 60
    assert result["one_stream_limited_by"] == "send buffer"
    assert fewest <= result["best_streams"] <= most
    assert "net.ipv4.tcp_wmem" in [one["sysctl"] for one in result["advice"]]
    assert f"MB fit in flight over {rtt}" in result["words"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pair", "mbps", "fewest", "most"),
    [(*FLOWCAPS, 21, 9, 11), pytest.param(CAPPED, None, 20, 11, 14, marks=pytest.mark.long)],
)
def test_a_cap_per_flow_is_blamed_on_the_path(
    name: str, pair: str | None, mbps: int, fewest: int, most: int
) -> None:
    """Where the path caps a stream, no buffer is suggested, and as many streams as it has caps fill it."""
    result = bench(name, pair)
    assert result["one_stream_limited_by"] == "path"
    assert result["one_stream_gbps"] == pytest.approx(1e-3 * mbps * PAYLOAD, rel=0.1)
    assert fewest <= result["best_streams"] <= most
    assert not {"net.ipv4.tcp_wmem", "net.ipv4.tcp_rmem"} & {one["sysctl"] for one in result["advice"]}


@pytest.mark.slow
def test_the_suggested_buffers_gain_what_was_said(tmp_path: Path) -> None:
    """With the suggested sysctls one stream carries most of what was promised, several times what it did."""
    before = bench("six-100ms", None)
    suggested = {one["sysctl"]: one["suggested"] for one in before["advice"] if "mem" in one["sysctl"]}
    assert suggested
    after = bench(with_sysctls("six-100ms", tmp_path, suggested), None)
    assert after["one_stream_gbps"] > 0.7 * before["rate_gbps"]
    assert after["one_stream_gbps"] > 2 * before["one_stream_gbps"]


class Iperf3:
    """iperf3 between the first two hosts of a lab."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._src, self._dst = lab.hosts[:2]
        self._server = lab.spawn(
            self._dst,
            ["iperf3", "-s", "--forceflush"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._server.stdout is not None
        while "listening" not in self._server.stdout.readline():
            assert self._server.poll() is None

    def gbps(self, streams: int) -> float:
        words = ["iperf3", "-c", self._lab.address(self._dst), "-P", str(streams), "-t", "8", "-O", "4", "-J"]
        output = self._lab.run(self._src, words, timeout=60)
        return float(json.loads(output)["end"]["sum_received"]["bits_per_second"]) * 1e-9


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed: nothing to compare with")
@pytest.mark.parametrize("name", ["two-300ms", "six-100ms", "lan-4"])
def test_agrees_with_iperf3(name: str) -> None:
    """At 1, 4 and 16 streams, where the sweep has them, rates are within 10 % of iperf3's, and so is W."""
    result = bench(name, None)
    with Lab(name) as lab:
        iperf3 = Iperf3(lab)
        seen = {k: iperf3.gbps(k) for k in (1, 4, 16)}
        reason = lab.void_reason()
    if reason:
        pytest.skip(f"void: {reason}")
    for point in result["sweep"]:
        if point["streams"] in seen:
            assert point["gbps"] == pytest.approx(seen[point["streams"]], rel=0.1)
    if result["window_limited"]:
        assert result["window_bytes"] == pytest.approx(seen[1] / 8e-9 * result["rtt_ms"] / 1e3, rel=0.1)


def test_a_lab_host_listens_and_the_command_line_fails_in_one_line() -> None:
    """A wrong pair, and a host where nobody listens, are one line on stderr and exit code 1."""
    for words, message in (
        (["--lab", "lan-4", "--pair", "a:z"], "no host 'z'"),
        (["--lab", "lan-4", "--pair", "a:a"], "two different hosts"),
        (["--lab", "nowhere"], "no topology"),
        (["--connect", f"127.0.0.1:{free_port()}"], "does not answer"),
    ):
        done = subprocess.run([*BENCH, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
