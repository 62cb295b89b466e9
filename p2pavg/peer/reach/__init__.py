"""Links between members that cannot dial each other: who lacks which, who arranges them, who relays.

May import `transport`, `rounds` and the floors below. Start reading at `introductions`, which has all of one
peer's part in that, then `meetings`.
"""
