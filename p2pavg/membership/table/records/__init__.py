"""The records that a node holds for others: bounded, expiring, and never going backwards.

May import the table's `record`, `address`, `ledger` and `routing`. Start reading at `store`;
`entries` is what the store holds and tells, `answers` what a node answers from the store.
"""
