"""Who is at fault when members tell different digests of a round's result. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from p2pavg.rounds.protocol.ballot import PeerId


def dissenters(told: Mapping[PeerId, Sequence[bytes]], owners: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """Whom to leave out, in order; empty: all digests of each part are equal.

    told: by member, one digest for each part. owners: of each part. Where a strict majority agrees with the
    owner of a part, the others are at fault: one member that computes wrong, or lies, discredits no owner.
    Without such a majority the owner is at fault: the members have the part from it.
    """
    at_fault: set[PeerId] = set()
    for part, owner in enumerate(owners):
        digests = {peer: each[part] for peer, each in told.items()}
        votes = Counter(digests.values())
        if len(votes) <= 1:
            continue
        right = digests.get(owner)
        if right is not None and 2 * votes[right] > len(digests):
            at_fault.update(peer for peer, digest in digests.items() if digest != right)
        else:
            at_fault.add(owner)
    return tuple(sorted(at_fault))
