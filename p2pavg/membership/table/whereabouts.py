"""Where this node is, by the word of others: decisions without I/O.

Anybody may say anything, and identities are free. So a node listens only to observers that it chose itself,
each network of observers has one voice, and whoever has the voice keeps it as long as it answers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pavg.membership.table.address import (
    Address,
    can_be_of_peer,
    family_of,
    is_link_local,
    is_loopback,
)
from p2pavg.membership.table.wire import Contact
from p2pavg.networks import is_private, network_of

MAX_VOICES = 16
MOST_HOSTS = 2  # of a family


@dataclass(frozen=True, slots=True)
class Voice:
    """What one observer says: at which host it sees this node."""

    observer: Contact
    host: str


class Whereabouts:
    """The voices, and the hosts that this node holds to be its own, best first."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self._voices: OrderedDict[str, Voice] = OrderedDict()

    @property
    def voices(self) -> list[Voice]:
        """One for each network, those first that spoke longest ago."""
        return list(self._voices.values())

    def speaks(self, observer: Contact) -> bool:
        """Whether the observer has its network's voice, or may have it."""
        voice = self._voices.get(network_of(observer.address[0]))
        return voice is None or voice.observer.id == observer.id

    def heard(self, observer: Contact, host: str) -> None:
        """An observer that this node chose says where it sees it. The first word of all is believed."""
        network = network_of(observer.address[0])
        if is_link_local(host):
            return  # nobody else can use it
        if not self.speaks(observer) or (network not in self._voices and len(self._voices) >= MAX_VOICES):
            return
        self._voices[network] = Voice(observer, host)
        self._voices.move_to_end(network)
        if not self.hosts:
            self.hosts = [host]

    def silent(self, observer: bytes) -> None:
        """An observer does not answer: its network's voice is free."""
        for network, voice in list(self._voices.items()):
            if voice.observer.id == observer:
                del self._voices[network]

    def candidate(self, own: list[str]) -> str | None:
        """A host that is to be tried, because it is not known yet and more than half of the voices, or one of
        this machine's `own` interfaces, speak for it. A voice of IPv4 says nothing of IPv6.
        """
        votes = self._votes()
        voters = Counter({4: 0, 6: 0})
        for host, count in votes.items():
            voters[family_of(host)] += count
        for host in sorted(votes, key=lambda host: (is_loopback(host), -votes[host])):
            if host not in self.hosts and (2 * votes[host] > voters[family_of(host)] or host in own):
                return host
        return None

    def witnesses(self, host: str) -> list[Contact]:
        """Who sees this node at `host`."""
        return [voice.observer for voice in self._voices.values() if voice.host == host]

    def adopt(self, host: str, *, keep: bool) -> None:
        """`host` turned out to be this node's. keep: links came in where it was held to be before, so that
        these hosts stay; else those stay for which a voice speaks.
        """
        votes = self._votes()
        stay = [known for known in self.hosts if known != host and (keep or known in votes)]
        ranked = sorted([*stay, host], key=lambda known: (is_loopback(known), -votes.get(known, 0)))
        found: list[str] = []
        for known in [*stay, host] if keep else ranked:
            if sum(family_of(other) == family_of(known) for other in found) < MOST_HOSTS:
                found.append(known)
        self.hosts = found

    def confirmed(self) -> list[str]:
        """The hosts for which at least two networks speak."""
        votes = self._votes()
        return [host for host in self.hosts if votes.get(host, 0) >= 2]

    def _votes(self) -> dict[str, int]:
        votes: dict[str, int] = {}
        for voice in self._voices.values():
            votes[voice.host] = votes.get(voice.host, 0) + 1
        return votes


def announceable(
    seen: Sequence[str],
    own: Sequence[str],
    port: int,
    mapped: Address | None,
    tried: Mapping[Address, bool],
) -> list[Address]:
    """The addresses to announce, best first: all at which others reach this node, or may.

    seen: where others see it. own: the addresses of this machine on the way to the internet, or the one that
    it listens on. mapped: where its gateway says that it leads a port here. tried: where others have tried to
    open connections, and whether they got through. Those that failed are left out, unless all did.
    """
    outside = [host for host in seen if not is_loopback(host)]
    families = {family_of(host) for host in outside}
    own = [host for host in own if not is_loopback(host) and not is_link_local(host)]
    unseen = [host for host in own if family_of(host) not in families]
    led: list[Address] = []
    given: set[str] = set()  # where others got through to the port that the router leads here
    if mapped is not None:
        # Behind a second router the gateway's own outside address is not the one that others see.
        translated = [host for host in outside if host not in own and family_of(host) == family_of(mapped[0])]
        by_others = [(host, mapped[1]) for host in translated]
        led = [address for address in by_others if tried.get(address)]
        given = {host for host, _ in led}
        # A gateway without a connection to its provider tells 0.0.0.0.
        if not led and can_be_of_peer(mapped[0]) and not any(address in tried for address in by_others):
            led = [mapped]
    # Whoever answers at such a router's other ports is another machine inside.
    direct = [(host, port) for host in (*outside, *unseen) if host not in given]
    found = list(dict.fromkeys([*led, *direct]))
    works: list[Address] = []
    if not tried or any(tried.values()):
        inside = [host for host in own if host not in outside and host not in unseen and is_private(host)]
        works = [address for address in found if tried.get(address, True)]
        works += [(host, port) for host in inside if (host, port) not in works]
    return works or found or [(host, port) for host in (*seen, "127.0.0.1")][:1]
