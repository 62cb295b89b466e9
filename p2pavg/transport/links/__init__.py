"""Links between two peers: listening, handshakes, data streams that come and go, repairs.

May import `transport.engine`, `transport.frames` and `transport.sealing`.
Start reading at `endpoint`, then `link`.
"""
