"""Who is at fault when members tell different digests of a round's result. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from p2pavg.plan import Plan
from p2pavg.rounds.machine.rules.disputes import Disputes, Pair
from p2pavg.rounds.protocol.ballot import PeerId

Told = Mapping[PeerId, Sequence[bytes]]
"""By member, one digest for each part."""


def agree(
    told: Told, members: Sequence[PeerId], plan: Plan, disputes: Disputes, epoch: int
) -> tuple[bool, tuple[PeerId, ...]]:
    """Whether all digests of each part are equal, and if not, whom to leave out, in order: nobody where two
    are in dispute for the first time. members: in rank order. disputes: of earlier attempts; learns of these.
    """
    pairs, at_fault = _apart(told, members, plan)
    again, guilty = disputes.add({pair for pair in pairs if not at_fault.intersection(pair)}, epoch)
    wrong = at_fault | guilty | {*dissenters(told, members, plan, pairs - again)}
    return not pairs and not wrong, tuple(sorted(wrong))


def _apart(told: Told, members: Sequence[PeerId], plan: Plan) -> tuple[set[Pair], set[PeerId]]:
    """Pairs of an owner and a deputy with different digests of a part; and who of them is at fault, as others
    to whom it gave the part have another digest, too.
    """
    pairs: set[Pair] = set()
    at_fault: set[PeerId] = set()
    for index, part in enumerate(plan.parts):
        digests = {peer: each[index] for peer, each in told.items()}
        owner = members[part.owner]
        apart = [members[rank] for rank in part.deputies if digests.get(members[rank]) != digests.get(owner)]
        if owner not in digests or not all(deputy in digests for deputy in apart):
            continue
        for giver in (owner, *apart) if apart else ():
            given = [members[rank] for rank in plan.children(index, members.index(giver), len(members))]
            if any(
                digests.get(peer, digests[giver]) != digests[giver] for peer in given if peer not in apart
            ):
                at_fault.add(giver)
        pairs |= {(owner, deputy) for deputy in apart}
    return pairs, at_fault


def dissenters(
    told: Told, members: Sequence[PeerId], plan: Plan, besides: Collection[Pair] = ()
) -> tuple[PeerId, ...]:
    """Whom to leave out, in order; empty: all digests of each part are equal.

    members: in rank order. besides: pairs whose parts are judged otherwise. Where a strict majority agrees
    with the owner of a part, the others are at fault: one member that computes wrong, or lies, discredits no
    owner. Without such a majority the owner is at fault: the members have the part from the owner. A deputy
    is at fault for those to whom it passed the part on, when the deputy dissents as they do, or most of them
    dissent.
    """
    at_fault: set[PeerId] = set()
    ranks = {peer: rank for rank, peer in enumerate(members)}
    for index, part in enumerate(plan.parts):
        owner = members[part.owner]
        digests = {peer: each[index] for peer, each in told.items()}
        if any(
            (owner, members[rank]) in besides and digests[members[rank]] != digests[owner]
            for rank in part.deputies
        ):
            continue
        votes = Counter(digests.values())
        if len(votes) <= 1:
            continue
        right = digests.get(owner)
        if right is None or 2 * votes[right] <= len(digests):
            at_fault.add(owner)
            continue
        wrong = {peer for peer, digest in digests.items() if digest != right}
        for deputy in part.deputies:
            below = [members[child] for child in plan.children(index, deputy, len(members))]
            misled = wrong.intersection(below)
            voting = sum(peer in digests for peer in below)
            if misled and (members[deputy] in wrong or (len(misled) > 1 and 2 * len(misled) > voting)):
                wrong = (wrong - misled) | {members[deputy]}
        at_fault |= {peer for peer in wrong if peer in ranks}
    return tuple(sorted(at_fault))
