"""Ways to a peer that cannot be dialled: through holes in both NATs, or through a member that relays.

May import `transport.links` and what is below it. Each way ends in a connected socket, on which the ordinary
handshake follows. Start reading at `punching`, the decisions, then `hole`, which carries them out.
"""
