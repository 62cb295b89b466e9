"""Averaging side by side with other systems: `python -m bench.versus`."""
