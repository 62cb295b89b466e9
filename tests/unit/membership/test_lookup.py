from __future__ import annotations

from p2pavg.membership.table.lookup import Shortlist
from p2pavg.membership.table.timing import SHORTEST_PATIENCE, Endpoints
from p2pavg.membership.table.wire import Contact

TARGET = bytes(20)


def contact(distance: int, port: int = 1) -> Contact:
    return Contact(distance.to_bytes(20, "big"), ("10.0.0.1", port))


def test_it_asks_closer_and_closer_and_ends() -> None:
    """A lookup asks the closest candidates first, takes in what they tell, and ends with the k closest."""
    shortlist = Shortlist(TARGET, contact(999).id, 2, 2)
    shortlist.add([contact(50), contact(60), contact(70)])
    assert shortlist.next_to_ask() == [contact(50), contact(60)]
    assert not shortlist.next_to_ask()
    shortlist.answered(contact(50).id)
    shortlist.add([contact(10), contact(20), contact(999)])
    assert shortlist.next_to_ask() == [contact(10)]
    shortlist.answered(contact(60).id)
    assert not shortlist.finished
    assert shortlist.next_to_ask() == [contact(20)]
    shortlist.answered(contact(10).id)
    shortlist.answered(contact(20).id)
    assert shortlist.finished
    assert shortlist.closest() == [contact(10), contact(20)]


def test_the_dead_are_replaced() -> None:
    """A candidate that failed does not count; another address for it is tried."""
    shortlist = Shortlist(TARGET, contact(999).id, 1, 1)
    shortlist.add([contact(1), contact(2)])
    assert shortlist.next_to_ask() == [contact(1)]
    shortlist.failed(contact(1).id)
    assert shortlist.next_to_ask() == [contact(2)]
    shortlist.add([contact(1, port=2)])
    shortlist.answered(contact(2).id)
    assert shortlist.next_to_ask() == [contact(1, port=2)]


def test_the_slow_do_not_hold_it_back() -> None:
    """Once three have answered a lookup ends without those that are slow; before, it waits for them."""
    shortlist = Shortlist(TARGET, contact(999).id, 4, 4)
    shortlist.add([contact(n) for n in range(1, 5)])
    assert len(shortlist.next_to_ask()) == 4
    shortlist.slow(contact(1).id)
    assert not shortlist.finished
    for n in (2, 3, 4):
        shortlist.answered(contact(n).id)
    assert shortlist.finished
    alone = Shortlist(TARGET, contact(999).id, 4, 4)
    alone.add([contact(1)])
    alone.next_to_ask()
    alone.slow(contact(1).id)
    assert not alone.finished
    alone.answered(contact(1).id)
    assert alone.finished


def test_nobody_known_means_finished() -> None:
    """A lookup of a node that knows nobody ends at once, with nobody."""
    shortlist = Shortlist(TARGET, contact(9).id, 4, 4)
    shortlist.add([contact(9)])
    assert shortlist.finished
    assert not shortlist.closest()


def test_candidates_are_bounded() -> None:
    """A liar that names thousands of nodes does not make the list grow without end."""
    shortlist = Shortlist(TARGET, contact(9).id, 4, 4)
    shortlist.add([contact(n) for n in range(10, 5000)])
    assert len(shortlist._contacts) <= 256


def test_once_half_have_answered_the_others_hold_a_lookup_back() -> None:
    """Whom a lookup waits for is named when half of the closest have answered, for they tell how fast answers
    come now.
    """
    shortlist = Shortlist(TARGET, contact(999).id, 4, 4)
    shortlist.add([contact(1), contact(2), contact(3), contact(4)])
    shortlist.next_to_ask()
    shortlist.answered(contact(1).id)
    assert not shortlist.waits_for()
    shortlist.answered(contact(3).id)
    assert shortlist.waits_for() == [contact(2), contact(4)]


def test_a_wait_is_as_long_as_answers_take_now() -> None:
    """An address of which a slow time is known gets a little more than its shortest round trip where others
    answer at once; one that is always far away gets its whole time, and nobody gets more than without the
    others.
    """
    endpoints = Endpoints()
    busy, far, new = (endpoints.at(("10.0.0.1", port)) for port in (1, 2, 3))
    for at in range(20):
        busy.measured(0.03 if at % 2 else 0.15)
        far.measured(0.3)
    assert endpoints.hurry(busy, 0.004) < 0.13 < 0.25 < endpoints.patience(busy)
    assert endpoints.hurry(far, 0.004) > 0.3
    assert endpoints.hurry(new, 0.004) == SHORTEST_PATIENCE
    assert endpoints.hurry(new, 9.0) == endpoints.patience(new)


def test_patience_is_of_the_last_answers_too() -> None:
    """Who was measured while everything was slow is waited for as long as its shortest round trip and the
    last answers of all say; the question is sent again no sooner than before.
    """
    endpoints = Endpoints()
    busy, far, near = (endpoints.at(("10.0.0.1", port)) for port in (1, 2, 3))
    for _ in range(10):
        for rtt in (0.03, 0.3):
            endpoints.measured(busy, rtt)
            endpoints.measured(far, 0.3)
    before, again = endpoints.patience(busy), endpoints.timeout(busy)
    for _ in range(32):
        endpoints.measured(near, 0.002)
    assert endpoints.patience(busy) < 0.05 < 0.5 < before
    assert endpoints.patience(far) > 0.3
    assert endpoints.timeout(busy) == again
