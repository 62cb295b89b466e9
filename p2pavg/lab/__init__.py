"""An emulated wide-area network on one machine, with a network namespace for each host.

This room may import the floors below, and needs none. Start reading at docs/lab.md, then `lab`; `topology`
and `gateways` read the files in `topologies/`. The packets pass through a router in C++ (csrc/lab).
"""

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
