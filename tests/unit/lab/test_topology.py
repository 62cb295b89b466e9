"""Topologies: what is read, what it means, what is refused."""

from __future__ import annotations

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.lab.topology import load, parse, shipped


def test_later_tables_override_earlier_ones() -> None:
    """A [[paths]] table holds for the pairs that it names, and the last one that names a pair wins."""
    shape = parse(
        'hosts = ["a", "b", "c"]\n[[paths]]\nrtt_ms = 10\nrate_mbps = 5\n'
        '[[paths]]\nbetween = ["a", "b"]\nrtt_ms = 40\n[[paths]]\nfrom = "a"\nto = "c"\ndelay_ms = 7\n',
        "t",
    )
    assert shape.rtt_ms("a", "b") == shape.rtt_ms("b", "a") == 40
    assert shape.paths["a", "b"].rate_mbps == 5
    assert shape.paths["a", "c"].delay_ms == 7
    assert shape.paths["c", "a"].delay_ms == 5


def test_groups_stand_for_their_hosts() -> None:
    """Between two groups every pair of their hosts is meant, both ways, and no pair inside a group."""
    shape = parse(
        'hosts = ["a1", "a2", "b1"]\n[groups]\na = ["a1", "a2"]\nb = ["b1"]\n'
        '[[paths]]\nbetween = ["a", "b"]\nrtt_ms = 8\n',
        "t",
    )
    assert {pair for pair, path in shape.paths.items() if path.delay_ms} == {
        ("a1", "b1"),
        ("b1", "a1"),
        ("a2", "b1"),
        ("b1", "a2"),
    }


def test_a_rate_is_shared_by_the_pairs_of_one_table() -> None:
    """`shared` gives all pairs of its table one number, those of another table another, and others none."""
    shape = parse(
        'hosts = ["a", "b", "c"]\n[[paths]]\nrate_mbps = 5\n[[paths]]\nfrom = "a"\nshared = true\n'
        '[[paths]]\nfrom = "b"\nshared = true\n[[paths]]\nfrom = "a"\nto = "c"\nloss = 0.1\n',
        "t",
    )
    shared = {pair: path.shared for pair, path in shape.paths.items()}
    assert shared["a", "b"] == shared["a", "c"] != shared["b", "a"] == shared["b", "c"]
    assert 0 not in (shared["a", "b"], shared["b", "a"])
    assert shared["c", "a"] == shared["c", "b"] == 0
    with pytest.raises(ConfigurationError, match="shared is true or false"):
        parse('hosts = ["a", "b"]\n[[paths]]\nshared = 1\n', "t")


def test_rate_is_that_of_the_narrowest_part() -> None:
    """The rate of a pair is the least of path, sender's egress, receiver's ingress and the streams' caps."""
    shape = parse(
        'hosts = ["a", "b"]\n[[nodes]]\nhosts = "a"\negress_mbps = 50\n'
        '[[nodes]]\nhosts = "b"\ningress_mbps = 30\n'
        "[[paths]]\nrate_mbps = 100\nflow_rate_mbps = 4\n",
        "t",
    )
    assert shape.rate_mbps("a", "b") == 30
    assert shape.rate_mbps("a", "b", streams=3) == 12
    assert shape.rate_mbps("b", "a") == 100


