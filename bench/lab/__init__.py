"""The laws of `p2pavg predict` against the lab: `python -m bench.lab.predicted`."""
