"""How `make wheel` and `python -m wheels.bare` read what they make."""

from __future__ import annotations

import pytest

from wheels import bare
from wheels.__main__ import glibc


@pytest.mark.parametrize(
    ("tags", "oldest"),
    [
        ("manylinux2014_x86_64.manylinux_2_17_x86_64", (2, 17)),
        ("manylinux_2_34_aarch64", (2, 34)),
        ("manylinux_2_27_x86_64.manylinux_2_28_x86_64", (2, 27)),
        ("linux_x86_64", None),
    ],
)
def test_a_wheels_name_tells_the_oldest_glibc(tags: str, oldest: tuple[int, int] | None) -> None:
    """As auditwheel wrote it; a wheel that was not audited tells nothing."""
    assert glibc(f"p2pavg-0.1.0-cp312-abi3-{tags}.whl") == oldest


def test_what_the_tests_are_run_with_is_what_developers_have() -> None:
    """Plugins that the configuration of pytest needs are among it."""
    wanted = bare.testing()
    for name in (
        "pytest>=",
        "pytest-asyncio",
        "pytest-timeout",
        "pytest-rerunfailures",
        "pytest-xdist",
        "hypothesis",
    ):
        assert any(one.startswith(name) for one in wanted), name


def test_a_wheel_is_tried_with_each_python_that_it_fits() -> None:
    """The stable ABI fits all later ones."""
    assert list(bare.fitting("p2pavg-0.1.0-cp311-cp311-linux_x86_64.whl")) == [11]
    assert list(bare.fitting("p2pavg-0.1.0-cp312-abi3-linux_x86_64.whl"))[:3] == [12, 13, 14]
