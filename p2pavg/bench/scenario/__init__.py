"""`bench scenario`: a published swarm, predicted and then replayed in the lab. Start reading at `verb`.

`published` has the swarms as data, `replay` lets real peers train with sleeping calculation over a network,
and `foretell` says before what they will take.
"""
