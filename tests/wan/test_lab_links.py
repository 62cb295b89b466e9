"""The lab does what its topology says: delays, rates, caps, loss, order, partitions. Rates count IP bytes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from p2pavg.lab import Lab, Topology, load, parse, shipped

TCP_SHARE = 1448 / 1500  # of the IP bytes of a full segment, its payload
Wire = Callable[[Lab], Any]


def two(paths: str = "", more: str = "") -> Topology:
    return parse(f'hosts = ["a", "b"]\n{more}\n[[paths]]\n{paths}', "two")


@pytest.mark.parametrize("name", shipped())
def test_round_trip_time_is_that_of_the_topology(name: str, traffic: Wire) -> None:
    """The round trip between two hosts is within 2 % or 0.3 ms of the topology's."""
    with Lab(name) as lab:
        wire = traffic(lab)
        seen = {}
        for a, b in lab.topology.paths:
            truth = lab.topology.rtt_ms(a, b)
            if truth not in seen and not lab.topology.gateway_of(b):  # nobody gets in from outside there
                often = max(5, min(60, int(600 / truth)))  # one that no program made wait is among them
                seen[truth] = wire.on_time(lambda a=a, b=b, n=often: wire.rtt_ms(a, b, n))
        for truth, measured in seen.items():
            assert measured == pytest.approx(truth, rel=0.02, abs=0.3)


def test_udp_gets_the_rate_of_the_path(traffic: Wire) -> None:
    """Datagrams offered at 1.3 times the rate of a path arrive at its rate within 3 %, slow and fast paths at
    the same time.
    """
    rates = {"b": 5, "c": 50, "d": 200}
    paths = [
        f'[[paths]]\nbetween = ["a", "{host}"]\nrtt_ms = 20\nrate_mbps = {mbps}\nqueue_kb = {40 * mbps}\n'
        for host, mbps in rates.items()
    ]
    with Lab(parse('hosts = ["a", "b", "c", "d"]\n[[paths]]\nrtt_ms = 20\n' + "".join(paths), "udp")) as lab:
        wire = traffic(lab)

        def measure() -> dict[str, float]:
            with ExitStack() as stack:
                sinks = {host: stack.enter_context(wire.server(host, "udp-sink", 9)) for host in rates}
                senders = {
                    host: lab.spawn(
                        "a",
                        wire.argv("udp-send", lab.address(host), 9, 1.3 * mbps, 3, 1200),
                        stdout=subprocess.PIPE,
                    )
                    for host, mbps in rates.items()
                }
                got = {host: wire.result(sink) for host, sink in sinks.items()}
                sent = {host: wire.result(sender) for host, sender in senders.items()}
            if any(sent[host]["packets"] * 1228 * 8e-6 / 3 < 1.1 * mbps for host, mbps in rates.items()):
                pytest.skip("the machine is too busy to offer more than the paths carry")
            return {host: one["bytes"] * 8e-6 / one["seconds"] for host, one in got.items()}

        assert wire.on_time(measure) == pytest.approx(rates, rel=0.03)


@pytest.mark.parametrize(("mbps", "rtt_ms"), [(1000, 20), (500, 100)])
def test_ten_tcp_streams_get_the_rate_of_the_path(mbps: float, rtt_ms: float, traffic: Wire) -> None:
    """Ten TCP streams together get the rate of a path within 3 %, headers counted."""
    with Lab(two(f"rtt_ms = {rtt_ms}\nrate_mbps = {mbps}")) as lab:
        wire = traffic(lab)
        got = wire.on_time(lambda: wire.tcp_mbps([("a", "b")], 10, skip_s=3, seconds=4)[0]["mbps"])
        assert got / TCP_SHARE == pytest.approx(mbps, rel=0.03)


