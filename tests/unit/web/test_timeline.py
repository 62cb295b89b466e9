"""What a page remembers: fine where it is new, coarse where it is old, and bounded."""

from __future__ import annotations

import json
import math
import tracemalloc

import pytest

from p2pavg.web import timeline as tl
from p2pavg.web.timeline import Timeline
from tests.unit.web.frames import frame, round_of


def test_the_last_minutes_are_kept_second_by_second() -> None:
    """Every frame of the last quarter of an hour is a point of its own."""
    told = Timeline()
    for second in range(600):
        told.add(frame(1e9 + second, samples_per_second=float(second)))
    times, means, least, most = told.figures(1e9 + 500, 1e9 + 600)["samples_per_second"]
    assert times == [1e9 + second for second in range(500, 600)]
    assert means == least == most == [float(second) for second in range(500, 600)]


def test_older_time_is_coarser_and_keeps_its_peaks() -> None:
    """Over a day a point is the mean of a minute or more, and one second's peak is still its most."""
    told = Timeline()
    for second in range(0, 86400, 20):
        told.add(frame(1e9 + second, samples_per_second=5000.0 if second == 43200 else 100.0))
    times, means, least, most = told.figures(1e9, 1e9 + 86400)["samples_per_second"]
    assert 140 <= len(times) <= tl.MOST_POINTS
    assert max(most) == 5000.0
    assert min(least) == 100.0
    assert 100.0 < max(means) < 1000.0


def test_a_gap_has_no_points() -> None:
    """While nothing was told there is nothing, and no line between."""
    told = Timeline()
    for second in (0, 1, 2, 100, 101):
        told.add(frame(1e9 + second))
    assert told.figures(1e9, 1e9 + 200)["peers"][0] == [1e9 + second for second in (0, 1, 2, 100, 101)]


def test_clocks_that_jump_do_no_harm() -> None:
    """A frame from before the last, or from years later, leaves the figures readable."""
    told = Timeline()
    for at in (1e9, 1e9 + 1, 1e9 - 50, 1e9 + 2, 3e9, 3e9 + 1):
        told.add(frame(at))
    assert told.figures(3e9, 3e9 + 1)["epoch"][0] == [3e9, 3e9 + 1]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 1e308, "7", [1], -1e300])
def test_a_figure_that_is_no_number_is_left_out(value: object) -> None:
    """No value of a frame spoils the others, or the JSON of the answer."""
    told = Timeline()
    told.add(frame(1e9, loss=value))
    found = told.figures(1e9, 1e9)
    assert found["loss"] == [[], [], [], []]
    assert found["epoch"][1] == [7.0]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("broken", [{}, {"at": "x", "peers": []}, {"at": math.nan, "peers": []}])
def test_what_is_no_frame_raises(broken: dict[str, object]) -> None:
    """A malformed line of a file is told to whoever reads the file."""
    with pytest.raises((KeyError, ValueError, TypeError)):
        Timeline().add(broken)


def test_a_day_of_a_large_swarm_takes_less_than_fifty_megabytes() -> None:
    """24 h of 64 peers that come and go, with as many rounds and events as are kept, fit into the bound."""
    tracemalloc.start()
    told = Timeline()
    for number, second in enumerate(
        range(0, 86400, 890)
    ):  # so seldom fills the fine rings, too: gaps take room
        made = frame(1e9 + second, peers=64)
        for peer in made["peers"]:
            peer["peer"] = f"{(int(peer['peer'], 16) + 8 * (number // 5)):040x}"  # eight leave, eight join
        some = range(22 * number, 22 * number + 22)
        made["rounds"] = [round_of(epoch, 1e9 + second, peers=64) for epoch in some]
        made["events"] = [
            {"number": one, "at": 1e9 + second, "words": f"peer {one} was lost " + 80 * "x"} for one in some
        ]
        told.add(made)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 50e6
    assert len(told.rounds(0, math.inf, most=10**6)) == tl.MOST_ROUNDS
    assert len(told.events(0, math.inf, most=10**6)) == tl.MOST_EVENTS
    assert told.figures(1e9, 1e9 + 86400)["samples_per_second"][0][0] <= 1e9 + 600


def test_a_crowd_pushes_nobody_out() -> None:
    """Beyond the room for peers' series the first keep theirs, and the run its own; who leaves makes room."""
    told = Timeline()
    for second in range(3):
        told.add(frame(1e9 + second, peers=300))
    seconds = [1e9, 1e9 + 1, 1e9 + 2]
    assert told.figures(1e9, 1e9 + 9)["peers"][0] == seconds
    assert told.figures(1e9, 1e9 + 9, f"{0:040x}")["upload_bps"][0] == seconds
    assert told.figures(1e9, 1e9 + 9, f"{299:040x}")["upload_bps"][0] == []
    made = frame(1e9 + 3)
    made["peers"][0]["peer"] = "ff" * 20
    told.add(made)
    assert told.figures(1e9, 1e9 + 9, "ff" * 20)["upload_bps"][0] == [1e9 + 3]


def test_rounds_can_be_opened_while_they_are_new() -> None:
    """A round's members are kept for the last rounds, and what more of them tell is added."""
    told = Timeline()
    for epoch in range(tl.DETAILED_ROUNDS + 10):
        told.add(frame(1e9 + epoch, rounds=[round_of(epoch, 1e9 + epoch, peers=1)]))
        told.add(frame(1e9 + epoch, rounds=[round_of(epoch, 1e9 + epoch, peers=2)]))
    newest, oldest = told.round(tl.DETAILED_ROUNDS + 9), told.round(3)
    assert newest is not None
    assert oldest is not None
    assert len(newest["peers"]) == 2
    assert "peers" not in oldest
    assert told.round(10**6) is None
    assert all("peers" not in one for one in told.rounds(0, math.inf))


def test_events_of_two_watches_in_one_file_are_both_there() -> None:
    """A second monitor numbers its events anew, and takes none of the first one's away."""
    told = Timeline()
    event = {"number": 1, "at": 1e9, "words": "ada was lost"}
    told.add(frame(1e9, events=[event, {"number": 2, "at": 1e9, "words": "bob was lost"}]))
    told.add(frame(1e9 + 1, events=[{"number": 1, "at": 1e9 + 1, "words": "cy was lost"}]))
    told.add(frame(1e9 + 2, events=[{"number": 1, "at": 1e9 + 1, "words": "cy was lost; round held with 2"}]))
    words = [one["words"] for one in told.events(0, math.inf)]
    assert words == ["ada was lost", "bob was lost", "cy was lost; round held with 2"]
