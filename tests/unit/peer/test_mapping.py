"""When a gateway is asked for a port, and what is said where there is none."""

from __future__ import annotations

import logging

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.membership.reach.leases import GatewayRefusal, Mapped
from p2pavg.membership.reach.lessors import Lessors
from p2pavg.peer import mapping
from p2pavg.peer.mapping import Mapping, is_of_use
from p2pavg.peer.settings import Settings


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine behind a home router."""
    monkeypatch.setattr(mapping, "primary_address", lambda: "192.168.1.5")
    monkeypatch.setattr(mapping, "default_gateway", lambda: "192.168.1.1")


@pytest.mark.parametrize(
    ("options", "maps"),
    [({}, False), ({"map_port": True}, True), ({"map_port": False}, False)],
)
def test_an_open_run_maps_a_port_only_when_asked_to(options: dict[str, bool], maps: bool) -> None:
    """None stands for closed runs alone."""
    assert Settings("run", listen="127.0.0.1:0", **options).maps_port is maps


def test_map_port_is_a_truth_value() -> None:
    """Anything else is refused by name."""
    with pytest.raises(ConfigurationError, match="map_port must be True, False or None"):
        Settings("run", listen="127.0.0.1:0", map_port="yes")  # type: ignore[arg-type]


@pytest.mark.usefixtures("home")
def test_a_private_address_behind_a_gateway_is_worth_a_question() -> None:
    """Behind a router yes; on loopback no, and who wishes it there is told."""
    assert is_of_use("0.0.0.0", wished=False)
    assert not is_of_use("127.0.0.1", wished=False)
    with pytest.raises(ConfigurationError, match="loopback"):
        is_of_use("127.0.0.1", wished=True)


def test_no_gateway(monkeypatch: pytest.MonkeyPatch, home: None) -> None:
    """Without a default route a wish is refused in one sentence; a public address needs no mapping."""
    monkeypatch.setattr(mapping, "default_gateway", lambda: None)
    assert not is_of_use("::", wished=False)
    with pytest.raises(ConfigurationError, match="map_port=True has no gateway to ask"):
        is_of_use("::", wished=True)
    monkeypatch.setattr(mapping, "primary_address", lambda: "8.8.8.8")
    assert not is_of_use("::", wished=True)


@pytest.mark.parametrize("wished", [True, False])
async def test_a_refusal_is_told_to_who_wished(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wished: bool
) -> None:
    """A gateway that refuses is a warning with map_port=True, and silence else; training goes on."""

    async def lease(self: Lessors, *args: object) -> Mapped:
        raise GatewayRefusal("the gateway 192.168.1.1 has no more ports to give")

    monkeypatch.setattr(Lessors, "lease", lease)
    mapped = Mapping(5, lambda where: None, wished=wished)
    mapped.start()
    await mapped.settled()
    await mapped.close()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("no more ports to give; open or forward" in line for line in warned) is wished
