"""States and results in files: checkpoints, what writes them, and what waits on a disk.

May import what `rounds.state` may. Start reading at `checkpoints`, then `saver`.
"""
