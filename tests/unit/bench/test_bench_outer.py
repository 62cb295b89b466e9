"""The arithmetic of `bench outer`."""

from __future__ import annotations

import pytest

from p2pavg.bench.outer.model import Bytes, Sleeper, width_of
from p2pavg.bench.outer.verb import Runs, bytes_of_a_round, interval, lines


def test_bytes_of_a_round_are_those_of_contributions_and_results() -> None:
    """Four peers send three quarters of each: 3 bytes a value in fp16, 1.125 in int4; one sends none."""
    assert bytes_of_a_round(1000, 4, "fp16") == pytest.approx(3000, rel=0.01)
    assert bytes_of_a_round(1000, 4, "int4") == pytest.approx(1125, rel=0.01)
    assert bytes_of_a_round(1000, 1, "int8") == 0


def test_the_interval_is_students() -> None:
    """Of five values it is 2.776 standard errors to each side; of one there is none."""
    low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0]) or (0.0, 0.0)
    assert (low, high) == pytest.approx((3 - 2.776 * 0.70711, 3 + 2.776 * 0.70711), abs=1e-3)
    assert interval([1.0]) is None


def test_losses_are_compared_seed_by_seed() -> None:
    """Each with the other training of its own seed; what learned nothing has none."""
    ours, theirs = (Runs([{"loss": loss} for loss in losses]) for losses in ((2.2, 2.0), (2.0, 2.5)))
    assert ours.above(theirs) == pytest.approx([0.1, -0.2])
    assert ours.mean("loss") == pytest.approx(2.1)
    assert Runs([{"loss": None}]).above(theirs) == []
    assert Runs().mean("loss") is None


def test_models_have_about_the_parameters_asked_for() -> None:
    """A language model at most, one that sleeps in pieces of equal size."""
    for wanted in (16_000, 100_000, 1_000_000):
        made = sum(param.numel() for param in Bytes(width_of(wanted)).parameters())
        assert 0.5 * wanted < made <= wanted
    sizes = [param.numel() for param in Sleeper(200_000, 0.0).model.parameters()]
    assert len(set(sizes)) == 1
    assert sum(sizes) == pytest.approx(200_000, rel=0.05)


def test_a_peer_alone_is_told_without_bytes() -> None:
    """There is nothing to compare, and nothing is divided by zero."""
    result = {
        "peers": 1,
        "parameters": 10,
        "inner_steps": 1,
        "compression": "int8",
        "tokens": 64,
        "loss": 2.0,
        "loss_data_parallel": None,
        "excess": None,
        "excess_interval": None,
        "bytes_per_peer": 0.0,
        "bytes_of_data_parallel": 0.0,
        "utilisation": 0.9,
        "bit_identical": True,
    }
    told = lines(result)
    assert not any("MB" in line for line in told)
    assert "computes 90.0%" in told[-1]
