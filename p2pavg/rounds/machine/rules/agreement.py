"""Who is at fault when members tell different digests of a round's result. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from p2pavg.plan import Plan
from p2pavg.rounds.protocol.ballot import PeerId


def dissenters(
    told: Mapping[PeerId, Sequence[bytes]], members: Sequence[PeerId], plan: Plan
) -> tuple[PeerId, ...]:
    """Whom to leave out, in order; empty: all digests of each part are equal.

    told: by member, one digest for each part. members: in rank order. Where a strict majority agrees with the
    owner of a part, the others are at fault: one member that computes wrong, or lies, discredits no owner.
    Without such a majority the owner is at fault: the members have the part from the owner. A deputy is at
    fault for those to whom it passed the part on, when the deputy dissents as they do, or most of them
    dissent.
    """
    at_fault: set[PeerId] = set()
    ranks = {peer: rank for rank, peer in enumerate(members)}
    for index, part in enumerate(plan.parts):
        owner = members[part.owner]
        digests = {peer: each[index] for peer, each in told.items()}
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
