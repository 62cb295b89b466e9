"""Sources and networks: who counts as one."""

from __future__ import annotations

import pytest

from p2pavg.membership.table.throttle import Throttle
from p2pavg.networks import is_private, is_public, network_of, source_of


def test_a_64_of_ipv6_is_one_source() -> None:
    """Addresses of one /64, of which anybody has 2^64, share one budget, however they are written."""
    throttle = Throttle(rate=1.0, burst=5.0)
    hosts = [f"2001:db8:0:1::{n:x}" for n in range(1, 50)] + ["2001:db8:0:1:5:6:7:8", "2001:db8::1:0:0:0:9"]
    assert sum(throttle.admits(source_of(host), 0.0) for host in hosts) == 5
    assert throttle.admits(source_of("2001:db8:0:2::1"), 0.0)


def test_an_ipv4_address_is_one_source_however_it_is_written() -> None:
    """Written as IPv4, mapped into IPv6 or behind NAT64, an address is one source; its neighbour another."""
    written = ["192.0.2.7", "::ffff:192.0.2.7", "::ffff:c000:207", "64:ff9b::192.0.2.7"]
    assert {source_of(host) for host in written} == {"192.0.2.7"}
    assert {network_of(host) for host in written} == {"192.0.2.0/24"}
    assert source_of("192.0.2.8") != source_of("192.0.2.7")


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ("192.0.2.1", "192.0.2.254", "192.0.3.1"),
        ("100.64.0.1", "100.64.0.9", "100.64.1.1"),
        ("2001:db8:5::1", "2001:db8:5:ffff::1", "2001:db8:6::1"),
        ("fe80::1%eth0", "fe80::2%eth1", "fe81::1"),
    ],
)
def test_a_network_is_what_one_small_owner_gets(one: str, same: str, other: str) -> None:
    """A /24 of IPv4, those of carriers included, or a /48 of IPv6 is one network."""
    assert network_of(one) == network_of(same) != network_of(other)


def test_shared_and_private_addresses_are_not_public() -> None:
    """Strangers may have an address that carriers share, which is neither private nor one of the internet."""
    shared, private, public = "100.64.0.1", "10.1.2.3", "8.8.8.8"
    assert [is_public(host) for host in (shared, private, public, "peer")] == [False, False, True, False]
    assert [is_private(host) for host in (shared, private, public, "peer")] == [False, True, False, False]
    assert is_private("::ffff:10.1.2.3")
    assert is_private("fd00::1")
    assert not is_private("2001:db8::1")


def test_what_is_no_address_counts_for_itself() -> None:
    """A host name, or nonsense, is a source and a network of its own, and raises nothing."""
    for name in ("peer.example.org", "", "1.2.3", "zz::1"):
        assert source_of(name) == network_of(name) == name
