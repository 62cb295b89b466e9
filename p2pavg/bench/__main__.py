"""`python -m p2pavg.bench VERB` is `p2pavg bench VERB`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from p2pavg.cli import verbs

DESCRIPTION = "Measures kernels, links and swarms. The numbers in the documents come from these."

VERBS = (
    verbs.Verb("allreduce", "p2pavg.bench.allreduce.verb", "average vectors between real processes"),
    verbs.Verb(
        "plans", "p2pavg.bench.plans.verb", "the plans of a round over a network, predicted and measured"
    ),
    verbs.Verb(
        "net", "p2pavg.bench.net.verb", "round-trip time of a link, and throughput over the number of streams"
    ),
    verbs.Verb("codec", "p2pavg.bench.codec.verb", "encoding kernels against a plain copy"),
    verbs.Verb("accumulate", "p2pavg.bench.accumulate", "local training with and without the optimizer"),
    verbs.Verb("penalty", "p2pavg.bench.penalty.verb", "what a real training job loses to the swarm"),
    verbs.Verb("outer", "p2pavg.bench.outer.verb", "outer steps beside data-parallel training"),
    verbs.Verb("rounds", "p2pavg.bench.rounds.verb", "the cost of coordination alone"),
    verbs.Verb("input", "p2pavg.bench.input.verb", "what binds an input pipeline"),
    verbs.Verb("dht", "p2pavg.bench.dht.verb", "storing and finding records"),
    verbs.Verb("join", "p2pavg.bench.join.verb", "a newcomer fetching the state while the swarm trains"),
    verbs.Verb(
        "scenario", "p2pavg.bench.scenario.verb", "a published swarm, predicted and replayed in the lab"
    ),
    verbs.Verb("chaos", "p2pavg.bench.chaos.verb", "a swarm under injected faults"),
)


def main(argv: Sequence[str] | None = None, prog: str = "python -m p2pavg.bench") -> int:
    """Run one benchmark; returns the exit code: 0 success, 1 failure, 2 usage error."""
    return verbs.run(prog, DESCRIPTION, VERBS, list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
