"""Ways to a peer: whether others can dial it, and links between members that cannot dial each other.

May import `transport`, `rounds` and the floors below. Start reading at `introductions`, which has all of one
peer's part in such links, then `meetings`; `reachability` stands for itself.
"""
