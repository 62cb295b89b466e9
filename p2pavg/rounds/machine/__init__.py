"""The state machine of the rounds: events in, actions out, time as a parameter, no I/O.

Pure: may import `rounds.protocol` alone. Start reading at `machine`, then `core`.
"""
