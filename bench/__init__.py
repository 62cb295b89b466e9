"""The scripts behind every figure of the pages, and the comparisons with other systems.

Run them from the repository's folder: `python -m bench.line_rate --help`. Their --json files belong into
`bench/results`; `python -m bench.tables` makes the tables of README.md and docs/numbers.md from these.

line_rate/ versus/ kills/ gpu/   one question each, with the worker processes that it needs
reach/ watching/                 scripts about one matter
world/ world_check/              what the internet does to a run, and its judge, which imports no p2pavg
tables/                          from results to pages
every other file                 one script, one question; its first lines say what its figures mean

Imports p2pavg, and is imported by the tests alone. The files in `*/workers/` run in the environments of other
systems, as files: but for p2pavg's own peer, they import neither p2pavg nor this package.
"""
