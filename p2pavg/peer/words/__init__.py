"""What a person at a terminal is told of the peers around: who comes, goes, falls silent, or is one too many.

May import `rounds.loop.hello` and the floors below. Start reading at `observer`.
"""
