"""`p2pavg bench VERB`: measurements that users make of their own machines, links and swarms.

Start at `__main__`, the table of the verbs. A verb is a folder (`verb.py` has its options and its words,
`worker.py` the processes that it starts) or, when small, a module; each has `register(subparsers)`. Shared
modules: `options`, `result`, `machine`, `progress`, `workers` (processes that answer JSON lines) and `toy`
(training without a model).

Imports any floor below; nothing imports it but `bench/`, the scripts behind the pages, `launch`, which takes
`options` and `machine`, and tests.
"""
