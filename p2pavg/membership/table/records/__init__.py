"""The records that a node holds for others: bounded, expiring, and never going backwards.

May import `table.record` and `table.address`. Start reading at `store`; `entries` is what it holds and tells.
"""
