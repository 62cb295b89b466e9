"""Links between two peers: listening, handshakes, data streams that come and go, repairs.

May import `transport.engine`, what is below it, and the floors below `transport`.
Start reading at `endpoint`, then `link`.
"""
