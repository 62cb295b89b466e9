"""One process's place in a swarm: the event-loop thread and everything that lives on it.

May import `rounds` and the floors below. Start reading at `peer`, then `runtime`. An option
is a field in `settings`; `entering` and `announcing` are how a peer takes part and is seen, `dialling`
and `refusals` (in both directions) how it gets its links, and `reach` how others get to it.
"""
