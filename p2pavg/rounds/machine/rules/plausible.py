"""What a member can truly have: no word, the member's own or a leader's, makes it count for more. Pure."""

from collections.abc import Mapping, Sequence

from p2pavg.rounds.protocol.ballot import PeerId

MOST_TARGETS = 1000  # times the samples of an epoch: no peer can have counted more
MOST_WEIGHT = 1e12
NEAR_TARGET = 0.5  # of the samples of an epoch: a round that counts fewer began too early
MOST_HANDED = 16.0  # times what the whole swarm counts in the time that has passed


def plausible(samples: int, weight: float, target: int, weighted: bool) -> bool:
    """Whether a contribution may have so many samples and this weight. weighted: as in `TrainingSpec`."""
    return all_plausible((samples,), (weight,), target, weighted)


def all_plausible(samples: Sequence[int], weights: Sequence[float], target: int, weighted: bool) -> bool:
    """Whether each of these contributions is `plausible`; there is one at least."""
    if max(samples) > MOST_TARGETS * target:
        return False
    return max(weights) <= MOST_WEIGHT if weighted else weights == samples


def undeclared(samples: Sequence[int], weights: Sequence[float], waits: Sequence[int]) -> bool:
    """Whether anybody counts for something without a wait for which it declared that."""
    return 0 in waits and any(
        (own, weight) != (0, 0)
        for own, weight, wait in zip(samples, weights, waits, strict=True)
        if wait == 0
    )


def overtold(told: Mapping[PeerId, int], declared: Mapping[PeerId, int], target: int) -> tuple[PeerId, ...]:
    """Members that told so many samples that the round began too early, and declare few; empty: none.

    told: samples that each told before the round. declared: samples of the members that are ready. A member
    that is not ready counts with what it told, as long as that is no more than an epoch needs in all.
    """
    late = sum(min(samples, target) for peer, samples in told.items() if peer not in declared)
    if sum(declared.values()) + late >= NEAR_TARGET * target:
        return ()
    return tuple(
        sorted(
            peer for peer, samples in declared.items() if told.get(peer, 0) - samples > NEAR_TARGET * target
        )
    )


def plausible_handover(samples: int, held: int, step: int, target: int, epochs: float) -> bool:
    """Whether one peer can have accumulated so many samples, and its receiver can declare them beside its
    own.

    held: samples that the receiver has. step: samples of one of the receiver's steps. epochs: the number of
    average epochs from which the samples may come; what the whole swarm counts in that time is generous for
    one peer.
    """
    return samples <= MOST_HANDED * epochs * max(target, step) and held + samples <= MOST_TARGETS * target
