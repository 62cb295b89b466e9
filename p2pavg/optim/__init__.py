"""The training loop's side: CollaborativeOptimizer around a user's optimizer.

May import `peer` and the floors below. Start reading at `optimizer` and its
`training_options`; `member` enters and leaves the run, `gradients/` is the way of gradients to the rounds and
back, `updates/` what happens at a step boundary, `outer/` the same for outer steps. `process/` has signals,
notices of the cloud, and who was started with this peer.
"""
