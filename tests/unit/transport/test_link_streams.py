"""The number of streams follows what was measured, on any path."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.transport.engine import SELF, JobProgress, StreamStats
from p2pavg.transport.links.streams.count import (
    MOST_SOCKETS,
    StreamCount,
    StreamTransfer,
    least_streams,
    most_streams,
    useful_streams,
)
from p2pavg.transport.links.streams.tuner import StreamCounts

MB = 1e6


def goodput(streams: int, rate_bps: float, rtt_s: float, window: float, nbytes: float) -> float:
    """A model of a transfer whose windows have grown: a round trip, then windows or the path are the
    limit.
    """
    return 8 * nbytes / (rtt_s + 8 * nbytes / min(8 * streams * window / rtt_s, rate_bps))


def run(
    rounds: int,
    rate: float,
    rtt: float,
    window: float,
    nbytes: float,
    links: int = 1,
    noise: float = 0.0,
    seed: int = 0,
    busy: float = 1.0,
    pause_s: float = 0.0,
    count: StreamCount | None = None,
) -> list[int]:
    """The number of streams in each of some transfers, with a pause after each."""
    rng = random.Random(seed)
    count = count or StreamCount(rtt, 4e6)
    used: list[int] = []
    now = 0.0
    for _ in range(rounds):
        used.append(count.wanted(links))
        carried = goodput(used[-1], rate, rtt, window, nbytes) * rng.uniform(1 - noise, 1)
        queue = 0.1 * rtt if 8 * used[-1] * window / rtt > rate else 0.0
        seconds = 8 * nbytes / carried
        now += seconds + pause_s
        count.measured(StreamTransfer(used[-1], int(nbytes), seconds, rtt, busy, queue), links, now)
    return used


def opened(used: list[int]) -> int:
    """How many streams such a sequence of numbers opens after its first."""
    return sum(max(0, after - before) for before, after in itertools.pairwise(used))


# From DESIGN and published measurements: round trip, rate, window.
PATHS = {
    "two-300ms": (0.3, 1e9, 3.7 * MB),
    "two-300ms, 80 Mb/s a stream": (0.3, 1e9, 3.0 * MB),
    "US-EU": (0.103, 6.2e9, 2.6 * MB),
    "EU-AUS": (0.272, 6.2e9, 2.4 * MB),
    "campus": (0.016, 0.5e9, 1.0 * MB),
    "home": (0.04, 20e6, 2.5 * MB),
    "zone": (0.0007, 6.9e9, 2.5 * MB),
}


class TestStreamCount:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("noise", [0.0, 0.08])
    def test_near_the_best(self, path, noise):
        """After a dozen transfers the number carries 0.9 of what the best fixed number carries."""
        rtt, rate, window = PATHS[path]
        best = max(goodput(k, rate, rtt, window, 100 * MB) for k in range(1, MOST_SOCKETS + 1))
        for seed in range(20 if noise else 1):
            used = run(24, rate, rtt, window, 100 * MB, noise=noise, seed=seed)
            late = sorted(goodput(k, rate, rtt, window, 100 * MB) for k in used[12:])
            assert late[len(late) // 2] >= 0.9 * best, used

    def test_first_guess(self):
        """Before any measurement the number is k* of a fast machine: never one stream over a long path."""
        assert StreamCount(0.0003, 4e6).wanted(1) == least_streams(1)
        assert 12 <= StreamCount(0.3, 4e6).wanted(1) <= 24
        assert StreamCount(0.1, 4e6).wanted(1) == 16 > StreamCount(0.09, 4e6).wanted(1)
        assert StreamCount(0.09, 4e6).wanted(8) < StreamCount(0.09, 4e6).wanted(2)
        assert StreamCount(0.3, 50e3).wanted(1) == MOST_SOCKETS

    def test_grows_and_settles(self):
        """On a path that fits the law, the number grows to k* and stays for a while."""
        used = run(10, 6.2e9, 0.103, 2.6 * MB, 2000 * MB)
        needed = 6.2e9 / 8 * 0.103 / (2.6 * MB)
        assert used[0] < needed <= used[-1] <= 3 * needed
        assert used[-3:] == [used[-1]] * 3

    def test_streams_that_have_a_rate_each(self):
        """Over a long path on which each stream is held to a tenth of the rate, and so has a queue of its
        own, there are always enough to keep it full while some recover from a loss.
        """
        count = StreamCount(0.27, 4e6)
        used = []
        for _ in range(24):
            used.append(count.wanted(7))
            carried = min(used[-1], 10) * 7e6
            count.measured(
                StreamTransfer(used[-1], int(carried / 8 * 2), 2.0, 0.27, 1.0, 0.2), 7, 2.0 * len(used)
            )
        assert min(used) == 16

    def test_short_transfers_say_nothing(self):
        """A transfer of less than two round trips changes nothing."""
        count = StreamCount(0.3, 4e6)
        before = count.wanted(1)
        for _ in range(20):
            count.measured(StreamTransfer(before, 10_000, 0.4, 0.3, 1.0), 1, 0.0)
        assert count.wanted(1) == before

    def test_short_path(self):
        """Where one window fills any path, nothing is tried: the number stays at its least."""
        count = StreamCount(0.0003, 4e6)
        for _ in range(50):
            count.measured(StreamTransfer(count.wanted(1), 100_000_000, 0.2, 0.0003, 1.0), 1, 0.0)
        assert count.wanted(1) == least_streams(1)

    def test_new_path(self):
        """When the same number carries much less for long, the search starts again."""
        count = StreamCount(0.1, 4e6)
        for path in ((1e9, 0.1, 2.5 * MB), (1e9, 0.1, 0.2 * MB)):
            run(24, *path, 200 * MB, count=count)
        assert goodput(count.wanted(1), 1e9, 0.1, 0.2 * MB, 200 * MB) >= 0.9 * goodput(
            256, 1e9, 0.1, 0.2 * MB, 200 * MB
        )

    @pytest.mark.parametrize("path", PATHS)
    def test_small_transfers_leave_the_number_alone(self, path):
        """Transfers in which streams run out of bytes change nothing, however unlike each other they are."""
        rtt, rate, window = PATHS[path]
        for seed in range(20):
            used = run(100, rate, rtt, window, 1 * MB, noise=0.9, seed=seed, busy=0.4)
            assert set(used) == {used[0]}

    @pytest.mark.parametrize("path", PATHS)
    def test_steady_run_opens_less_than_a_stream_a_minute(self, path):
        """Two sides that measure for hours, with noise, open one stream a minute at most, and what a search
        tries.
        """
        rtt, rate, window = PATHS[path]
        for seed in range(20):
            used = run(1500, rate, rtt, window, 100 * MB, noise=0.5, seed=seed, pause_s=10.0)
            late = used[30:]
            assert opened(late) <= len(late) * 10.0 / 120.0 + max(late), used

    def test_path_that_becomes_wider(self):
        """Within the hour a number that was enough grows, where more streams carry more now."""
        count = StreamCount(0.1, 4e6)
        run(24, 1e9, 0.1, 2.5 * MB, 500 * MB, count=count)
        used = run(240, 10e9, 0.1, 2.5 * MB, 500 * MB, pause_s=30.0, count=count)
        assert used[-1] > 16
        assert 8 * used[-1] * 2.5 * MB / 0.1 >= 0.7 * 10e9

    def test_share_of_the_sockets(self):
        """All links together stay within the bound on sockets, whatever was measured."""
        for links in (1, 3, 7, 15, 31):
            assert links * most_streams(links) <= MOST_SOCKETS
            used = run(40, 1e12, 0.3, 0.1 * MB, 1000 * MB, links=links)
            assert max(used) <= most_streams(links)

    @settings(deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 300),
                st.integers(0, 10**10),
                st.floats(0, 100),
                st.floats(1e-5, 1),
                st.floats(0, 1),
            ),
            max_size=60,
        ),
        st.integers(1, 40),
    )
    def test_always_in_bounds(self, transfers, links):
        """Whatever is measured, the number stays between its bounds."""
        count = StreamCount(0.1, 4e6)
        for index, (streams, nbytes, seconds, rtt, busy) in enumerate(transfers):
            count.measured(StreamTransfer(streams, nbytes, seconds, rtt, busy), links, 100.0 * index)
            assert 1 <= count.wanted(links) <= most_streams(links)
            assert count.window_bytes > 0
            assert count.rate_bps >= 0

    def test_law(self):
        """k* = rate RTT / W with a quarter of headroom: 1 Gb/s over 300 ms with 3.75 MB windows are 12.5."""
        assert useful_streams(1e9, 0.3, 3.75e6) == 13
        assert useful_streams(1e9, 0.0003, 3.75e6) == 1


class Moving:
    """An engine whose one link sends 20 MB/s while its job runs, with so many busy streams of four."""

    def __init__(self, busy: int) -> None:
        self.busy, self.sent = busy, 0

    def traffic(self, link: int) -> tuple[int, int]:
        self.sent += 2_000_000
        return self.sent, 0

    def stats(self, link: int) -> list[StreamStats]:
        return [StreamStats(i, 0, 0, 0.04, 1, 1.0, 0, 0.0, 0, 9 * (i < self.busy)) for i in range(4)]

    def progress(self, transfer: int) -> JobProgress:
        return JobProgress((), (), (), (), 100.0, 0.0)


@pytest.mark.parametrize(("busy", "wanted"), [(4, 8), (3, 8), (2, 4), (0, 4)])
def test_only_busy_streams_measure(busy: int, wanted: int) -> None:
    """A link whose streams all had more to send gets more; one on which some ran dry keeps its number."""
    link: Any = SimpleNamespace(id=1, rtt_min=0.04, peer_id=b"p" * 20, prior=None)
    counts = StreamCounts(Moving(busy), {1: link}, lambda link, number: asked.append(number))  # type: ignore[arg-type]
    asked: list[int] = []
    counts.links_changed()
    for first in (1000, 2000, 3000):
        job: Any = SimpleNamespace(transfer=first, links=(SELF, 1))
        for tick in range(20):
            counts.tick(100.0 + first + 0.1 * tick, [job])
        counts.tick(100.0 + first + 3.0, [])
    assert asked[-1] == wanted
