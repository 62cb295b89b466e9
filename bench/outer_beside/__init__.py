"""Outer steps beside torchft's DiLoCo: loss, bytes, seconds, and what a kill costs. Start at `__main__`."""
