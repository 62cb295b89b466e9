"""`bench chaos`: a swarm under injected faults. Start reading at `verb`; `swarm` has the faults, `check`
judges the events.
"""
