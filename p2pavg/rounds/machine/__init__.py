"""The state machine of the rounds: events in, actions out, time as a parameter, no I/O.

Pure: may import of `rounds` only `protocol`, and the pure floors below (`plan`). Start reading at `machine`,
then `core`, which all parts read, and change by the verbs of `core` alone; `rules` holds the rules of
decisions. `machine` builds all parts and hands itself to each; one part reaches another through the machine,
so these imports are circular.
"""
