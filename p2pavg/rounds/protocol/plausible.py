"""What a member can truly have: nobody counts for more, neither by its own word nor by a leader's. Pure."""

MOST_TARGETS = 1000  # epochs' worth of samples: nobody can have counted more
MOST_WEIGHT = 1e12


def plausible(samples: int, weight: float, target: int, weighted: bool) -> bool:
    """Whether a contribution may have these. weighted: as in `TrainingSpec`."""
    if samples > MOST_TARGETS * target:
        return False
    return weight <= MOST_WEIGHT if weighted else weight == samples
