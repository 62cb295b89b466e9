"""A leader that has each round wait until just before a deadline loses the lead; an honest one keeps it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pavg.rounds.machine.memory.holding import Holding
from p2pavg.rounds.machine.rules import dawdling
from p2pavg.rounds.machine.rules.dawdling import KEPT, MOST_SLOW, Dawdling, allowed
from p2pavg.rounds.protocol.ballot import Ballot, PeerId
from p2pavg.rounds.protocol.messages import Begin, Begun, Committed, Message
from p2pavg.rounds.protocol.roles import Seat
from tests.simulation.byzantine import Liar
from tests.simulation.tricks import SHARE, Pair, Trick, undisturbed

A, B = (name * 20 for name in (b"a", b"b"))
SECONDS = 20.0
DELAYS = [Trick(Begin, "delay"), Trick(Committed, "delay")]


def allowed_here() -> float:
    return allowed(0.0, 0.1, 0.1)


def test_a_leader_is_slow_after_some_slow_rounds_of_its_last_ones() -> None:
    """Five of eight, the last two among them; those before count no more, and rounds led by others do
    not count for it.
    """
    led = Dawdling()
    for _ in range(MOST_SLOW - 1):
        led.add(A, 5.0, allowed_here())
    led.add(B, 5.0, 100.0)
    assert not led.is_slow(A)
    for _ in range(KEPT):
        led.add(A, 0.1, allowed_here())
    led.add(A, 50.0, allowed_here())
    assert not led.is_slow(A)
    for _ in range(MOST_SLOW - 1):
        led.add(A, 50.0, allowed_here())
    assert led.is_slow(A)
    assert not led.is_slow(B)


def test_a_leader_is_not_slow_where_rounds_wait_as_long_under_others() -> None:
    """What the first leader is relieved for is what all the others may take."""
    led = Dawdling()
    for _ in range(MOST_SLOW):
        led.add(A, 5.0, allowed_here())
    assert led.is_slow(A)
    led.relieve(A)
    assert not led.is_slow(A)
    for _ in range(KEPT):
        led.add(B, 6.0, allowed_here())
    assert not led.is_slow(B)
    for _ in range(KEPT):
        led.add(A, 6.0, allowed_here())
    assert not led.is_slow(A)


@pytest.mark.parametrize(
    ("rtt", "step", "transfer", "at_least"),
    [(0, 0, 0, 0.5), (0.3, 0, 0, 1.7), (0, 2, 0, 2.5), (0, 0, 3, 6.5)],
)
def test_what_explains_itself_is_allowed(rtt: float, step: float, transfer: float, at_least: float) -> None:
    """Round trips, a step of the others, and links slower than the own one."""
    assert allowed(rtt, step, transfer) == pytest.approx(at_least)


@pytest.mark.parametrize(
    ("voters", "words", "relieves"),
    [
        ("la", "a", True),
        ("la", "", False),
        ("lab", "a", False),
        ("lab", "ab", True),
        ("labc", "ab", True),
        ("labcd", "ab", False),
        ("labcd", "abc", True),
        ("labcd", "abx", False),  # no member
        ("lab", "al", False),  # the leader itself
    ],
)
def test_most_others_have_to_say_so(voters: str, words: str, relieves: bool) -> None:
    """One member alone takes no leader's lead, unless there is no other."""
    seats = tuple(Seat(name.encode() * 20, True) for name in voters)
    held = Holding(Ballot(0, 0, b"l" * 20, 1, b"x" * 32), seats, 0, (), 0.0)  # type: ignore[arg-type]
    held.kept_waiting.update(name.encode() * 20 for name in words)
    assert held.relieves is relieves


