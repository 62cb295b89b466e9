"""What a member can truly have: nobody counts for more, neither by its own word nor by a leader's. Pure."""

MOST_TARGETS = 1000  # epochs' worth of samples: nobody can have counted more
MOST_WEIGHT = 1e12
MOST_HANDED = 16.0  # times what a whole swarm counts in the time that has passed


def plausible(samples: int, weight: float, target: int, weighted: bool) -> bool:
    """Whether a contribution may have these. weighted: as in `TrainingSpec`."""
    if samples > MOST_TARGETS * target:
        return False
    return weight <= MOST_WEIGHT if weighted else weight == samples


def bequeathable(samples: int, held: int, step: int, target: int, epochs: float) -> bool:
    """Whether one peer can have accumulated so many samples, and its heir can declare them beside its own.

    held: what the heir has. step: samples of one of the heir's steps. epochs: how many average epochs
    the samples may come from: what the whole swarm counts in that time is generous for one peer.
    """
    return samples <= MOST_HANDED * epochs * max(target, step) and held + samples <= MOST_TARGETS * target
