"""Outer steps: peers train on their own for many steps, and average how far each has moved.

May import everything of `optim` but `optimizer` and `member`, and the floors below `optim`.
Start reading at `settings`, then `update`; docs/outer.md tells when to use it.
"""
