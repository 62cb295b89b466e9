"""Peers behind NATs of the lab: through holes in them where RFC 5382 allows it, else through a relay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.reach.__main__ import main
from p2pavg.lab import Lab
from p2pavg.lab.topology import parse
from tests.wan.training import ROOT, lines, train

pytestmark = pytest.mark.wan

HOMES = """
hosts = ["cloud", "one", "two"]
[gateways.first]
hosts = ["one"]
nat = "{nat}"
[gateways.second]
hosts = ["two"]
nat = "{nat}"
early_syn = "reset"
[[paths]]
rtt_ms = 20
"""
RUN = "nat"  # of the training script


def bench(path: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `bench.reach` found of each pair, and wrote to a path."""
    assert main(["--tries", "2", "--json", str(path), *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(path.read_text())["pairs"]
    return found


@pytest.mark.parametrize(
    ("pair", "early_syn", "rtt_ms", "way"),
    [
        ("independent/port:independent/port", "reset", 40, "punched"),
        ("port/port:independent/address", "drop", 40, "punched"),
        ("port/port:independent/port", "reset", 150, "relayed"),
    ],
)
def test_two_peers_pass_the_nats_that_can_be_passed(
    pair: str, early_syn: str, rtt_ms: int, way: str, tmp_path: Path
) -> None:
    """By simultaneous open, whatever becomes of an early SYN; where a port cannot be foreseen, by a relay,
    within three seconds (half as long again here, for a machine that is busy), 300 ms from each other, too.
    """
    words = ["--pair", pair, "--early-syn", early_syn, "--rtt-ms", str(rtt_ms)]
    (found,) = bench(tmp_path / "found", *words)
    assert found["ways"][way] == found["tries"] == 2, found
    assert found["seconds_median"] < 4.5, found


@pytest.mark.timeout(200)
def test_two_homes_and_a_node_that_only_helps_train() -> None:
    """Two peers whose NATs cannot be passed, and a bootstrap node: ten rounds of both, with equal bits."""
    with Lab(parse(HOMES.format(nat="port/port"), "homes")) as lab:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        key = ["--identity", "/dev/shm/p2pavg-helper.key"]
        helper = lab.spawn(
            "cloud",
            [sys.executable, "-m", "p2pavg", "bootstrap", "--run", RUN, *key],
            text=True,
            env=env,
            stdout=subprocess.PIPE,
        )
        assert helper.stdout is not None
        way_in = helper.stdout.readline().strip()
        peers = {host: train(lab, host, way_in, 2) for host in ("one", "two")}
        read = {host: lines(process) for host, process in peers.items()}
        for host in peers:
            read[host]()
        results = {host: read[host]() for host in peers}
        assert results["one"]["lineage"] == results["two"]["lineage"]
        assert results["one"]["links"] == [results["two"]["peer"]]
        for process in peers.values():
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0, said
