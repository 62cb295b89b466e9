"""What a newcomer expects of its link, and what `bench join` holds it to."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from p2pavg.bench.join.bars import bars
from p2pavg.lab.topology import load
from p2pavg.rounds.state.projection import (
    ALLOWED,
    HELD,
    HELD_S,
    PROBE_S,
    SPARE,
    TRIED_S,
    DownloadProgress,
    Projection,
    Wish,
    from_the_start,
)
from p2pavg.rounds.state.telling import Telling

MB = 1_000_000
RESULT = 900_000


class Downloading:
    """A link that brings so much, a share of it results as far as there are any. rtt: its streams begin with
    a tenth of that, and twice as much each round trip. told: the donors know how long an epoch takes.
    """

    def __init__(
        self, mbps: float, total: int, epoch_s: float, *, rtt: float = 0.0, told: bool = True
    ) -> None:
        self.projection = Projection()
        self.projection.swarm(epoch_s if told else 0.0, rtt)
        self.now = self.received = self.state = self.results = 0.0
        self._rate, self._total, self._epoch_s, self._rtt = mbps * 1e6 / 8, total, epoch_s, rtt

    def run(self, until: float, take: float = 0.25) -> Projection:
        """Go on until then."""
        while self.now < until:
            known = self.now / self._epoch_s * RESULT
            window = 0.1 * 2.0 ** (self.now // self._rtt) if self._rtt else 1.0
            came = self._rate * 0.05 * min(1.0, window)
            share = min(take * came, known - self.results)
            self.state, self.results = min(self._total, self.state + came - share), self.results + share
            self.received += came
            lacking = int(known - self.results)
            at = DownloadProgress(int(self.state), self._total, int(self.results), lacking, RESULT)
            epochs = int(self.now / self._epoch_s)
            self.projection.observe(self.now, at, int(self.received), epochs, epochs * self._epoch_s)
            self.now += 0.05
        return self.projection


def download(mbps: float, total: int, epoch_s: float, seconds: float, *, rtt: float = 0.0) -> Projection:
    """After so many seconds."""
    return Downloading(mbps, total, epoch_s, rtt=rtt).run(seconds)


@pytest.mark.parametrize("total", [5 * MB, 20 * MB, 200 * MB])
@pytest.mark.parametrize(("epoch_s", "paced"), [(0.3, True), (1.1, False), (3.0, False)])
def test_rounds_wait_only_where_results_leave_too_little_of_the_link(
    total: int, epoch_s: float, paced: bool
) -> None:
    """Over 20 Mb/s results of 900 kB every 0.3 s are too much; every 1.1 s they are a third of it."""
    assert download(20, total, epoch_s, 1.8).paced is paced


def test_a_newcomer_knows_what_its_link_brings() -> None:
    """Rate, length of an epoch, and the time that is left, with and without rounds that wait."""
    found = download(20, 20 * MB, 1.1, 4.0)
    assert found.bytes_per_second == pytest.approx(2.5e6, rel=0.05)
    assert found.epoch_seconds == pytest.approx(1.1)
    assert found.paced_s() == pytest.approx(found.left / 2.5e6, rel=0.05)
    assert found.remaining_s() == pytest.approx(found.left / (2.5e6 - RESULT / 1.1), rel=0.05)
    assert found.held_s == pytest.approx(HELD * 8.0 + HELD_S, rel=0.05)
    assert math.isinf(download(20, 20 * MB, 0.3, 4.0).remaining_s())


def test_without_word_from_donors_the_results_tell_how_long_an_epoch_is() -> None:
    """Donors that have only just begun do not know it."""
    found = Downloading(20, 20 * MB, 0.3, told=False).run(2.0)
    assert found.epoch_seconds == pytest.approx(0.3)
    assert found.paced


def test_rounds_wait_until_a_newcomer_knows_its_link() -> None:
    """From its first word on, for a moment: then they go on, or wait for as long as it takes."""
    slow, fast = Downloading(20, 20 * MB, 0.3), Downloading(1000, 200 * MB, 0.3)
    for one in (slow, fast):
        wish = one.run(0.1).wish(0.1, loaded=False)
        assert wish is not None
        assert (wish.spare, wish.seconds) == (SPARE, PROBE_S)
    assert fast.run(0.6).wish(0.6, loaded=False) is None
    wish = slow.run(0.6).wish(0.6, loaded=False)
    assert wish is not None
    assert wish.seconds == pytest.approx(HELD * 8.0 + HELD_S, rel=0.05)


def test_rounds_wait_at_once_for_a_peer_that_short_epochs_outrun() -> None:
    """It has its state, and lacks ever more results: until it knows its link, and then for all of them."""
    one, result_s = Projection(), RESULT / 100e6
    one.swarm(result_s / 2, 0.0)
    received = 0

    def at(results: int, lacking: int) -> DownloadProgress:
        return DownloadProgress(0, 0, results * RESULT, lacking * RESULT, RESULT)

    for tick in range(8):
        now = 0.1 * (tick + 1)
        received += int(0.1 * 100e6)
        one.observe(now, at(received // RESULT, 200), received, 0, 0.0)
        wish = one.wish(now, loaded=True)
        assert wish is not None, tick
    assert one.paced
    assert wish == Wish(0, pytest.approx(HELD_S + HELD * 200 * result_s, rel=0.1))
    one.observe(0.9, at(received // RESULT, 20), received + RESULT, 0, 0.0)
    fewer = one.wish(0.9, loaded=True)
    assert fewer is not None
    assert fewer.seconds >= 0.9 * wish.seconds  # what is left by now does not shorten what was asked for


def test_streams_that_have_yet_to_find_their_windows_tell_nothing_of_the_link() -> None:
    """Over long trips a fast link begins slowly: rounds wait for it no longer than until it is known."""
    fast = Downloading(200, 20 * MB, 0.3, rtt=0.3)
    assert not fast.run(0.9).paced
    assert fast.run(0.9).wish(0.9, loaded=False) is not None
    fast.run(1.9)
    assert not fast.projection.paced
    assert fast.projection.wish(1.9, loaded=False) is None


def test_a_stream_that_waits_for_a_lost_packet_does_not_make_the_link_look_slow() -> None:
    """For 0.6 s nothing comes, and then what was held back: the link brings what it brought before."""
    one = Downloading(20, 20 * MB, 1.1, rtt=0.3)
    one.run(3.0)
    for _ in range(12):
        at = DownloadProgress(int(one.state), 20 * MB, int(one.results), 2 * RESULT, RESULT)
        one.projection.observe(one.now, at, int(one.received), 3, 3.3)
        one.now += 0.05
        assert not one.projection.paced
        assert one.projection.bytes_per_second > 2.0e6
    one.received += 0.6 * 2.5e6
    assert not one.run(4.5).paced
    assert one.projection.bytes_per_second < 3.2e6


def test_a_link_that_broke_is_measured_anew() -> None:
    """What another connection brought is no rate."""
    one = Downloading(20, 20 * MB, 0.3)
    one.run(2.0)
    one.received = 0.0
    one.run(2.2)
    assert one.projection.bytes_per_second == 0.0
    assert one.run(3.0).bytes_per_second == pytest.approx(2.5e6, rel=0.1)


def test_rounds_wait_for_the_end_only_where_results_follow_each_other_closely() -> None:
    """A result that takes 0.36 s leaves room in an epoch of 1.1 s, and none over long trips; and whoever did
    not get in so in a while is waited for.
    """
    for rtt, waits in ((0.04, False), (0.4, True)):
        one = Downloading(20, 5 * MB, 1.1, rtt=rtt)
        one.run(2.5, take=0.0)
        one.state, one.results = 5 * MB, one.now / 1.1 * RESULT
        one.run(2.7)
        assert (one.projection.wish(2.7, loaded=True) is not None) is waits
        assert one.projection.wish(2.7 + TRIED_S + 3 * 1.1, loaded=True) == Wish(0, one.projection.held_s)


def test_no_round_begins_any_more_when_the_end_of_a_slow_download_is_near() -> None:
    """A result costs such a link more than an epoch takes; before that one may be lacking."""
    one = Downloading(20, 20 * MB, 0.3)
    middle, end = one.run(2.0).wish(2.0, loaded=False), None
    one.state, one.results = 19 * MB, one.now / 0.3 * RESULT
    end = one.run(2.1).wish(2.1, loaded=False)
    assert middle is not None
    assert end is not None
    assert (middle.spare, end.spare) == (SPARE, 0)


def test_rounds_wait_at_once_for_a_peer_that_missed_one_by_a_moment() -> None:
    """It lacks one result, and nobody knows its link: without a wait it would miss each round in the same
    way. Who lacks more gets nearer first.
    """
    for lacking, wish in ((1, Wish(0, HELD_S)), (3, None)):
        missed = Projection()
        missed.swarm(1.1, 0.3)
        missed.observe(0.1, DownloadProgress(0, 0, 0, lacking * RESULT, RESULT), 0, 0, 0.0)
        assert missed.wish(0.1, loaded=True) == wish


def test_who_was_told_of_no_result_yet_has_no_round_wait() -> None:
    """A peer that has a state may lack many."""
    missed = Projection()
    missed.swarm(0.3, 0.1)
    missed.observe(0.1, DownloadProgress(0, 0, 0, 0, RESULT), 0, 0, 0.0)
    assert missed.wish(0.1, loaded=True) is None


def test_rounds_wait_from_the_first_question_where_epochs_are_shorter_than_the_way() -> None:
    """Over 300 ms results of 0.3 s would pile up before a newcomer could say a word; those of 1.1 s would
    not, and over 40 ms none do. A newcomer that knows more says the same until its link is known.
    """
    wish = from_the_start(0.3, 0.3)
    assert wish == Wish(0, PROBE_S + 6 * 0.3)
    assert from_the_start(1.1, 0.3) is from_the_start(0.3, 0.04) is from_the_start(0.0, 0.3) is None
    assert Downloading(20, 20 * MB, 0.3, rtt=0.3).run(0.2).wish(0.2, loaded=False) == wish


def test_once_rounds_wait_they_go_on_waiting() -> None:
    """Epochs that take longer because they wait do not look like long epochs."""
    projection = download(20, 20 * MB, 0.3, 2.0)
    assert projection.paced
    at = DownloadProgress(10 * MB, 20 * MB, 2 * MB, RESULT, RESULT)
    projection.observe(10.0, at, 12 * MB, 7, 10.0)
    assert projection.paced
    assert projection.epoch_seconds == pytest.approx(0.3, rel=0.1)


def test_the_log_says_what_happens_and_then_more_rarely(caplog: Any) -> None:
    """One line at the start, one after a second, then ever fewer; one when rounds have to wait, and why."""
    caplog.set_level(logging.WARNING)
    telling, projection = Telling(0.0), Projection()
    telling.begins(7, 20 * MB, 2)
    for tenth in range(1000):
        now = tenth / 10
        at = DownloadProgress(int(min(20 * MB, now * 2e6)), 20 * MB, int(now * 5e5), RESULT, RESULT)
        projection.observe(now, at, int(now * 2.5e6), int(now / 0.3), int(now / 0.3) * 0.3)
        telling.look(now, at, projection)
    caplog.set_level(logging.INFO)
    telling.ends(100.0, 30, at, 12)
    lines = [record.message for record in caplog.records]
    assert lines[0] == "joining: 20 MB of state (epoch 7) come from 2 members"
    assert sum("are here" in line for line in lines) == 5
    (paced,) = (line for line in lines if "rounds wait" in line)
    assert "900 kB every 0.30 s (24.0 Mb/s)" in paced
    assert "20.0 Mb/s for 20 MB" in paced
    assert lines[-1].startswith("joined at epoch 30 after 100.0 s: 20 MB of state and 12 results")


def answers(in_s: float, *, slow_s: float = 1.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """A newcomer that joins after 20 s, and a donor whose epochs of a second take `slow_s` meanwhile."""
    at, applied = 0.0, []
    while at < 60:
        step = (slow_s if 20 <= at < 20 + in_s else 1.0) / 10
        applied.append({"at": at + 10 * step, "counted_at": [at + (n + 1) * step for n in range(10)]})
        at += 10 * step
    newcomer = {
        "began": 20.0,
        "in_at": 20.0 + in_s,
        "state_bytes": 5 * MB,
        "result_bytes": 4 * RESULT,
        "results": 4,
        "received_bytes": 5.2e6 + 4 * RESULT,
    }
    return newcomer, {"applied": applied}


@pytest.mark.parametrize(
    ("in_s", "slow_s", "epoch_s", "within"),
    [
        (7.0, 1.0, 1.0, {"in": True, "sent": True, "donors": True}),
        (9.0, 1.0, 1.0, {"in": False, "sent": True, "donors": True}),
        (6.0, 1.5, 1.0, {"in": True, "sent": True, "donors": False}),  # results fit, and it lost a third
        (6.0, 1.5, 0.6, {"in": True, "sent": True, "donors": True}),  # they do not: two seconds of state
    ],
)
def test_bars_of_joining(in_s: float, slow_s: float, epoch_s: float, within: dict[str, bool]) -> None:
    """5 MB over 20 Mb/s take 2 s: in after 2.5 times that and three epochs, and so much lost at donors."""
    newcomer, donor = answers(in_s, slow_s=slow_s)
    found = bars([newcomer], [donor], load("home-4"), 1, epoch_s, RESULT)
    assert found["state_s"] == pytest.approx(2.0)
    assert found["within"] == within
    assert found["sent_over_state"] == pytest.approx(1.04)


def test_the_allowed_time_is_less_than_the_bar() -> None:
    """Rounds are asked to wait early enough for the bar to be kept."""
    assert ALLOWED < 2.5
