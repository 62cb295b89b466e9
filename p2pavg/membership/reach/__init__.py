"""How others reach this machine: ports that its gateway maps.

Imports nothing else of `membership`. Start reading at `port_mapping`, then `lessors`, then `gateway_talk`.
"""
