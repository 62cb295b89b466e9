"""`bench chaos`: a swarm under injected faults. Start reading at `verb`; `check` judges the events."""
