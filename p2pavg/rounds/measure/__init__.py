"""What is measured while rounds run: links, rates, beats, and the report made of them.

May import `rounds.machine`, `rounds.training`, `rounds.protocol` and the floors below `rounds`.
Start reading at `recorder`.
"""
