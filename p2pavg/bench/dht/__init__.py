"""`bench dht`: storing and finding records. Start reading at `verb`."""
