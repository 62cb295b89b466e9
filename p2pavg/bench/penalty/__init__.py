"""`bench penalty`: the throughput that a training job loses to averaging. Start reading at `verb`."""
