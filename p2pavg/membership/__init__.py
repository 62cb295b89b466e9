"""Who is there: a Kademlia table of signed, expiring records, and the live view of one run on top of it.

May import `credentials` and the floors below. Start reading at docs/membership.md, then `view` (the peers
of a run) and `table/` (the records).
"""

from __future__ import annotations

from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.table.dht import DHT
from p2pavg.membership.table.dialling_back import Reachability
from p2pavg.membership.table.record import Record, key_of
from p2pavg.membership.view import View

__all__ = ["DHT", "PeerInfo", "Reachability", "Record", "View", "key_of"]
