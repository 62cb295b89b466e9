"""What may be sent where: to an address that has not shown that it receives, three times what came.

Whoever speaks of an address, from it or about it, pays for what goes there until it answers: so nobody can
make this node write more to a third party than a small multiple of what it sent itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from p2pavg.membership.table.address import Address, is_loopback
from p2pavg.networks import network_of, source_of

AMPLIFICATION = 3
MAX_PROVED = 8192
MAX_PROVED_OF_SOURCE = 256
MAX_PROVED_OF_NETWORK = 1024
MAX_DOUBTFUL = 8192
LATELY_SECONDS = 10.0
MAX_IDS = 4  # that one address may have: a process that restarts takes the place of another


class AddressLedger:
    """Addresses that have shown that they receive what is sent there, and what the others have left."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._proved: OrderedDict[Address, OrderedDict[bytes, float]] = (
            OrderedDict()
        )  # ids proven there, when
        self._held: dict[str, OrderedDict[Address, None]] = {}  # the same by source, and by network
        self._left: OrderedDict[Address, int] = OrderedDict()

    def is_proved(self, address: Address) -> bool:
        """Whether something came back that only who receives at `address` can know."""
        return address in self._proved

    def is_home(self, address: Address, peer_id: bytes) -> bool:
        """Whether the node of this id has proven itself at `address`."""
        ids = self._proved.get(address)
        return ids is not None and peer_id in ids

    def is_home_now(self, address: Address, peer_id: bytes) -> bool:
        """Whether that node has proven itself at `address` in the last seconds."""
        ids = self._proved.get(address)
        return ids is not None and self._clock() - ids.get(peer_id, float("-inf")) <= LATELY_SECONDS

    def proved(self, address: Address, peer_id: bytes | None = None) -> None:
        """Note that an address receives, or was named by somebody who may; peer_id: who has proven itself
        there.
        """
        self._receives(address)
        if peer_id is not None and address in self._proved:
            ids = self._proved[address]
            ids[peer_id] = self._clock()
            ids.move_to_end(peer_id)
            if len(ids) > MAX_IDS:
                ids.popitem(last=False)

    def _receives(self, address: Address) -> None:
        self._left.pop(address, None)
        if address in self._proved:
            self._proved.move_to_end(address)
            return
        for owner, most in _owners(address):
            held = self._held.setdefault(owner, OrderedDict())
            if len(held) >= most and not is_loopback(address[0]):
                self._forget(next(iter(held)))
                held = self._held.setdefault(owner, held)
            held[address] = None
        self._proved[address] = OrderedDict()
        if len(self._proved) > MAX_PROVED:
            self._forget(next(iter(self._proved)))

    def told(self, address: Address, nbytes: float) -> None:
        """Note that so many bytes came from an address, or about it."""
        if address in self._proved:
            return
        self._left[address] = self._left.get(address, 0) + int(AMPLIFICATION * nbytes)
        self._left.move_to_end(address)
        if len(self._left) > MAX_DOUBTFUL:
            self._left.popitem(last=False)

    def room(self, address: Address) -> float:
        """How many bytes may still go there before it answers."""
        return float("inf") if address in self._proved else self._left.get(address, 0)

    def spend(self, address: Address, nbytes: int) -> bool:
        """Whether so many bytes may go to an address; if so, they count as sent."""
        if address in self._proved:
            return True
        left = self._left.get(address, 0)
        if left < nbytes:
            return False
        self._left[address] = left - nbytes
        return True

    def _forget(self, address: Address) -> None:
        del self._proved[address]
        for owner, _ in _owners(address):
            held = self._held[owner]
            del held[address]
            if not held:
                del self._held[owner]


def _owners(address: Address) -> tuple[tuple[str, int], tuple[str, int]]:
    """To whom an address is counted, and how many each may have."""
    return (
        (source_of(address[0]), MAX_PROVED_OF_SOURCE),
        (network_of(address[0]), MAX_PROVED_OF_NETWORK),
    )
