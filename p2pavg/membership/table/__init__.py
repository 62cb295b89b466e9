"""The distributed hash table: nodes, datagrams, signed records, lookups.

Imports nothing else of `membership`. Start reading at `dht`, then `node`.
"""
