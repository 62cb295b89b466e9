"""What plans are held to: `python -m bench.plans` measures all of it, `shapes` what it names."""
