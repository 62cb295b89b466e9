"""`bench outer`: outer steps beside data-parallel training, with real peers."""

CONTEXT = 64  # bytes that the model looks back: tokens of a sample
