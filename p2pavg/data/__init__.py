"""Which samples a peer draws: every index of a pass in exactly one committed average, whatever dies or joins.

Start at `sampler` (what a DataLoader iterates) and `draws` (what this peer holds, and what became of it).
What all peers know alike is the `ledger`: which positions of the passes are consumed, and which peer holds
which leases. It changes by committed rounds alone, with what `notes` of their members say, so it is the same
on all peers. Beside them `runs` (sets of positions) and `permutation`
(position -> index). `cache` keeps shards that are fetched over HTTP on disk, for all processes of a machine.

Imports errors and torch's Sampler; everything but the sampler and the cache is pure.
"""
