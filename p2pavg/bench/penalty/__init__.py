"""`bench penalty`: what a training job loses to the swarm. Start reading at `verb`."""
