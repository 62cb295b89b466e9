"""A member that hinders rounds costs the others ever fewer epochs, and no honest peer its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pavg.rounds.machine import healing, leading, member, refusals, transfer, waiting
from p2pavg.rounds.machine.memory.holding import Holding
from p2pavg.rounds.machine.rules.offences import MOST_EPOCHS_OUT, ROUNDS_PER_STRIKE, Offences
from p2pavg.rounds.machine.rules.plausible import overtold
from p2pavg.rounds.machine.rules.stalls import NOTHING
from p2pavg.rounds.protocol.ballot import Ballot, PeerId
from p2pavg.rounds.protocol.causes import Objection
from p2pavg.rounds.protocol.messages import (
    Begin,
    Committed,
    Done,
    Message,
    Prepare,
    Progress,
    Promise,
    Refuse,
    Stalled,
)
from p2pavg.rounds.protocol.roles import Seat
from tests.simulation.byzantine import Liar, Trick
from tests.simulation.checks import BrokenPromiseError
from tests.simulation.tricks import undisturbed

A, B, C = (name * 20 for name in (b"a", b"b", b"c"))
SECONDS = 20.0
Said = list[tuple[float, Message]]


def never_done(lacks: int) -> Trick:
    """It is at it, as it says, for ever."""

    def trick(liar: Liar, peer: PeerId, message: Message) -> Said:
        if not isinstance(message, Done):
            return [(0.0, message)]
        return [(0.3 * n, Stalled(message.ballot, (), (), lacks)) for n in range(400)]

    return trick


def refuses(objection: Objection, about: Callable[[Liar, PeerId, Ballot], dict[str, Any]]) -> Trick:
    """It refuses each proposal."""

    def trick(liar: Liar, peer: PeerId, message: Message) -> Said:
        if not isinstance(message, Promise):
            return [(0.0, message)]
        here = liar.liar.machine
        no = Refuse(message.ballot, here.epoch, here.lineage, objection, None, ())
        return [(0.0, replace(no, **about(liar, peer, message.ballot)))]

    return trick


def another(liar: Liar, peer: PeerId) -> PeerId:
    return next(node.me for node in liar.honest if node.me != peer)


def never_promises(liar: Liar, peer: PeerId, message: Message) -> Said:
    return [] if isinstance(message, Promise) else [(0.0, message)]


def late(liar: Liar, peer: PeerId, message: Message) -> Said:
    return [(1.5 if isinstance(message, Done) else 0.0, message)]


def boasts(liar: Liar, peer: PeerId, message: Message) -> Said:
    return [(0.0, replace(message, samples=10**9) if isinstance(message, Progress) else message)]


def is_ahead(by: int) -> Trick:
    """It says that it stands so many epochs further than it does."""

    def trick(liar: Liar, peer: PeerId, message: Message) -> Said:
        if isinstance(message, Progress):
            message = replace(message, epoch=message.epoch + by)
        return [(0.0, message)]

    return trick


def accuses(liar: Liar, peer: PeerId, message: Message) -> Said:
    """It says of one honest peer that its contribution does not come, as often as it may."""
    if not isinstance(message, Stalled | Done):
        return [(0.0, message)]
    held = liar.liar.machine.core.holding
    ranks = (
        [rank for rank, seat in enumerate(held.members) if seat.peer == another(liar, peer)] if held else []
    )
    return [(0.0, Stalled(message.ballot, tuple(ranks), (), NOTHING)), (0.5, message)]


TRICKS: dict[str, Trick] = {
    "says STALLED instead of DONE": never_done(NOTHING),
    "says that contributions still come": never_done(0),
    "is busy with a ballot of an honest peer": refuses(
        Objection.BUSY,
        lambda liar, peer, ballot: {
            "promised": replace(ballot, leader=another(liar, peer), attempt=ballot.attempt + 1)
        },
    ),
    "is busy with a ballot of nobody": refuses(
        Objection.BUSY, lambda liar, peer, ballot: {"promised": replace(ballot, leader=b"n" * 20)}
    ),
    "is busy with an attempt that no leader can have come to": refuses(
        Objection.BUSY,
        lambda liar, peer, ballot: {"promised": replace(ballot, leader=b"n" * 20, attempt=2**62 - 1)},
    ),
    "has no link to an honest peer": refuses(
        Objection.NO_LINK, lambda liar, peer, ballot: {"missing": (another(liar, peer),)}
    ),
    "has yet to apply an average": refuses(Objection.PENDING, lambda liar, peer, ballot: {}),
    "stands elsewhere": refuses(Objection.ELSEWHERE, lambda liar, peer, ballot: {"lineage": b"e" * 32}),
    "never promises": never_promises,
    "is late": late,
    "boasts": boasts,
    "is an epoch ahead": is_ahead(1),
    "is epochs ahead": is_ahead(1000),
    "accuses an honest peer": accuses,
}


@pytest.mark.parametrize("trick", TRICKS)
def test_who_hinders_rounds_stays_out_of_more_and_more_of_them(trick: str) -> None:
    """Honest peers keep a third of their epochs, their place, and averages over half of the samples."""
    told = Liar(TRICKS[trick]).run(SECONDS)
    assert told.epochs >= undisturbed(1, SECONDS).epochs / 3
    assert told.longest <= 1
    assert told.samples >= 0.5


def test_who_alone_lacks_a_link_leaves_alone() -> None:
    """An end that promised has all its links: whoever names it as missing is left out, and nobody else."""
    told = Liar(TRICKS["has no link to an honest peer"]).run(SECONDS)
    assert told.excluded == {}
    assert told.liar > 0


def test_forgiveness_grows_rarer() -> None:
    """One further epoch out, then 2, 4, 8, ...; and ever more rounds take a strike off."""
    offences, epoch, out = Offences(), 10, []
    for _ in range(9):
        offences.add(A, epoch)
        back = next(e for e in range(epoch, epoch + 999) if A not in offences.out(e))
        out.append(back - epoch - 1)
        epoch = back
    assert out == [0, 1, 2, 4, 8, 16, 32, 64, MOST_EPOCHS_OUT]
    assert offences.strikes(B) == 0
    rounds = 0
    while offences.strikes(A):
        offences.completed(A)
        rounds += 1
    assert rounds == ROUNDS_PER_STRIKE * sum(range(1, 10))


def test_what_may_happen_to_the_honest_costs_less() -> None:
    """An answer that came late twice is forgotten with the epoch."""
    offences = Offences()
    for _ in range(2):
        offences.add(A, 3, free=2)
    assert offences.out(3) == [A]
    assert offences.out(4) == []


@pytest.mark.parametrize(
    ("told", "declared", "named"),
    [
        ({A: 50, B: 50}, {A: 48, B: 52}, ()),  # as told, more or less
        ({A: 90, B: 20}, {B: 20}, ()),  # a straggler: it may have what it told
        ({A: 10**9, B: 20}, {A: 4, B: 20}, (A,)),
        ({A: 90, B: 20}, {A: 4, B: 20}, (A,)),
        ({A: 10**9, B: 20}, {A: 40, B: 20}, ()),  # the round is large enough in spite of it
        ({A: 30, B: 30, C: 40}, {A: 10, B: 10, C: 10}, ()),  # nobody by so much
    ],
)
def test_who_told_more_than_it_declares_is_named(
    told: dict[bytes, int], declared: dict[bytes, int], named: tuple[bytes, ...]
) -> None:
    """A round with far fewer samples than its target names whoever made it come so early."""
    assert overtold(told, declared, 100) == named


@pytest.mark.parametrize(
    ("owner", "name", "instead", "trick"),
    [
        (transfer.TransferRules, "_due", lambda *_: float("inf"), "says STALLED instead of DONE"),
        (transfer.TransferRules, "_due", lambda *_: float("inf"), "is late"),
        (refusals.Refusals, "is_too_often", lambda *_: False, "is busy with a ballot of nobody"),
        (leading.Leading, "bar", lambda _: None, "never promises"),
        (leading, "overtold", lambda *_: (), "boasts"),
        (healing.Healing, "_doubt", lambda _: None, "is epochs ahead"),
    ],
)
def test_without_the_rule_the_trick_works(
    owner: Any, name: str, instead: Any, trick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rule is needed: with it gone, its trick costs more than is promised.

    That members then depose their leader, which gets nothing done, would hide it.
    """
    monkeypatch.setattr(waiting.Waiting, "depose", lambda *_: None)
    monkeypatch.setattr(owner, name, instead)
    told = Liar(TRICKS[trick]).run(SECONDS)
    assert told.epochs < undisturbed(1, SECONDS).epochs / 3 or told.samples < 0.5 or told.longest > 1


