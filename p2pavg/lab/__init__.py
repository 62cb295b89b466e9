"""The planet on one machine: an emulated wide-area network, a network namespace for each host."""

from __future__ import annotations

from p2pavg.lab.lab import Lab, RunningLab
from p2pavg.lab.stats import LabStats, PathCounters
from p2pavg.lab.topology import NodeSettings, PathSettings, Topology, load, parse, shipped

__all__ = [
    "Lab",
    "LabStats",
    "NodeSettings",
    "PathCounters",
    "PathSettings",
    "RunningLab",
    "Topology",
    "load",
    "parse",
    "shipped",
]
