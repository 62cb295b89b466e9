"""What a peer does about links that do not come about, and about links that are dead and nobody closed."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.errors import ProtocolError, UnreachableError
from p2pavg.peer.dialling import SILENT_S, Dialler
from p2pavg.peer.reach import rota
from p2pavg.peer.reach.errands import KNOWS, QUIET_S, Errands
from p2pavg.peer.reach.gaps import Gaps
from p2pavg.transport.links import pairing
from tests.unit.transport.endpoints import Host

A, B = b"a" * 20, b"b" * 20
TRAINER = {"role": "trainer"}


class Asked:
    """A link whose other end says whether it has a link to whom it is asked about."""

    def __init__(self, linked: Any, peer_id: bytes = A, hello: dict[str, Any] = TRAINER) -> None:
        self.hello = hello
        self.peer_id = peer_id
        self.linked = linked
        self.asked: list[dict[str, Any]] = []

    async def request(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.asked.append(message)
        if self.linked is None:
            raise UnreachableError("gone")
        return {"t": KNOWS, "linked": self.linked}


@pytest.mark.parametrize(
    ("said", "apart"),
    [([True], True), ([False, True], True), ([False], False), ([None, "yes"], False), ([], False)],
)
async def test_others_are_asked_whether_it_lives(said: list[Any], apart: bool) -> None:
    """A peer that cannot be linked is apart when somebody has a link to it, and else just dead."""
    told: list[frozenset[bytes]] = []
    links: Any = {bytes([n]) * 20: Asked(word, bytes([n]) * 20) for n, word in enumerate(said)}
    gaps = Gaps(links, told.append)
    gaps.look([B])
    await gaps.settled(5.0)
    assert gaps.peers == ({B} if apart else set())
    assert all(link.asked == [{"t": KNOWS, "peer": B}] for link in links.values())
    gaps.look([])  # a link came about, or it left
    assert gaps.peers == set()
    assert told == ([{B}, set()] if apart else [])


async def test_everybody_is_asked_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many members a few are asked at a time; who knows the peer is found, and then asked each time."""
    monkeypatch.setattr("p2pavg.peer.reach.gaps.AGAIN_S", 0.0)
    links: Any = {bytes([n]) * 20: Asked(n == 29, bytes([n]) * 20) for n in range(30)}
    gaps = Gaps(links, lambda peers: None)
    asked = []
    for _ in range(10):
        before = sum(len(link.asked) for link in links.values())
        gaps.look([B])
        await gaps.settled(5.0)
        asked.append(sum(len(link.asked) for link in links.values()) - before)
        assert gaps.peers == ({B} if links[bytes([29]) * 20].asked else set())
    assert asked == [rota.MOST_ASKED] * 10
    assert gaps.peers == {B}
    assert all(link.asked for link in links.values())


async def test_a_member_that_only_helps_is_asked_first() -> None:
    """A node that trains nothing tells of a gap as well, in whatever order it was linked; a monitor is not
    asked.
    """
    links: Any = {bytes([n]) * 20: Asked(False, bytes([n]) * 20) for n in range(20)}
    links[A] = Asked(True, A, {"role": "watcher"})
    links[b"m" * 20] = monitor = Asked(None, b"m" * 20, {"role": "watcher", "client_only": True})
    gaps = Gaps(links, lambda peers: None)
    gaps.look([B])
    await gaps.settled(5.0)
    assert gaps.peers == {B}
    assert not monitor.asked


async def test_one_word_of_a_gap_is_enough() -> None:
    """While others do not answer, the peer that somebody reaches is behind a gap."""
    told: asyncio.Future[frozenset[bytes]] = asyncio.get_running_loop().create_future()
    slow = Asked(False, b"s" * 20)
    slow.request = lambda message, timeout: asyncio.sleep(3600.0)  # type: ignore[method-assign,assignment,return-value]
    links: Any = {b"s" * 20: slow, A: Asked(True, A)}
    gaps = Gaps(links, told.set_result)
    gaps.look([B])
    assert await asyncio.wait_for(told, 10.0) == {B}
    gaps.close()


def test_those_that_know_a_peer_leave_room_for_others() -> None:
    """However many know it, and are of no use: whoever was never asked is asked in the end."""
    here = rota.Rota()
    members = [SimpleNamespace(peer_id=bytes([number]) * 20) for number in range(2 * rota.MOST_ASKED)]
    asked = set()
    for _ in range(4):
        chosen = here.next(A, members)
        assert len({member.peer_id for member in chosen}) == rota.MOST_ASKED
        asked |= {member.peer_id for member in chosen}
        for member in chosen:
            here.told(A, member.peer_id, knows=True)
    assert len(asked) == len(members)
    assert here.next(A, members[: rota.MOST_ASKED]) != []
    assert len(here.next(A, members[: rota.MOST_ASKED])) == rota.MOST_ASKED  # all that there are


