"""What a lost peer costs, side by side with other systems: `python -m bench.kills`."""
