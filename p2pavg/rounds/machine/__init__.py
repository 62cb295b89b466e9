"""The state machine of the rounds: events in, actions out, time as a parameter, no I/O.

Pure: may import of `rounds` only `protocol`, and the pure floors below (`plan`). Start reading at `machine`,
then `core`, which all parts read and change by its verbs; `rules` holds what they decide by. `machine` builds
all parts and hands itself to each; a part reaches another through it, so these imports are circular.
"""
