"""For how long, and between which addresses, two peers do not try to meet again. Time is a parameter."""

from __future__ import annotations

import pytest

from p2pavg.peer.reach import impassable
from p2pavg.peer.reach.common import Hosts
from p2pavg.peer.reach.impassable import Impassable

A, B = b"a" * 20, b"b" * 20
HOME: Hosts = ("192.0.2.1", "198.51.100.7")
HERE = frozenset({HOME})


def failed(hosts: frozenset[Hosts] = HERE) -> Impassable:
    found = Impassable()
    found.meets(A, hosts)
    found.failed(A, 0.0)
    return found


def test_only_that_peer_is_barred() -> None:
    """A link without data streams says nothing of other peers."""
    assert failed().bars(A, HERE, 1.0)
    assert not failed().bars(B, HERE, 1.0)
    assert not Impassable().bars(A, HERE, 1.0)


@pytest.mark.parametrize("hosts", [("192.0.2.9", HOME[1]), (HOME[0], "198.51.100.9")])
def test_another_address_of_either_side_is_another_try(hosts: Hosts) -> None:
    """Members see one of the two elsewhere now: its NAT may be another one."""
    assert not failed().bars(A, frozenset({hosts}), 1.0)
    assert failed().bars(A, frozenset({hosts, HOME}), 1.0)  # some still see them there
    assert failed().bars(A, frozenset(), 1.0)  # nobody says


def test_it_is_tried_again_ever_more_rarely() -> None:
    """After ten minutes, twenty, up to a day; from anew once data streams got through, or elsewhere."""
    found, now, pauses = failed(), 0.0, []
    for _ in range(10):
        pause = next(s for s in range(1, 10**6) if not found.bars(A, HERE, now + s))
        pauses.append(pause)
        now += pause
        found.meets(A, HERE)
        found.failed(A, now)
    assert pauses[:3] == [600, 1200, 2400]
    assert pauses[-1] == impassable.LONGEST_S
    elsewhere = frozenset({("192.0.2.9", HOME[1])})
    found.meets(A, elsewhere)
    found.failed(A, now)
    assert not found.bars(A, elsewhere, now + impassable.FIRST_S)
    found.failed(A, now)
    found.passed(A)
    assert not found.bars(A, elsewhere, now)


def test_what_is_kept_is_bounded() -> None:
    """Of very many peers the first are forgotten."""
    found = Impassable()
    for number in range(impassable.MOST_PEERS + 5):
        found.meets(number.to_bytes(20, "big"), HERE)
    assert len(found._pairs) == impassable.MOST_PEERS
