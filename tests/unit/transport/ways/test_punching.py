"""The decisions of hole punching: which NATs can be passed, whom to dial, when, and what may be said."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from p2pavg.errors import ProtocolError, UnreachableError
from p2pavg.transport.ways import punching
from p2pavg.transport.ways.punching import Dependence, Nat, Offer

KINDS = [Nat(mapping, filtering) for mapping in Dependence for filtering in Dependence]
HERE, THERE, INSIDE = ("192.0.2.1", 4000), ("198.51.100.7", 5000), ("192.168.1.4", 6000)


def test_two_known_ports_always_meet() -> None:
    """NATs that map a port alike for all destinations are passed whatever they let in."""
    homes = [nat for nat in KINDS if nat.mapping is Dependence.INDEPENDENT]
    assert all(punching.can_meet(one, other) for one, other in itertools.product(homes, homes))


def test_two_unknown_ports_never_meet() -> None:
    """Of two NATs that map by destination neither side's port can be told to the other."""
    strict = [nat for nat in KINDS if nat.mapping is not Dependence.INDEPENDENT]
    assert not any(punching.can_meet(one, other) for one, other in itertools.product(strict, strict))


@pytest.mark.parametrize(
    ("host", "local", "may"),
    [
        (THERE[0], "192.168.1.5", True),
        ("192.168.1.7", "192.168.1.5", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("127.0.0.1", "192.168.1.5", False),
        ("::1", "2001:db8::5", False),
        ("::ffff:127.0.0.1", "2001:db8::5", False),
        ("169.254.169.254", "192.168.1.5", False),
        ("::ffff:169.254.169.254", "2001:db8::5", False),
        ("fe80::1", "2001:db8::5", False),
        ("0.0.0.0", "192.168.1.5", False),
        ("127.0.0.1", "", False),
    ],
)
def test_no_word_of_others_leads_to_this_machine(host: str, local: str, may: bool) -> None:
    """A member that says where a third peer is names no port of this machine, nor one of its link."""
    if may:
        assert punching.on_word([(host, 22)], local) == [(host, 22)]
    else:
        assert punching.on_word([(host, 22), THERE], local) == [THERE]
        with pytest.raises(UnreachableError, match="nobody else"):
            punching.on_word([(host, 22)], local)


@pytest.mark.parametrize("filtering", Dependence)
def test_one_unknown_port_needs_a_filter_that_does_not_ask_for_it(filtering: Dependence) -> None:
    """Of one such NAT the other must let in every port of an address that was called."""
    told = Nat(Dependence.INDEPENDENT, filtering)
    for strict in (nat for nat in KINDS if nat.mapping is not Dependence.INDEPENDENT):
        assert punching.can_meet(told, strict) == (filtering is not Dependence.PORT)
        assert punching.can_meet(strict, told) == punching.can_meet(told, strict)


@pytest.mark.parametrize(
    ("host", "inside"),
    [("192.168.1.4", True), ("fd00::4", True), ("127.0.0.1", False), ("169.254.7.7", False), ("::1", False)]
    + [(host, False) for host in ("fe80::7", "8.8.8.8", "home.example")],
)
def test_what_is_offered_inside_of_a_nat(host: str, inside: bool) -> None:
    """An address of the home's network, and none of a machine or a link alone."""
    assert punching.is_inside(host) is inside


def test_18_of_45_pairs_can_meet() -> None:
    """So many of the pairs of nine kinds of NAT are passed directly."""
    pairs = list(itertools.combinations_with_replacement(KINDS, 2))
    assert (len(pairs), sum(punching.can_meet(*pair) for pair in pairs)) == (45, 18)


def test_inside_addresses_are_dialled_behind_one_nat_alone() -> None:
    """Where both are seen at one outside address, the other side's inside address is tried as well."""
    assert punching.targets([HERE], [THERE, INSIDE]) == [THERE]
    assert punching.targets([HERE], [(HERE[0], 5000), INSIDE]) == [(HERE[0], 5000), INSIDE]


@pytest.mark.parametrize(("rtt", "seconds"), [(0.0, 0.25), (0.05, 0.25), (0.3, 0.75), (5.0, 2.0)])
def test_a_burst_outlasts_a_round_trip(rtt: float, seconds: float) -> None:
    """Both sides try for a quarter of a second, or 2.5 round trips, or two seconds."""
    assert punching.burst_s(rtt) == seconds


def test_a_stream_comes_from_where_the_link_does() -> None:
    """For one more connection to a peer nobody else's host is dialled than the one that its link shows."""
    assert punching.at_host(THERE[0], [HERE], [THERE, INSIDE]) == [THERE]
    assert punching.at_host(INSIDE[0], [HERE], [(HERE[0], 5000), INSIDE]) == [INSIDE]
    for host in (HERE[0], "203.0.114.9"):
        with pytest.raises(UnreachableError):
            punching.at_host(host, [HERE], [THERE, INSIDE])


def test_refused_dials_get_rarer() -> None:
    """The first is tried again after 20 ms; the eight of a burst take longer than most bursts last."""
    pauses = [punching.refused_pause_s(dials) for dials in range(1, punching.MOST_DIALS + 1)]
    assert pauses[0] == 0.02
    assert pauses == sorted(pauses)
    assert 0.75 < sum(pauses) < 1.5


@pytest.mark.parametrize(("rtt", "seconds"), [(0.0, 0.5), (0.08, 0.98), (0.3, 0.3), (0.6, 0.0), (5.0, 0.0)])
def test_a_relay_is_asked_for_in_time(rtt: float, seconds: float) -> None:
    """Near by once a meeting has mostly come about; the further the two, the sooner, so that both take less
    than three seconds.
    """
    assert punching.relay_after_s(rtt) == pytest.approx(seconds)


def test_the_smaller_id_arranges_and_a_newcomer_does_not_wait() -> None:
    """Of two that know each other one leaves it to the other; whom nobody knows yet cannot."""
    assert punching.head_start_s(b"a", b"b", newcomer=False) == 0.0
    assert punching.head_start_s(b"b", b"a", newcomer=False) == punching.HEAD_START_S
    assert punching.head_start_s(b"b", b"a", newcomer=True) == 0.0


def offer(**changed: Any) -> dict[str, Any]:
    return {**Offer((THERE, INSIDE), b"o" * 20, 0.04).to_message(), **changed}


def test_an_offer_is_read_as_it_was_made() -> None:
    """Addresses, observer and round trip come through."""
    assert punching.parse_offer(offer()) == Offer((THERE, INSIDE), b"o" * 20, 0.04)


@pytest.mark.parametrize(
    "changed",
    [
        {"at": []},
        {"at": [list(THERE)] * 3},
        {"at": [["name.example", 5000]]},
        {"at": [["192.0.2.1", 0]]},
        {"at": [["192.0.2.1"]]},
        {"at": ["192.0.2.1"]},
        {"at": None},
        {"at": [list(THERE), ["203.0.114.9", 80]]},
        {"by": b"short"},
        {"by": None},
        {"rtt": 9.0},
        {"rtt": -1.0},
        {"rtt": float("nan")},
        {"rtt": 1},
    ],
)
def test_what_no_peer_offers_is_refused(changed: dict[str, Any]) -> None:
    """A name, a port 0, too many addresses, one inside that is not, an observer or a time that cannot be."""
    with pytest.raises(ProtocolError):
        punching.parse_offer(offer(**changed))
