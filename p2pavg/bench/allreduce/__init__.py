"""`bench allreduce`: N real processes average vectors. Start reading at `verb`."""
