"""Who reduces which part of the vector, and what an encoded contribution or result looks like.

May import `transport`, `membership` and the floors below. Start reading at `jobs`, then `partition`;
`plan`, `loads`, `partition`, `minimax` and `rates` decide and are pure.
"""
