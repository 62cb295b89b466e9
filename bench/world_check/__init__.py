"""What became of a run of `bench.world`, recomputed from the peers' logs by `python -m bench.world_check`.

Shares no code with p2pavg, and imports none: of each promise it looks at what the scripts wrote down
themselves (hashes of parameters, indices of samples, seconds in step()), beside what p2pavg's reports say.
`logs` reads, `data` counts indices, `replay` trains again in one process; start reading at `__main__`.
"""