def test_hosts_behind_one_uplink_share_its_rate(traffic: Wire) -> None:
    """Ten streams from each of two hosts get together what the table of both allows, within 3 %."""
    shape = parse(
        'hosts = ["a", "b", "c"]\n[[paths]]\nrtt_ms = 20\n[[paths]]\nfrom = ["a", "b"]\nto = "c"\n'
        "rate_mbps = 100\nshared = true",
        "site",
    )
    with Lab(shape) as lab:
        wire = traffic(lab)
        pairs = [("a", "c"), ("b", "c")]
        got = wire.on_time(lambda: wire.tcp_mbps(pairs, 10, skip_s=3, seconds=4))
        assert sum(each["mbps"] for each in got) / TCP_SHARE == pytest.approx(100, rel=0.03)


@pytest.mark.parametrize("streams", [1, 4])
def test_each_stream_gets_the_rate_of_a_flow(streams: int, traffic: Wire) -> None:
    """With a cap per flow, k streams get k times the cap within 5 %, and none more than it."""
    with Lab(two("rtt_ms = 20\nrate_mbps = 1000\nflow_rate_mbps = 40")) as lab:
        wire = traffic(lab)
        got = wire.on_time(lambda: wire.tcp_mbps([("a", "b")], streams, skip_s=2, seconds=3)[0])
        assert got["mbps"] / TCP_SHARE == pytest.approx(40 * streams, rel=0.05)
        assert max(got["per_stream"]) / TCP_SHARE < 40 * 1.03


def test_a_stream_over_a_long_path_is_limited_by_the_kernels_window(traffic: Wire) -> None:
    """Without a cap per flow, one stream over 300 ms gets most of a window of 4 MB per round trip."""
    shape = parse(
        'hosts = ["a", "b"]\n[sysctl]\n"net.ipv4.tcp_wmem" = "4096 16384 4194304"\n'
        '"net.ipv4.tcp_congestion_control" = "reno"\n[[paths]]\nrtt_ms = 300\nrate_mbps = 1000',
        "window",
    )
    with Lab(shape) as lab:
        wire = traffic(lab)
        got = wire.on_time(lambda: wire.tcp_mbps([("a", "b")], 1, skip_s=6, seconds=4)[0]["mbps"])
        assert 0.6 * 4.194e6 * 8e-6 / 0.3 < got < 1.0 * 4.194e6 * 8e-6 / 0.3


@pytest.mark.parametrize("loss", [0.01, 0.1])
def test_datagrams_are_lost_at_the_loss_rate(loss: float, traffic: Wire) -> None:
    """Of 20 000 datagrams the share lost is the loss rate within four standard deviations."""
    with Lab(two(f"rtt_ms = 2\nloss = {loss}")) as lab:
        wire = traffic(lab)
        with wire.server("b", "udp-sink", 9) as sink:
            sent = wire.client("a", "udp-send", lab.address("b"), 9, 60, 20000 * 428 * 8e-6 / 60, 400)[
                "packets"
            ]
            got = wire.result(sink)
        counters = lab.stats().paths["a", "b"]
        deviation = (loss * (1 - loss) / sent) ** 0.5
        assert counters.lost_packets / counters.sent_packets == pytest.approx(loss, abs=4 * deviation)
        assert got["packets"] == counters.delivered_packets
        assert got["packets"] + counters.lost_packets == sent


def thirty_megabytes(lab: Lab, traffic: Wire) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what a says it sent to b over three TCP streams, what b says it got)."""
    wire = traffic(lab)
    with wire.server("b", "tcp-sink", 5000, 3, 0, 0) as sink:
        sent = wire.client("a", "tcp-send", lab.address("b"), 5000, 3, 10)
        return sent, wire.result(sink)


def test_loss_hits_single_segments_of_tcp(traffic: Wire) -> None:
    """Loss is drawn per MTU segment, inside super-packets too, and TCP's data arrive intact all the same."""
    loss = 0.02
    with Lab(two(f"rtt_ms = 4\nloss = {loss}")) as lab:
        sent, got = thirty_megabytes(lab, traffic)
        counters = lab.stats().paths["a", "b"]
        assert got["bytes"] == 30_000_000
        assert got["digests"] == sent["digests"]
        assert counters.sent_packets > 30_000_000 / 1448
        deviation = (loss * (1 - loss) / counters.sent_packets) ** 0.5
        assert counters.lost_packets / counters.sent_packets == pytest.approx(loss, abs=4 * deviation)


