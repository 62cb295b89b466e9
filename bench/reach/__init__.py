"""Which peers meet, how, and how fast: through NATs (`bench.reach`), through a relay, without UDP."""
