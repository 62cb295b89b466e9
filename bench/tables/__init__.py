"""From bench/results to the tables of the pages: `python -m bench.tables`."""