def test_corruption_passes_the_checksum(traffic: Wire) -> None:
    """A share of TCP's segments is damaged as the topology says; all arrive, and the bytes are wrong."""
    corrupt = 0.002
    with Lab(two(f"rtt_ms = 4\ncorrupt = {corrupt}")) as lab:
        sent, got = thirty_megabytes(lab, traffic)
        counters = lab.stats().paths["a", "b"]
        assert got["bytes"] == 30_000_000
        assert got["digests"] != sent["digests"]
        assert 0 < counters.corrupted_packets / counters.sent_packets < 1.5 * corrupt


def test_no_reordering_inside_a_flow(traffic: Wire) -> None:
    """Jitter of many packet times, and a delay that shrinks while packets fly, never reorder a flow."""
    with Lab(two("rtt_ms = 60\njitter_ms = 20")) as lab:
        wire = traffic(lab)
        with wire.server("b", "udp-sink", 9) as sink:
            sender = wire.lab.spawn("a", wire.argv("udp-send", lab.address("b"), 9, 40, 2, 400))
            lab.set("a", "b", delay_ms=1)
            assert sender.wait(30) == 0
            got = wire.result(sink)
        assert got["packets"] > 10_000
        assert got["reordered"] == 0


def test_data_are_intact_through_small_queues(traffic: Wire) -> None:
    """Super-packets that a full queue cuts in two arrive as a correct stream of bytes."""
    with Lab(two("rtt_ms = 10\nrate_mbps = 200\nqueue_kb = 30\njitter_ms = 3")) as lab:
        wire = traffic(lab)
        with wire.server("b", "tcp-sink", 5000, 4, 0, 0) as sink:
            sent = wire.client("a", "tcp-send", lab.address("b"), 5000, 4, 8)
            got = wire.result(sink)
        assert got["digests"] == sent["digests"]
        assert lab.stats().paths["a", "b"].dropped_packets > 0


