"""Benchmarks: one module per verb, each with `register(subparsers)`; what they share is in `common`."""
