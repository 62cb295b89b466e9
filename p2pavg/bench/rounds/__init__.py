"""`bench rounds`: the cost of coordination alone. Start reading at `verb`."""