@pytest.mark.parametrize("trick", [*DELAYS, Pair(*DELAYS)], ids=str)
@pytest.mark.parametrize("peers", [2, 3, 5])
@pytest.mark.parametrize("ruled", [True, False], ids=["relieved", "kept"])
def test_a_leader_that_delays_each_round_to_the_deadline_loses_the_lead(
    trick: Trick | Pair, peers: int, ruled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest peers keep a third of their epochs; without the rule they do not."""
    if not ruled:
        monkeypatch.setattr(Dawdling, "is_slow", lambda *_: False)
    seconds = SECONDS if isinstance(trick, Trick) else 2 * SECONDS
    told = Liar(trick, peers=peers, leads=True).run(seconds)
    calm = Liar(None, peers=peers).run(seconds)
    assert (told.epochs >= SHARE * calm.epochs) is ruled
    assert told.excluded == {}


def to_one(delays: dict[type[Message], float | None]) -> Callable[..., list[tuple[float, Message]]]:
    """What the leader does to one member alone: some kinds come late, or (None) never."""

    def trick(liar: Liar, peer: PeerId, message: Message) -> list[tuple[float, Message]]:
        if peer != liar.honest[0].me or type(message) not in delays:
            return [(0.0, message)]
        delay = delays[type(message)]
        return [] if delay is None else [(delay, message)]

    return trick


@pytest.mark.parametrize(
    ("peers", "delays", "share"),
    [
        (5, {Begin: 1.0}, SHARE),
        (5, {Begin: 1.5, Committed: 1.5}, SHARE),
        (5, {Committed: None}, SHARE),
        (3, {Begin: 1.0}, SHARE),
        (3, {Committed: None}, 0.2),  # of two members neither can tell whom to believe: it asks late
    ],
)
def test_a_leader_that_keeps_one_member_in_the_dark_costs_little(
    peers: int, delays: dict[type[Message], float | None], share: float
) -> None:
    """BEGIN comes late to one member alone, or COMMITTED never: the others hear when it began, and tell
    it what they applied.
    """
    told = Liar(to_one(delays), peers=peers, leads=True).run(SECONDS)
    assert told.epochs >= share * Liar(None, peers=peers).run(SECONDS).epochs
    assert told.excluded == {}


def test_a_leader_is_relieved_sooner_each_time_and_makes_up_for_it() -> None:
    """After the first time four slow rounds suffice, then three, then two; eight quick ones count for one."""
    led = Dawdling()
    for rounds in (5, 4, 3, 2, 2):
        for _ in range(rounds):
            assert not led.is_slow(A)
            led.add(A, 5.0, allowed_here())
        assert led.is_slow(A)
        led.relieve(A)
    for _ in range(4 * KEPT):
        led.add(A, 0.1, allowed_here())
    for _ in range(MOST_SLOW - 2):
        led.add(A, 5.0, allowed_here())
    assert not led.is_slow(A)
    led.add(A, 5.0, allowed_here())
    assert led.is_slow(A)


@pytest.mark.parametrize(("known", "applied"), [("b", False), ("bc", True), ("lx", False), ("bl", False)])
def test_two_others_and_most_of_them_have_to_have_applied_a_result(known: str, applied: bool) -> None:
    """Neither the leader, nor one member alone, nor somebody else has a peer apply what it was not told."""
    seats = tuple(Seat(name.encode() * 20, True) for name in "labcd")
    held = Holding(Ballot(0, 0, b"l" * 20, 1, b"x" * 32), seats, 1, (), 0.0)  # type: ignore[arg-type]
    held.applied.update(name.encode() * 20 for name in known)
    assert held.is_applied(b"a" * 20) is applied


def test_a_member_that_says_so_without_reason_takes_no_lead() -> None:
    """One word among four does not count, though it is told in each round."""

    def says_so(liar: Liar, peer: PeerId, message: Message) -> list[tuple[float, Message]]:
        if isinstance(message, Begun):
            message = Begun(message.ballot, message.digest, True)
        return [(0.0, message)]

    liar = Liar(says_so)
    told = liar.run(SECONDS)
    assert told.epochs >= 0.9 * undisturbed(1, SECONDS).epochs
    assert all(not node.machine.core.idle_leaders.out(node.machine.epoch) for node in liar.honest)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("steps", "links"),
    [
        ((1, 1, 1, 1, 1), 1),
        ((4, 1, 1, 1, 1), 1),  # the leader computes slowly
        ((1, 4, 1, 1.5, 30), 1),  # others do
        ((1, 1, 1, 1, 1), 10),  # the leader has slow links
        ((1, 1, 1, 1, 1), 100),
    ],
)
def test_an_honest_leader_keeps_the_lead_however_slow(
    seed: int, steps: tuple[float, ...], links: int
) -> None:
    """It waits for itself or others; nobody says of it that it keeps rounds waiting."""
    swarm = Liar(None, seed, leads=True)
    for node, times in zip([swarm.liar, *swarm.honest], steps, strict=True):
        node.step_seconds *= times

    def slow_down() -> None:
        ways, leader = swarm.swarm.network.ways, swarm.liar.me
        for node in swarm.honest:
            for way in ((leader, node.me), (node.me, leader)):
                ways[way].chunk_seconds *= links

    swarm.swarm.world.at(0.2, slow_down)
    told = swarm.run(SECONDS)
    assert told.epochs > 10
    for node in swarm.nodes:
        assert not node.machine.core.idle_leaders.out(node.machine.epoch)
        assert node.machine.core.dawdling.is_slow(swarm.liar.me) is False


def test_what_rounds_wait_for_is_measured() -> None:
    """In a calm swarm members have seen rounds of their leader, and waited for less than half a second."""
    swarm = Liar(None)
    swarm.run(5.0)
    for node in swarm.nodes:
        for leader, led in node.machine.core.dawdling._led.items():
            assert leader != node.me
            assert led.waited
            assert max(led.waited) < dawdling.SLACK_S
    assert any(node.machine.core.dawdling._led for node in swarm.nodes)
