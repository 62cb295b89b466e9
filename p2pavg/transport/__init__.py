"""Streams, links and frames, which move bytes between two peers.

May import `membership` and the floors below. Start reading at `engine`, the interface of the two engines
(`pump_engine` over C++ and its twin `python/`), then `links/endpoint`; `frames` is the wire format.
"""
