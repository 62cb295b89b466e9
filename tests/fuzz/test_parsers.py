"""Every parser takes any bytes, and seeds with a few bytes changed, in one documented way."""

from __future__ import annotations

import functools
import tracemalloc

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pavg.rounds.loop import handover
from p2pavg.rounds.protocol import wire
from tests.fuzz.targets import MOST_BYTES_PER_BYTE, SLACK_BYTES, TARGETS, Target


@functools.cache
def seeds_of(name: str) -> list[bytes]:
    """Made once: some hold fresh keys, and what hypothesis draws from must not change under it."""
    return TARGETS[name].seeds()


@st.composite
def inputs(draw: st.DrawFn, target: Target) -> bytes:
    """Bytes from nowhere, or a seed that was changed, cut or grown."""
    seeds = seeds_of(target.name)
    if draw(st.booleans()):
        return draw(st.binary(max_size=400))
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["set", "flip", "cut", "put", "repeat"])):
            case "set" if data:
                data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xC0, 0xDD, 0xDF, 0xFF]))
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "put":
                data[at:at] = draw(st.binary(min_size=1, max_size=12))
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_understood(name: str) -> None:
    """The seeds of a target are what its parser is there for: they pass without an error."""
    for seed in TARGETS[name].seeds():
        TARGETS[name].parse(seed)


@pytest.mark.parametrize("name", ["round", "handover"])
def test_every_kind_of_message_is_a_seed(name: str) -> None:
    """Whoever adds a message to the rounds or to handovers gives the fuzzers one."""
    kinds = {"round": wire.NAMES, "handover": handover.KINDS}[name]
    assert {msgpack.unpackb(seed)["t"] for seed in TARGETS[name].seeds()} == kinds


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes_are_taken(name: str, data: st.DataObject) -> None:
    """Whatever comes, the parser returns or raises what it documents."""
    TARGETS[name].parse(data.draw(inputs(TARGETS[name])))


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 items that does not come
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 60_000,
        b"\x81\xa1t" * 20_000,
        b"\xdc\xff\xff" + b"\xc0" * 65_535,
    ],
    ids=["array", "map", "binary", "deep", "deep-maps", "many"],
)
@pytest.mark.parametrize("name", TARGETS)
def test_declared_sizes_cost_nothing(name: str, bomb: bytes) -> None:
    """Bytes that promise more than they hold, or nest deeply, take memory in proportion to what came."""
    target = TARGETS[name]
    target.parse(bomb)
    tracemalloc.start()
    try:
        target.parse(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < SLACK_BYTES + MOST_BYTES_PER_BYTE * len(bomb)