def commits_another(liar: Liar, peer: PeerId, message: Message) -> Said:
    """It commits other weights than it began with."""
    if isinstance(message, Committed):
        message = replace(message, weights=tuple(weight + 1 for weight in message.weights))
    return [(0.0, message)]


def never_begins(liar: Liar, peer: PeerId, message: Message) -> Said:
    return [] if isinstance(message, Begin) else [(0.0, message)]


def never_proposes(liar: Liar, peer: PeerId, message: Message) -> Said:
    return [] if isinstance(message, Prepare) else [(0.0, message)]


@pytest.mark.parametrize("trick", [commits_another, never_begins, never_proposes])
@pytest.mark.parametrize("held", [True, False], ids=["deposed", "kept"])
def test_a_leader_under_whom_nothing_gets_done_loses_the_lead(
    trick: Trick, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others lead within seconds; if they did not, the rounds would all but stop."""
    if not held:
        monkeypatch.setattr(waiting.Waiting, "depose", lambda *_: None)
    told = Liar(trick, leads=True).run(SECONDS)
    assert (told.epochs >= undisturbed(1, SECONDS).epochs / 2) is held
    assert told.longest <= 1 or not held


@pytest.mark.parametrize("told_to", [1, 2])
@pytest.mark.parametrize("compared", [True, False])
def test_a_leader_cannot_make_honest_members_apply_different_averages(
    told_to: int, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members tell each other what the leader told them: whoever is not with most of them begins nothing."""

    def forks(liar: Liar, peer: PeerId, message: Message) -> Said:
        victims = [node.me for node in liar.honest][:told_to]
        if isinstance(message, Begin) and peer in victims:
            message = replace(message, note=b"another")
        return [(0.0, message)]

    if not compared:
        monkeypatch.setattr(member.Member, "_compare", lambda *_: None)
        with pytest.raises(BrokenPromiseError, match="another average"):
            Liar(forks, leads=True).run(SECONDS)
        return
    assert Liar(forks, leads=True).run(SECONDS).epochs >= undisturbed(1, SECONDS).epochs / 2


def test_a_leader_can_part_a_group_of_three() -> None:
    """Told of different rounds, the two others part, one heals, and names the samples that it loses.

    Neither of the two can tell which of the other two lies.
    """

    def forks(liar: Liar, peer: PeerId, message: Message) -> Said:
        if isinstance(message, Begin) and peer == liar.honest[0].me:
            message = replace(message, note=b"another")
        return [(0.0, message)]

    with pytest.raises(BrokenPromiseError, match="another average"):
        Liar(forks, peers=3, leads=True).run(SECONDS)
    liar = Liar(forks, peers=3, leads=True)
    liar.swarm.checks.broken = lambda *_: None  # type: ignore[method-assign]
    told = liar.run(SECONDS)
    one, two = liar.honest
    assert one.discarded + two.discarded > 0
    assert told.epochs > 0
    assert abs(one.parameters.epoch - two.parameters.epoch) <= 1


@pytest.mark.parametrize(
    ("others", "lied_to"),
    [
        ("", False),
        ("s", False),
        ("o", False),
        ("so", False),
        ("oo", True),
        ("sso", False),
        ("soo", True),
        ("o--", False),
    ],
)
def test_most_members_tell_who_was_lied_to(others: str, lied_to: bool) -> None:
    """s: was told the same. o: was told otherwise. -: has not said yet."""
    seats = tuple(Seat(name * 20, True) for name in (b"m", b"l", b"1", b"2", b"3")[: 2 + len(others)])
    held = Holding(Ballot(0, 0, b"l" * 20, 1, b"x" * 32), seats, 0, (), 0.0, begun=True, told=b"same")
    for seat, word in zip(seats[2:], others, strict=True):
        if word != "-":
            held.told_others[seat.peer] = b"same" if word == "s" else b"other"
    assert held.is_told_otherwise(b"m" * 20) is lied_to
