"""`bench input`: what binds an input pipeline, and which of its steps are better done once, beforehand.

Start at `verb`. `source` reads samples, `steps` runs the user's functions, `measure` times every split
between offline and online, `verdict` says what the figures mean (pure), `shards` writes what was decided.
"""