def test_a_full_queue_adds_its_own_delay_and_no_more(traffic: Wire) -> None:
    """A queue of 125 kB before 10 Mb/s makes the round trip longer by 100 ms, no more."""
    with Lab(two("rtt_ms = 10\nrate_mbps = 10\nqueue_kb = 125")) as lab:
        wire = traffic(lab)

        def measure() -> float:
            with wire.server("b", "echo", 7), wire.server("b", "udp-sink", 9):
                before = lab.stats()
                flood = lab.spawn("a", wire.argv("udp-send", lab.address("b"), 9, 20, 4, 1200))
                while not lab.stats().since(before).paths["a", "b"].dropped_packets:  # the queue is full
                    assert flood.poll() is None
                rtts = wire.client("a", "ping", lab.address("b"), 7, 10, 1000)["rtts"]
                flood.kill()
            return sorted(rtts)[len(rtts) // 2]  # the longest one may have waited for a CPU

        assert 90 < wire.on_time(measure) < 10 + 100 + 5


def test_egress_and_ingress_are_shared_by_all_paths(traffic: Wire) -> None:
    """Two senders share the ingress of one host, and one sender's egress is shared by two receivers."""
    caps = "[[nodes]]\negress_mbps = 60\ningress_mbps = 100\n[[paths]]\nrtt_ms = 10"
    shape = parse(f'hosts = ["a", "b", "c"]\n{caps}', "caps")
    with Lab(shape) as lab:
        wire = traffic(lab)
        into = wire.on_time(lambda: wire.tcp_mbps([("a", "c"), ("b", "c")], 4))
        assert sum(one["mbps"] for one in into) / TCP_SHARE == pytest.approx(100, rel=0.05)
        out = wire.on_time(lambda: wire.tcp_mbps([("a", "b"), ("a", "c")], 4))
        assert sum(one["mbps"] for one in out) / TCP_SHARE == pytest.approx(60, rel=0.05)


def test_links_change_while_running(traffic: Wire) -> None:
    """Delay and rate set on a running lab hold for what is sent from then on."""
    with Lab(two("rtt_ms = 10\nrate_mbps = 100")) as lab:
        wire = traffic(lab)
        assert wire.rtt_ms("a", "b", 40) == pytest.approx(10, abs=0.5)
        lab.set("a", "b", both=True, delay_ms=40)
        assert wire.rtt_ms("a", "b", 15) == pytest.approx(80, rel=0.02)
        lab.set("a", "b", rate_mbps=20)
        got = wire.on_time(lambda: wire.tcp_mbps([("a", "b")], 4)[0]["mbps"])
        assert got / TCP_SHARE == pytest.approx(20, rel=0.05)
        lab.set("*", "*", rate_mbps=0)
        lab.set_node("b", ingress_mbps=30)
        got = wire.on_time(lambda: wire.tcp_mbps([("a", "b")], 4)[0]["mbps"])
        assert got / TCP_SHARE == pytest.approx(30, rel=0.05)


def test_a_path_is_cut_one_way_and_both_ways(traffic: Wire) -> None:
    """Down one way loses what goes that way only; down is counted, and up again works."""
    with Lab("lan-4") as lab:
        wire = traffic(lab)

        def answered(src: str, dst: str) -> bool:
            with wire.server(dst, "echo", 7):
                return bool(wire.client(src, "ping", lab.address(dst), 7, 2, 100)["rtts"])

        lab.set("b", "a", down=True)
        before = lab.stats()
        assert not answered("a", "b")
        passed = lab.stats().since(before).paths
        assert passed["a", "b"].delivered_packets == 2
        assert passed["b", "a"].cut_packets == 2
        assert answered("a", "c")
        lab.set("a", "*", both=True, down=True)
        assert not answered("c", "a")
        assert answered("b", "c")
        lab.set("*", "*", down=False)
        assert answered("a", "b")


def test_one_flow_is_cut_and_others_go_on(traffic: Wire) -> None:
    """Cutting one flow by its ports leaves the other flows of the same pair alone, until it is restored."""
    with Lab("lan-4") as lab:
        wire = traffic(lab)
        with wire.server("b", "echo", 7):

            def answers(sport: int) -> int:
                return len(wire.client("a", "ping", lab.address("b"), 7, 2, 100, sport)["rtts"])

            assert answers(4001) == 2
            lab.cut_flow("a", "b", sport=4001)
            assert answers(4001) == 0
            assert answers(4002) == 2
            lab.restore_flows("a", "b")
            assert answers(4001) == 2


@pytest.mark.slow
def test_the_router_carries_five_gigabits_through_one_pair(traffic: Wire) -> None:
    """Without caps, one pair gets at least 5 Gb/s of TCP through the router."""
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip("the machine is busy with other work")
    with Lab(two("rtt_ms = 0")) as lab:
        wire = traffic(lab)
        best = max(wire.tcp_mbps([("a", "b")], 2, skip_s=1, seconds=2)[0]["mbps"] for _ in range(3))
        assert best >= 5000


def test_shipped_topologies_are_those_promised() -> None:
    """The package has the topologies that the documents name."""
    assert {
        "two-300ms",
        "two-300ms-flowcap",
        "clouds-4",
        "six-100ms",
        "join-4",
        "lan-4",
        "home-4",
        "mixed",
    } <= set(shipped())
    assert all(load(name).description for name in shipped())
