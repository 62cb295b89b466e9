"""What travels between the machines of a run: ballots, messages, roles.

Pure: imports no other room of `rounds`. Start reading at `messages`.
"""
