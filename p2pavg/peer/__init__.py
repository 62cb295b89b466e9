"""One process's place in a swarm: the event-loop thread and everything that lives on it.

May import `rounds` and the floors below. Start reading at `peer`, then `runtime`.
"""
