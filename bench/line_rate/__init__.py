"""Averaging against the true rates of the lab's links: `python -m bench.line_rate`."""
