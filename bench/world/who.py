"""Who takes part: machines, their places in the network, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TOPOLOGY = str(Path(__file__).with_name("world.toml"))
RUN = "world"
PORT = 31330
BOOTSTRAP, STRANGER, MONITOR = "bootstrap", "stranger", "monitor"
PACE_S = 0.15  # seconds of a local step of most peers
LOCAL_STEPS = 192  # of each peer at full speed between two averages
OVERLAP = 48  # local steps that a round may last
BLOCK = 32  # indices drawn together
GRADIENT_STEPS = 8  # with --gradients: of each peer between two averages


@dataclass(frozen=True)
class Place:
    """One peer's machine."""

    name: str
    region: str
    slowness: float = 1.0  # its step takes so many times PACE_S
    public: bool = False  # others can dial it
    spot: bool = False
    laptop: bool = False
    dollars_per_hour: float = 0.0  # of the machine
    dollars_per_gb: float = 0.0  # of what it sends
    moves: tuple[str, ...] = ()  # addresses that it has later


# Prices as clouds list them for a spot machine with a small GPU, and for traffic to the internet.
PLACES = (
    Place("desk", "eu-home", laptop=True),
    Place("mobile", "eu-home"),
    Place("strict", "eu-home"),
    Place("campus", "eu-campus", public=True, moves=("10.77.0.201",)),
    Place("spot1", "us-cloud", public=True, spot=True, dollars_per_hour=0.18, dollars_per_gb=0.08,
          moves=tuple(f"10.77.0.{n}" for n in range(210, 230))),
    Place("spot2", "ap-cloud", 4.0, public=True, spot=True, dollars_per_hour=0.16, dollars_per_gb=0.12,
          moves=tuple(f"10.77.0.{n}" for n in range(230, 250))),
)  # fmt: skip


def places(gradients: bool) -> tuple[Place, ...]:
    """Who trains: with gradients the spot peers alone."""
    return tuple(place for place in PLACES if place.spot) if gradients else PLACES


def speed(chosen: tuple[Place, ...]) -> float:
    """Of all together, in peers at full speed."""
    return sum(1 / place.slowness for place in chosen)
