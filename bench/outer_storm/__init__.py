"""Peers with outer steps are killed, one about every minute. Start at `__main__`."""
