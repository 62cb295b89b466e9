"""How far two peers are apart: the class of their link, by which traffic is counted and priced. Pure."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import StrEnum

ZONE_RTT_S = 0.001  # published round trips: 0.3 to 0.7 ms inside a zone
REGION_RTT_S = 0.005
CONTINENT_RTT_S = 0.07

_CONTINENTS = {
    "us": "america", "ca": "america", "na": "america", "northamerica": "america", "america": "america",
    "sa": "southamerica", "southamerica": "southamerica",
    "eu": "europe", "europe": "europe", "uk": "europe",
    "ap": "asia", "asia": "asia",
    "me": "middleeast", "il": "middleeast",
    "af": "africa", "africa": "africa",
    "au": "australia", "australia": "australia",
}  # fmt: skip
_WITH_ZONE = re.compile(r"(.+[a-z]\d+)-([a-z])|(.+-\d+)([a-z])")  # us-central1-a, us-east-1a


class Distance(StrEnum):
    """The class of a link, nearest first."""

    HOST = "host"  # one machine
    ZONE = "zone"  # one data centre
    REGION = "region"
    CONTINENT = "continent"
    WORLD = "world"  # between continents, or not known


ELSEWHERE = (Distance.CONTINENT, Distance.WORLD)  # another region


@dataclass(frozen=True, slots=True)
class Where:
    """The parts of a region's name; a part that the name does not tell is empty."""

    continent: str = ""
    region: str = ""
    zone: str = ""

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def parse(cls, name: str) -> Where:
        """Names of clouds ("us-central1-a", "eu-west-3", "ap-south-1b") and "continent/region/zone"."""
        name = name.strip().lower()
        if "/" in name:
            first, middle, *last = [*name.split("/"), ""]
            continent = _CONTINENTS.get(first, first)
            return cls(continent, f"{first}/{middle}" if middle else "", "/".join(filter(None, last)))
        found = _WITH_ZONE.fullmatch(name)
        region = name if found is None else found[1] or found[3]
        zone = "" if found is None else found[2] or found[4]
        return cls(_CONTINENTS.get(name.split("-")[0], ""), region, zone)


def distance(mine: str, theirs: str, *, same_host: bool, rtt_s: float) -> Distance:
    """The class of the link between two peers of these regions ("": not named).

    Where the names do not tell, the round trip in seconds does (0.0: unknown).
    """
    if same_host:
        return Distance.HOST
    here, there = Where.parse(mine), Where.parse(theirs)
    if here.region and here.region == there.region:
        return Distance.ZONE if here.zone and here.zone == there.zone else Distance.REGION
    if here.continent and there.continent:
        return Distance.CONTINENT if here.continent == there.continent else Distance.WORLD
    if rtt_s <= 0.0 or rtt_s > CONTINENT_RTT_S:
        return Distance.WORLD
    if rtt_s > REGION_RTT_S:
        return Distance.CONTINENT
    return Distance.REGION if rtt_s > ZONE_RTT_S else Distance.ZONE
