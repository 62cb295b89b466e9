"""`bench outer`: outer steps beside data-parallel training, with real peers."""

CONTEXT = 64  # bytes of context: tokens of a sample
