"""The planet on one machine: an emulated wide-area network, a network namespace for each host.

May import the floors below it, and needs none. Start reading at docs/lab.md, then `lab`; `topology` and
`gateways` read the files in `topologies/`. The packets pass through a router in C++ (csrc/lab).
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
