"""`bench net`: round-trip time and throughput of a link. Start reading at `verb`."""
