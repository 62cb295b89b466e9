"""A member that lies costs the honest ones little, and none of them its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.events import Received
from p2pavg.rounds.machine.rules.agreement import agree, dissenters
from p2pavg.rounds.machine.rules.complaints import MOST_VAGUE, Complaints
from p2pavg.rounds.machine.rules.disputes import KEPT_EPOCHS, Disputes
from p2pavg.rounds.machine.rules.plausible import MOST_TARGETS, plausible, plausible_handover
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.messages import Complain, Done, Message, Prepare
from tests.simulation.byzantine import Liar, Trick
from tests.simulation.calm import Calm

A, B, C, D = (name * 20 for name in (b"a", b"b", b"c", b"d"))
WRONG = b"w" * 32


def instead(kind: type[Message], **fields: object) -> Trick:
    """Each message of this kind with other fields."""

    def trick(liar: Liar, peer: PeerId, message: Message) -> list[tuple[float, Message]]:
        return [(0.0, replace(message, **fields) if isinstance(message, kind) else message)]  # type: ignore[type-var]

    return trick


def wrong_digests(liar: Liar, peer: PeerId, message: Message) -> list[tuple[float, Message]]:
    if isinstance(message, Done):
        message = replace(message, digests=(WRONG,) * len(message.digests))
    return [(0.0, message)]


@pytest.mark.parametrize(
    ("told", "at_fault"),
    [
        ({A: b"xy", B: b"xy", C: b"xy"}, ()),
        ({A: b"xy", B: b"xy", C: b"zz"}, (C,)),  # all others agree, the owners among them
        ({A: b"zy", B: b"xy", C: b"xy"}, (A,)),  # the owner alone has another
        ({A: b"xy", B: b"zy"}, (A,)),  # no majority: they have it from the owner
        ({A: b"xy", B: b"zy", C: b"wy"}, (A,)),
        ({B: b"xy", C: b"zy"}, (A,)),  # the owner told nothing
    ],
)
def test_whoever_has_another_result_than_most_and_the_owner_is_at_fault(
    told: dict[bytes, bytes], at_fault: tuple[bytes, ...]
) -> None:
    """Part 0 belongs to A, part 1 to B; a digest is one letter here."""
    split = {peer: [text[:1], text[1:]] for peer, text in told.items()}
    assert dissenters(split, [A, B, C], Plan((Part(0, 0, 1), Part(1, 1, 1)))) == at_fault


FIVE = [name * 20 for name in (b"a", b"b", b"c", b"d", b"e")]
GROUPS = (1, 1, 2, 2, 2)


def judged(told: str, plan: Plan, disputes: Disputes, epoch: int = 0) -> tuple[bool, bytes]:
    """Whether five members agree on a part whose digests are letters, and the names of those at fault."""
    digests = {peer: [text.encode()] for peer, text in zip(FIVE, told, strict=True)}
    equal, wrong = agree(digests, FIVE, plan, disputes, epoch)
    return equal, bytes(peer[0] for peer in wrong)


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize(
    ("told", "at_fault"),
    [
        ("xxxxx", b""),
        ("xxxyy", b"c"),  # what the deputy passed on
        ("xxyxx", b"c"),  # the deputy alone
        ("xxxxz", b"e"),  # one of the two below the deputy
        ("xxxyz", b"c"),  # both
        ("xzxxx", b"b"),
        ("xzzzz", b"a"),  # all to whom the owner gave something have another
        ("xzyyy", b"a"),
        ("xyxzz", b"a"),
    ],
)
def test_a_deputy_is_at_fault_for_those_below_it(told: str, at_fault: bytes, swaps: bool) -> None:
    """A owns the only part and gives it to B; C gives it to D and E, whether C has it from A or swaps."""
    plan = Plan((Part(0, 0, 9, (2,), swaps),), GROUPS)
    assert judged(told, plan, Disputes()) == (not at_fault, at_fault)


@pytest.mark.parametrize("swaps", [False, True])
def test_two_whose_word_stands_against_another_own_nothing_until_one_repeats_it(swaps: bool) -> None:
    """A says one thing, C another, and all below them as they do: either may have lied, so nobody is left
    out. The one that is then in dispute with another one is at fault, and the first is cleared.
    """
    plan, other = (Plan((Part(owner, 0, 9, (2,), swaps),), GROUPS) for owner in (0, 1))
    told = Disputes()
    assert judged("xxyyy", plan, told) == (False, b"")
    assert told.open(0) == {A, C}
    assert judged("xxyyy", other, told, 3) == (False, b"c")
    assert told.open(3) == {C}
    assert told.open(3 + KEPT_EPOCHS) == set()


def test_who_lies_to_several_at_once_is_found_at_once() -> None:
    """A gives both deputies another result than its own region; neither of them pays for it."""
    plan = Plan((Part(0, 0, 9, (2, 3)),), (1, 1, 2, 3, 3))
    assert judged("xxyzz", plan, Disputes()) == (False, b"a")


def test_a_dispute_that_comes_back_is_judged_by_the_majority() -> None:
    """Where nobody else can own parts, the two do again: then most members decide, so that averages go on."""
    plan = Plan((Part(0, 0, 9, (2,), swaps=True),), GROUPS)
    told = Disputes()
    assert judged("xxyyy", plan, told) == (False, b"")
    assert judged("xxyyy", plan, told, 1) == (False, b"a")


@pytest.mark.parametrize("seed", [0, 1])  # the liar does not lead
def test_a_member_that_tells_wrong_digests_is_left_out_alone(seed: int) -> None:
    """A liar, or a machine with bad memory: no honest owner is left out, and averages go on."""
    undisturbed, told = Liar(None, seed).run(), Liar(wrong_digests, seed).run()
    assert told.excluded == {}
    assert told.liar >= told.epochs - 1
    assert told.epochs >= undisturbed.epochs / 3


def test_a_handover_is_bounded_by_time_and_by_what_the_receiver_may_declare() -> None:
    """What a receiver takes it can always declare; long epochs and long steps allow for more, time alone for
    no more than that.
    """
    assert not plausible_handover(1 << 40, held=0, step=4, target=100, epochs=2.0)
    assert plausible_handover(3_200, held=0, step=4, target=100, epochs=2.0)
    assert not plausible_handover(3_201, held=0, step=4, target=100, epochs=2.0)
    assert plausible_handover(6_400, held=0, step=200, target=100, epochs=2.0)
    assert plausible_handover(8_000, held=0, step=4, target=100, epochs=5.0)
    held = MOST_TARGETS * 100 - 50
    assert plausible_handover(50, held, step=4, target=100, epochs=2.0)
    assert not plausible_handover(51, held, step=4, target=100, epochs=2.0)
    assert plausible(held + 50, held + 50, 100, weighted=False)


def test_a_word_against_a_word_costs_both_and_then_its_author() -> None:
    """B complains of C twice in a run: both leave, then B alone."""
    complaints = Complaints(A)
    assert not complaints.add(B, C)
    assert complaints.judge() == (B, C)
    assert not complaints.add(B, C)
    assert complaints.judge() == (B,)


@pytest.mark.parametrize("authors", [(A,), (B, D), (C,)])
def test_a_seconded_complaint_costs_the_accused_alone(authors: tuple[bytes, ...]) -> None:
    """What the leader finds itself, what two say, and what a member says of itself is believed at once."""
    complaints = Complaints(A)
    assert [complaints.add(author, C) for author in authors][-1]
    assert complaints.judge() == (C,)
    assert not complaints.open


def test_of_two_that_complain_of_each_other_one_leaves_in_turn() -> None:
    """A link that breaks again and again costs neither end two epochs on end."""
    complaints, left = Complaints(A), []
    for _ in range(4):
        complaints.add(B, C)
        complaints.add(C, B)
        left += complaints.judge()
    assert left == [B, C, B, C]


def test_who_complains_of_nobody_time_and_again_leaves() -> None:
    """Twice in an epoch it may have taken the leader for lost."""
    complaints = Complaints(A)
    assert [complaints.vague(B) for _ in range(MOST_VAGUE + 1)] == [False] * MOST_VAGUE + [True]
    complaints.new_epoch()
    assert not complaints.vague(B)


@pytest.mark.parametrize("vague", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_groundless_complaints_evict_nobody_for_long(seed: int, vague: bool) -> None:
    """A member complains in each attempt of others, of one and the same honest peer or of nobody: that peer
    misses one epoch at most, and averages go on.
    """
    led: set[int] = set()

    def complains(liar: Liar, peer: PeerId, message: Message) -> list[tuple[float, Message]]:
        if isinstance(message, Prepare):
            led.add(message.ballot.epoch)
        if not isinstance(message, Done):
            return [(0.0, message)]
        victim = next(node.me for node in liar.honest if node.me != peer)
        return [(0.0, Complain(message.ballot, None if vague else victim, "because"))]

    undisturbed, told = Liar(None, seed).run(), Liar(complains, seed).run()
    assert sum(told.excluded.values()) <= 1
    assert told.liar >= told.epochs - len(led) - 1
    assert told.epochs >= undisturbed.epochs / 3


def test_a_link_that_breaks_behind_the_last_chunk_costs_nobody_a_round() -> None:
    """Two members complain of each other, as when their link breaks, and are DONE all the same. A third one
    has yet to get its results: neither of the two is left out.
    """
    swarm = Calm(4, chunk_seconds=0.005)
    swarm.epochs(5)
    leader, epoch = swarm.leader, swarm.leader.machine.epoch
    late, one, other = (node for node in swarm.nodes if node is not leader)
    for node in swarm.nodes:
        if node is not late:
            swarm.swarm.network.ways[node.me, late.me].chunk_seconds = 0.1
    swarm.run(10.0, lambda: leader.machine.epoch == epoch and swarm.transferring())
    proposal = leader.machine.core.proposal
    assert proposal is not None
    assert proposal.begun
    for author, accused in ((one, other), (other, one)):
        leader.feed(Received(author.me, Complain(proposal.ballot, accused.me, "the link broke")))
    swarm.run(10.0, lambda: all(node.machine.epoch > epoch for node in (late, one, other)))
    assert not swarm.times("aborted", epoch)
    assert {node.machine.epoch for node in (late, one, other)} == {epoch + 1}