def test_the_routers_configuration_is_in_base_units() -> None:
    """Milliseconds become nanoseconds, Mb/s bit/s, kB bytes; hosts are numbered in order."""
    shape = parse(
        'hosts = ["a", "b"]\n[[paths]]\nrtt_ms = 3\nrate_mbps = 1.5\nqueue_kb = 2\nloss = 0.25\n', "t"
    )
    lines = shape.configuration().splitlines()
    assert "host b 10.77.0.2 -" in lines
    path = "delay_ns=1500000 jitter_ns=0 rate_bps=1500000 flow_bps=0 loss=0.25 corrupt=0"
    path += " queue_bytes=2000 shared=0"
    assert f"path 0 1 {path}" in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = 3", "t"),
        ('hosts = ["a"]', "2 to 64"),
        ('hosts = ["a", "a"]', "different"),
        ('hosts = ["a", "B"]', "lower-case"),
        ('hosts = ["a", "b"]\nrtt = 3', "unknown key 'rtt'"),
        ('hosts = ["a", "b"]\n[[paths]]\nrtt = 3', "no setting 'rtt'"),
        ('hosts = ["a", "b"]\n[[paths]]\nloss = 2', "fraction"),
        ('hosts = ["a", "b"]\n[[paths]]\nrate_mbps = "fast"', "number"),
        ('hosts = ["a", "b"]\n[[paths]]\nbetween = ["a", "c"]', "neither a host nor a group"),
        ('hosts = ["a", "b"]\n[sysctl]\n"kernel.panic" = 1', "only net"),
        ("hosts = [", "t"),
        ("hosts = " + "[" * 100_000, "recursion"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    """A topology that cannot work is refused with a sentence that names the topology and the mistake."""
    with pytest.raises(ConfigurationError, match=message) as caught:
        parse(text, "t")
    assert "Topology 't'" in str(caught.value)


@pytest.mark.parametrize("name", shipped())
def test_shipped_topologies_load(name: str) -> None:
    """Each topology in the package is valid, described, and delays every pair."""
    shape = load(name)
    assert shape.description
    assert all(path.delay_ms > 0 for path in shape.paths.values())


def test_clouds_scale_what_was_published() -> None:
    """clouds-4 has the published round-trip times, and single-stream rates as pair rates."""
    shape = load("clouds-4")
    assert shape.rtt_ms("us1", "eu2") == 103
    assert shape.rate_mbps("us1", "eu2") == 210
    assert shape.rate_mbps("eu2", "us1", streams=1) == 21
    assert shape.rate_mbps("asia1", "asia2", streams=1) == 690
    assert shape.rtt_ms("aus1", "aus2") == 0.7


def test_an_unknown_topology_lists_those_there_are() -> None:
    """A wrong name is answered with the right ones."""
    with pytest.raises(ConfigurationError, match="two-300ms"):
        load("nowhere")


def test_hosts_behind_gateways_have_addresses_of_their_own() -> None:
    """Homes use the same addresses inside; gateways behind a carrier's get theirs from it."""
    shape = load("homes")
    assert shape.address("cloud") == "10.77.0.1"
    assert shape.address("desk") == shape.address("strict") == shape.address("mobile") == "192.168.1.100"
    lines = shape.configuration().splitlines()
    gateways = [line.split()[1] for line in lines if line.startswith("gateway ")]
    assert gateways.index("carrier") < gateways.index("tethered")
    tethered = next(line for line in lines if line.startswith("gateway tethered"))
    assert f"external={(100 << 24) + (64 << 16) + (1 << 8) + 2}" in tethered
    assert f"parent={gateways.index('carrier') + 1}" in tethered
    assert any(line.startswith("host desk 192.168.1.100 -") for line in lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[nodes]]\nhosts = "a"\nnat = "full-cone"\n', "MAPPING/FILTERING"),
        ('[[nodes]]\nhosts = "a"\nfamily = "5"\n', "family is one of"),
        ('[gateways.g]\nhosts = ["a"]\nbehind = "h"\n', "which is no gateway"),
        ('[gateways.g]\nhosts = ["a"]\nbehind = "g"\n', "behind itself"),
        ('[gateways.g]\nhosts = ["a"]\n[gateways.h]\nhosts = ["a"]\n', "behind two gateways"),
        ('[gateways.g]\nhosts = ["a"]\nearly_syn = "no"\n', "early_syn"),
        ('[gateways.g]\nhosts = ["a"]\nport_mapping = "upnp"\n', "port_mapping"),
        ('[gateways.g]\nhosts = ["a"]\ntcp_s = 0\n', "tcp_s"),
        ('[gateways.g]\nhosts = ["a"]\nspeed = 1\n', "'speed'"),
        ('[[nodes]]\nhosts = "a"\nfamily = "6"\n[gateways.g]\nhosts = ["a"]\n', "has no IPv4"),
    ],
)
def test_impossible_gateways_are_refused(text: str, said: str) -> None:
    """Each mistake about a gateway is one sentence that names it."""
    with pytest.raises(ConfigurationError, match=said):
        parse('hosts = ["a", "b"]\n' + text, "t")
