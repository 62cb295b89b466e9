"""One epoch's conversation: progress, ballots, commit, retry, healing, and the state that newcomers get.

May import `allreduce` and the floors below. Start reading at docs/rounds.md, then `machine/`, which
decides and is pure, and `loop/`, which carries out. `training` is what a training thread and the rounds
say to each other.
"""
