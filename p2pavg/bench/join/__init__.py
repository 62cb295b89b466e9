"""`bench join`: a newcomer fetches the state. Start reading at `verb`."""
