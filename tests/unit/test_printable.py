"""Numbers, sizes and ends of processes as people read them."""

from __future__ import annotations

import pytest

from p2pavg.printable import figure, size


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (310, "310 B"),
        (4240, "4.24 kB"),
        (42_400, "42.4 kB"),
        (999_600, "1 MB"),  # and not 1e+03 kB
        (3_020_000, "3.02 MB"),
        (2e9, "2 GB"),
        (5e12, "5 TB"),
        (123_456e12, "123,456 TB"),
    ],
)
def test_a_size_in_its_unit(nbytes: float, words: str) -> None:
    """Small sizes are not zero of a large unit, and none is a power of ten."""
    assert size(nbytes) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(68_271.3, "68,271"), (1234.5, "1,234"), (123.45, "123.5"), (4.2, "4.2"), (0.0, "0"), (999.96, "1000")],
)
def test_a_figure_is_no_power_of_ten(value: float, words: str) -> None:
    """Thousands are grouped; what is small keeps its digits."""
    assert figure(value, 4) == words
