"""`bench input`: the bottleneck of an input pipeline, and the steps that are better done once, beforehand.

Start at `verb`. `source` reads samples, `steps` runs the user's functions, `measure` times every split
between offline and online, on what `stored` wrote, also as `feeding` hands it to a trainer; `whole` times a
dataset or loader as it is, `verdict` explains the figures (pure), `shards` writes the best split.
"""