def test_a_rota_forgets() -> None:
    """Who left is not asked, who stopped knowing comes last, and what is kept of peers is bounded."""
    here = rota.Rota()
    members = [Asked(True, bytes([n]) * 20) for n in range(20)]
    first = here.next(B, members)
    here.told(B, first[0].peer_id, knows=True)
    assert here.next(B, members)[0] is first[0]
    here.told(B, first[0].peer_id, knows=False)
    assert first[0] not in here.next(B, members)
    assert first[1] not in here.next(B, [member for member in members if member is not first[1]])
    for n in range(rota.MOST_PEERS + 5):
        here.next(n.to_bytes(20, "big"), members)
    assert len(here._turns) == len(here._knew) == rota.MOST_PEERS
    here.forget((rota.MOST_PEERS).to_bytes(20, "big"))
    assert len(here._turns) == len(here._knew) == rota.MOST_PEERS - 1


async def test_a_question_is_answered() -> None:
    """A peer says whether it has a link to another over which something comes; what is no question ends the
    link.
    """
    said: list[Any] = []
    link: Any = SimpleNamespace(
        rtt=0.5, quiet_s=0.0, address=("192.0.2.1", 5), reply=lambda request, message: said.append(message)
    )
    errands = Errands({A: link}, SimpleNamespace(open=True), set())
    errands.knows(link, {"t": KNOWS, "peer": A})
    errands.knows(link, {"t": KNOWS, "peer": B})
    link.quiet_s = QUIET_S  # it may be dead, and nobody has closed its link
    errands.knows(link, {"t": KNOWS, "peer": A})
    assert said == [
        {"t": KNOWS, "linked": True, "rtt": 0.5, "relays": True, "hosts": ["192.0.2.1", "192.0.2.1"]},
        {"t": KNOWS, "linked": False},
        {"t": KNOWS, "linked": False},
    ]
    for nonsense in (None, b"short", "a" * 20):
        with pytest.raises(ProtocolError):
            errands.knows(link, {"t": KNOWS, "peer": nonsense})


class Dialled:
    """An endpoint with one link, which notes whom it is to connect to."""

    def __init__(self) -> None:
        self.links = {A: SimpleNamespace(hello=TRAINER)}
        self.connects: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()

    async def connect(self, host: str, port: int, *, anew: bool, **_: Any) -> None:
        self.connects.put_nowait((host, anew))


async def test_a_silent_link_gets_another_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From whom nothing is heard for seconds is dialled though there is a link; who is heard is not."""
    info = SimpleNamespace(client_only=False, role="trainer", addresses=(("somewhere", 1),))
    endpoint = Dialled()
    view = SimpleNamespace(
        peers={A: info}, addresses_to_dial=lambda info: info.addresses, missed=lambda info: None
    )
    nothing: Any = lambda *_: None  # noqa: E731
    dialler = Dialler(endpoint, view, nothing, nothing)  # type: ignore[arg-type]
    now = time.monotonic()
    monkeypatch.setattr("p2pavg.peer.dialling.time.monotonic", lambda: now)
    dialler.beat({A})
    now += SILENT_S / 2
    dialler.beat({A})
    await asyncio.sleep(0)
    assert endpoint.connects.empty()
    now += SILENT_S
    dialler.beat({A})
    assert await asyncio.wait_for(endpoint.connects.get(), 10) == ("somewhere", True)
    dialler.beat(set())
    now += 2 * SILENT_S
    dialler.beat({A})  # silent since now alone
    await asyncio.sleep(0)
    assert endpoint.connects.empty()
    dialler.close()


@pytest.mark.parametrize("meets", [True, False])
async def test_helpers_are_dialled_by_everybody_after_the_trainers(meets: bool) -> None:
    """A peer that others can dial links to those that only help, too, when it has links to trainers; one that
    arranges no meetings, as a monitor, does not.
    """
    dialled: list[bytes] = []

    async def connect(host: str, port: int, *, expect: bytes, **options: Any) -> None:
        dialled.append(expect)

    async def meet(peer: bytes) -> bool:
        return False

    roles = {A: "watcher", B: "trainer", b"c" * 20: "watcher", b"d" * 20: "trainer"}
    peers = {peer: SimpleNamespace(client_only=False, role=role) for peer, role in roles.items()}
    view: Any = SimpleNamespace(peers=peers, addresses_to_dial=lambda info: [("host", 1)])
    endpoint: Any = SimpleNamespace(links={}, connect=connect, peer_id=b"m" * 20)
    dialler = Dialler(endpoint, view, lambda *_: None, lambda *_: None, meet=meet if meets else None)
    dialler.look()
    await asyncio.gather(*(dial.task for dial in dialler._dials.values()))
    assert dialled == [B, b"d" * 20, A, b"c" * 20][: 4 if meets else 2]
    dialler.close()


async def test_a_newcomer_waits_for_the_meeting_that_a_helper_arranges() -> None:
    """With links to helpers alone, the first links are there once a trainer that a helper reaches is met."""
    links: Any = {A: Asked(True, A, {"role": "watcher"})}

    async def connect(host: str, port: int, **options: Any) -> None:
        raise UnreachableError("no way there")

    async def meet(peer: bytes) -> bool:
        links[peer] = Asked(True, peer)
        return True

    peers = {B: SimpleNamespace(client_only=False, role="trainer")}
    view: Any = SimpleNamespace(
        peers=peers, addresses_to_dial=lambda info: [("host", 1)], missed=lambda info: None
    )
    endpoint: Any = SimpleNamespace(links=links, connect=connect, peer_id=b"m" * 20)
    dialler = Dialler(endpoint, view, lambda *_: None, lambda *_: None, meet=meet)
    dialler.look()
    await asyncio.wait_for(dialler.first_links(lambda: False), 30)
    assert B in links
    dialler.close()


async def test_a_silent_helper_is_dialled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat comes from a node that only helps; when its pings do not come either, its link may be
    dead. One that is heard is left alone.
    """
    info = SimpleNamespace(client_only=False, role="watcher", addresses=(("somewhere", 1),))
    endpoint = Dialled()
    link = SimpleNamespace(peer_id=A, hello={"role": "watcher"}, dialled=True, quiet_s=0.0)
    endpoint.links = {A: link}
    view: Any = SimpleNamespace(
        peers={A: info}, addresses_to_dial=lambda info: info.addresses, missed=lambda info: None
    )
    nothing: Any = lambda *_: None  # noqa: E731
    dialler = Dialler(endpoint, view, nothing, nothing, meet=nothing)  # type: ignore[arg-type]
    now = time.monotonic()
    monkeypatch.setattr("p2pavg.peer.dialling.time.monotonic", lambda: now)
    for quiet_s in (0.0, SILENT_S, 2 * SILENT_S):
        await asyncio.sleep(0)
        assert endpoint.connects.empty()
        link.quiet_s = quiet_s
        dialler.beat(set())
        now += SILENT_S
    monkeypatch.undo()
    assert await asyncio.wait_for(endpoint.connects.get(), 10) == ("somewhere", True)
    dialler.close()


