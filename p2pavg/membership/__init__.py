"""Who is there: a Kademlia table of signed, expiring records, and the live view of one run on top of it."""

from __future__ import annotations

from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.table.dht import DHT, key_of
from p2pavg.membership.table.reach import Reachability
from p2pavg.membership.table.record import Record
from p2pavg.membership.view import View

__all__ = ["DHT", "PeerInfo", "Reachability", "Record", "View", "key_of"]
