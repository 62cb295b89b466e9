"""Foresight: what an epoch of a swarm will take and cost, and which machines to rent for it.

`laws`, `joins`, `evidence`, `fit`, `inventory`, `bounds`, `search` and `trace` decide, `predict` and `plan`
are the verbs. May import `allreduce`, `report` and the floors below. Start reading at `laws`.
"""
