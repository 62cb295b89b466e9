"""The state machine of the rounds: events in, actions out, time as a parameter, no I/O.

Pure: may import `rounds.protocol` alone. Start reading at `machine`, then `core`, which all parts read and
change by its verbs; `rules` holds what they decide by. The parts import each other only through the mediator:
`machine` makes every part and hands itself to each, so these files import each other in a circle.
"""
