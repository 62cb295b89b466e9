"""Swarms that a study of training across clouds and continents measured (2022/23), as data.

Links, speeds and epochs are those of the study's tables and logs (VLDB 17(6), tables 3 to 5); the target
batch was 32,768 samples, values travelled in fp16, and nothing was overlapped. Networks are a tenth of the
published
ones: what one stream got there is a pair's whole rate here, and one stream gets a tenth of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2pavg.lab.topology import Topology, load, parse

NETWORK_SCALE = 0.1  # of the networks here, of the published one
TARGET = 32_768

_CAMPUS = """
description = "A campus in Europe and four hosts of a zone in the western US, a tenth of the rates"
hosts = ["campus1", "west1", "west2", "west3", "west4"]

[groups]
campus = ["campus1"]
west = ["west1", "west2", "west3", "west4"]

[[paths]]
rtt_ms = 0.3
rate_mbps = 327

[[paths]]
between = ["campus", "west"]
rtt_ms = 159.1
rate_mbps = 55
flow_rate_mbps = 5.5
"""


@dataclass(frozen=True, slots=True)
class Model:
    """What was trained. values: parameters. sps: samples/s of a device."""

    name: str
    values: int
    sps: Mapping[str, float]


MODELS = {
    "language": Model("XLM-RoBERTa large", 560_100_000, {"T4": 116.9, "RTX8000": 251.7, "A10": 249.9}),
    "vision": Model("ConvNeXt large", 197_800_000, {"T4": 35.75, "RTX8000": 84.2, "A10": 92.0}),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A swarm. devices: by host. printed: seconds of an epoch under Hivemind, by model, where published."""

    name: str
    devices: Mapping[str, str]
    printed: Mapping[str, float]

    def network(self) -> Topology:
        return parse(_CAMPUS, "campus-5") if self.name == "E-C" else load("clouds-4")


SCENARIOS = {
    one.name: one
    for one in (
        Scenario("C-4", dict.fromkeys(("us1", "eu1", "asia1", "aus1"), "T4"), {"language": 135.85}),
        Scenario(
            "C-8",
            {f"{place}{n}": "T4" for place in ("us", "eu", "asia", "aus") for n in (1, 2)},
            {"language": 96.7, "vision": 134.65},
        ),
        Scenario(
            "E-C",
            {"campus1": "RTX8000"} | dict.fromkeys(("west1", "west2", "west3", "west4"), "A10"),
            {"language": 170.81, "vision": 130.59},
        ),
    )
}
