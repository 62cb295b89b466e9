"""The `p2pavg` command, which is also `python -m p2pavg`.

May import every floor below; the verbs of the roof are named as text and imported when they are used.
Start reading here, then `verbs`: a verb is a line of `VERBS` and a module with `register(subparsers)`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from p2pavg.cli import verbs

DESCRIPTION = "Averages gradients between PyTorch processes that share nothing but the internet."

VERBS = (
    verbs.Verb("bootstrap", "p2pavg.cli.membership", "run a DHT-only node that others name in initial_peers"),
    verbs.Verb("reach", "p2pavg.cli.reach", "tell how others reach this machine"),
    verbs.Verb("doctor", "p2pavg.cli.doctor", "tell what this machine lacks"),
    verbs.Verb("peers", "p2pavg.monitor.peers", "list who is in a run"),
    verbs.Verb("monitor", "p2pavg.monitor.cli", "watch a run live, without slowing it"),
    verbs.Verb("report", "p2pavg.monitor.cli", "turn a run's reports into one page of plots and a summary"),
    verbs.Verb("launch", "p2pavg.launch.cli", "start a script as a swarm", rest=True),
    verbs.Verb("predict", "p2pavg.forecast.predict", "what an epoch of a swarm will take and cost"),
    verbs.Verb("plan", "p2pavg.forecast.plan", "which machines to rent"),
    verbs.Verb("credentials", "p2pavg.cli.credentials", "make the credentials of a closed run"),
    verbs.Verb("lab", "p2pavg.lab.cli", "emulate a wide-area network on this machine"),
)
BENCH_HELP = "measure this machine, a link or a swarm; 'p2pavg bench --help' lists what"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 success, 1 failure, 2 usage error."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] == "bench":
        bench = importlib.import_module("p2pavg.bench.__main__")
        return int(bench.main(words[1:], prog="p2pavg bench"))
    listed = (*VERBS, verbs.Verb("bench", "p2pavg.bench.__main__", BENCH_HELP))
    return verbs.run("p2pavg", DESCRIPTION, listed, words)
