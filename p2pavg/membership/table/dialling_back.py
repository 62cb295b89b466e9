"""Can others open connections to this peer? Nodes dial each other back to find out."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from p2pavg.membership.table.address import Address, format_host_port
from p2pavg.membership.table.carrying.shares import Shares
from p2pavg.membership.table.ledger import AMPLIFICATION
from p2pavg.membership.table.node import Node
from p2pavg.membership.table.throttle import Throttle
from p2pavg.membership.table.wire import PING_BYTES, Contact, RequestKind, matches
from p2pavg.networks import is_private, network_of, source_of

DIAL_SECONDS = 2.0
ANSWER_SECONDS = 3.0
FIRST_POLL_SECONDS = 0.02
REMEMBER_SECONDS = 10.0
MOST_DIALS, MOST_OF_NETWORK, MOST_OF_SOURCE = 16, 4, 2  # at once
DIALS_PER_S, DIALS_AT_ONCE = 2.0, 16.0  # of one source; a network has twice as many
MAX_REMEMBERED = 1024
ASKED = 3

Connect = Callable[[str, int], Awaitable[bool]]
"""Whether a TCP connection to (host, port) can be opened."""


@dataclass(frozen=True, slots=True)
class Reachability:
    """What others found. `reachable`: None when nobody could tell. `address`: where they saw this peer.
    `tried`: by address, whether somebody got through there.
    """

    reachable: bool | None
    address: str
    advice: str = ""
    tried: Mapping[Address, bool] = field(default_factory=dict)


async def tcp_connect(host: str, port: int) -> bool:
    """Open a TCP connection and close it again."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), DIAL_SECONDS)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


class DialBack:
    """Dials back who asks for it, and only at the address that the question came from. A host that answers
    nothing holds a dial for two seconds: so whoever asks has a share, and is told to come again beyond it.
    """

    PENDING, REACHED, FAILED, BUSY = range(4)

    def __init__(self, connect: Connect, clock: Callable[[], float]) -> None:
        self._connect = connect
        self._clock = clock
        self._results: OrderedDict[Address, tuple[int, float]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._shares = Shares[Address](most=MOST_DIALS, of_network=MOST_OF_NETWORK, of_source=MOST_OF_SOURCE)
        self._asked = Throttle(rate=DIALS_PER_S, burst=DIALS_AT_ONCE)

    def dial(self, host: str, port: int) -> int:
        """The result of dialling (host, port), or PENDING; the dial starts with the first question."""
        now = self._clock()
        state, until = self._results.get((host, port), (DialBack.BUSY, now))
        if until > now:
            return state
        if self._shares.crowd(host) or not self._admits(host, now):
            return DialBack.BUSY
        self._remember((host, port), DialBack.PENDING)
        self._shares.add((host, port), host)
        task = asyncio.ensure_future(self._dial(host, port))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return DialBack.PENDING

    def _admits(self, host: str, now: float) -> bool:
        if is_private(host):
            return True
        return self._asked.admits(source_of(host), now) and self._asked.admits(network_of(host), now, 0.5)

    async def _dial(self, host: str, port: int) -> None:
        try:
            reached = await self._connect(host, port)
        finally:
            self._shares.remove((host, port))
        self._remember((host, port), DialBack.REACHED if reached else DialBack.FAILED)

    def _remember(self, address: Address, state: int) -> None:
        self._results[address] = (state, self._clock() + REMEMBER_SECONDS)
        self._results.move_to_end(address)
        if len(self._results) > MAX_REMEMBERED:
            self._results.popitem(last=False)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


async def ask_to_dial(node: Node, contact: Contact, port: int) -> bool | None:
    """Have one contact open a TCP connection to this machine's `port`; None when it cannot tell."""
    deadline, pause = node.clock() + ANSWER_SECONDS, FIRST_POLL_SECONDS
    while node.clock() < deadline:
        answer = await node.rpc.ask(contact.address, RequestKind.DIAL, [port], expected=contact.id, tries=2)
        if answer is None or not matches(answer.body, int):
            return None
        if answer.body[0] in (DialBack.REACHED, DialBack.FAILED):
            return bool(answer.body[0] == DialBack.REACHED)
        await asyncio.sleep(pause)
        pause *= 2
    return None


async def is_reached_at(node: Node, host: str, port: int) -> bool:
    """Whether most of those who see this node at `host` can open a TCP connection to it there."""
    asked = node.whereabouts.witnesses(host)[:ASKED]
    reached = await asyncio.gather(*(ask_to_dial(node, contact, port) for contact in asked))
    return 2 * sum(answer is True for answer in reached) > len(asked)


async def reaches_itself(node: Node, host: str, port: int) -> bool:
    """Whether a question that this node sends to (host, port) comes back to this very node. The router of a
    home may not lead it back; but where it does, no word of others is needed.
    """
    node.rpc.ledger.told((host, port), PING_BYTES / AMPLIFICATION + 1)
    me = node.identity.peer_id
    return (
        await node.rpc.ask((host, port), RequestKind.PING, [], expected=me, tries=2, prove=True) is not None
    )


async def find_reachability(node: Node, ports: Sequence[int], *, in_haste: bool) -> Reachability:
    """The best answer for any of these ports of this node, with what was tried of all. in_haste: one that
    works will do.
    """
    found: list[Reachability] = []
    for port in dict.fromkeys(ports):
        if not (in_haste and found and found[0].reachable):
            found.append(await _find_reachability(node, port))
    tried = {address: works for each in found for address, works in each.tried.items()}
    order = (True, False, None)
    return replace(min(found, key=lambda each: order.index(each.reachable)), tried=tried)


async def _find_reachability(node: Node, port: int) -> Reachability:
    """Ask a few contacts, those that see this peer at different addresses first."""
    askable: dict[str, list[Contact]] = {}
    for voice in node.whereabouts.voices:
        askable.setdefault(voice.host, []).append(voice.observer)
    if not askable:
        return Reachability(None, "", "nobody is there yet to try whether others can reach this peer")
    asked = [(host, contact) for host, contacts in askable.items() for contact in contacts[:ASKED]]
    results = await asyncio.gather(*(ask_to_dial(node, contact, port) for _, contact in asked))
    tried: dict[Address, bool] = {}
    for (host, _), reached in zip(asked, results, strict=True):
        if reached is not None:
            tried[host, port] = reached or tried.get((host, port), False)
    for where, reached in tried.items():
        if reached:
            return Reachability(True, format_host_port(*where), tried=tried)
    address = format_host_port(asked[0][0], port)
    if not tried:
        return Reachability(None, address, "nobody could try whether others can reach this peer")
    return Reachability(
        False,
        address,
        f"other peers cannot open connections to {address}, where they see this peer: open or forward that "
        "port for TCP and UDP, or set announce to an address that reaches it; till then it only connects out",
        tried,
    )
