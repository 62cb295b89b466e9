"""Impassable: peers whose NATs let a control connection through and no data stream. Pure.

Networks change, so this holds for some time, longer each time it turns out to be so still, and only between
the addresses at which the two were seen. Times are of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.peer.reach.common import Hosts

FIRST_S, LONGEST_S = 600.0, 86400.0
MOST_PEERS = 512


@dataclass(slots=True)
class _Pair:
    hosts: frozenset[Hosts]  # where members saw the two when they met
    until: float = 0.0
    lasts_s: float = 0.0


class Impassable:
    """What one peer knows."""

    def __init__(self) -> None:
        self._pairs: dict[bytes, _Pair] = {}

    def bars(self, peer: bytes, hosts: frozenset[Hosts], now: float) -> bool:
        """Whether meeting the peer is of no use now. hosts: where members see the two."""
        pair = self._pairs.get(peer)
        if pair is None or now >= pair.until:
            return False
        return bool(pair.hosts & hosts) or not (pair.hosts and hosts)

    def meets(self, peer: bytes, hosts: frozenset[Hosts]) -> None:
        """The two are about to meet."""
        pair = self._pairs.get(peer)
        if pair is None or not (pair.hosts & hosts or pair.hosts == hosts):
            self._pairs.pop(peer, None)
            if len(self._pairs) >= MOST_PEERS:
                del self._pairs[next(iter(self._pairs))]
            self._pairs[peer] = _Pair(hosts)

    def failed(self, peer: bytes, now: float) -> None:
        """They met, and no data stream got through."""
        pair = self._pairs.setdefault(peer, _Pair(frozenset()))
        pair.lasts_s = min(2 * pair.lasts_s, LONGEST_S) or FIRST_S
        pair.until = now + pair.lasts_s

    def passed(self, peer: bytes) -> None:
        """A data stream got through."""
        self._pairs.pop(peer, None)