async def test_only_a_quiet_link_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dialled anew, a link that speaks is kept, and one that is quiet gives way to the new one."""
    one, two = await Host().start(), await Host().start()
    try:
        link = await one.connect(two)
        await two.until(lambda: two.up)
        assert await one.connect(two, expect=two.id, anew=True) is link
        monkeypatch.setattr(pairing, "_QUIET_S", -1.0)
        again = await one.connect(two, expect=two.id, anew=True)
        assert again is not link
        assert link.closed
        assert one.link_to(two) is again
        await two.until(lambda: len(two.up) == 2)
    finally:
        await one.close()
        await two.close()


async def test_a_link_that_ends_at_once_is_dialled_after_a_growing_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever lets itself be linked and ends the link costs a dial every five seconds in the end."""
    pauses: list[float] = []

    async def connect(host: str, port: int, **options: Any) -> None:
        now = asyncio.get_running_loop().time()
        dialler.link_down(SimpleNamespace(peer_id=A, established_at=now))  # type: ignore[arg-type]

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    info = SimpleNamespace(client_only=False, role="trainer")
    view: Any = SimpleNamespace(peers={A: info}, addresses_to_dial=lambda info: [("host", 1)])
    endpoint: Any = SimpleNamespace(links={}, connect=connect, peer_id=B)
    dialler = Dialler(endpoint, view, lambda peer, error: None, lambda peers: None)
    monkeypatch.setattr("p2pavg.peer.dialling.asyncio.sleep", sleep)
    for _ in range(9):
        dialler.look()
        (dial,) = dialler._dials.values()
        await asyncio.wait_for(dial.task, 10)
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    dialler.close()


@pytest.mark.parametrize("lost", [False, True])
async def test_a_peer_whose_link_was_lost_is_dialled_often(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses grow to five seconds, and only to one for a peer that had a link a moment ago. A dial that the
    kernel would leave waiting is broken off and begun anew, now and then after longer.
    """
    timeouts: list[float] = []
    pauses: list[float] = []

    async def connect(host: str, port: int, *, timeout: float, **options: Any) -> None:
        timeouts.append(timeout)
        raise UnreachableError("nobody answers")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 7:
            dialler.close()

    info = SimpleNamespace(client_only=False, role="trainer")
    view: Any = SimpleNamespace(
        peers={A: info}, addresses_to_dial=lambda info: [("host", 1)], missed=lambda info: None
    )
    endpoint: Any = SimpleNamespace(links={}, connect=connect, peer_id=B)
    dialler = Dialler(endpoint, view, lambda peer, error: None, lambda peers: None)
    if lost:
        dialler.link_down(SimpleNamespace(peer_id=A, established_at=0.0))  # type: ignore[arg-type]
    monkeypatch.setattr("p2pavg.peer.dialling.asyncio.sleep", sleep)
    dialler.look()
    (dial,) = dialler._dials.values()
    async with asyncio.timeout(10):
        await asyncio.wait((dial.task,))
    assert timeouts == [1.5, 2.5, 5.0, 1.5, 2.5, 5.0, 1.5]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, *([1.0] * 4 if lost else [1.6, 3.2, 5.0, 5.0])])
