"""How datagrams of the table travel: over UDP, or over TCP where UDP does not get through.

May import what the table's datagrams are made of: addresses, the wire format, the ledger, the
throttle. Start reading at
`carrier`, then `ways` (which way is taken) and `streams` (the TCP connections).
"""
