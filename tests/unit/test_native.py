"""The one door to compiled code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg import native

SCRIPT = """
import numpy as np
from p2pavg import codecs, native
assert not native.available() and native.cuda() is None
try:
    native.module()
except RuntimeError as error:
    print(error)
data = np.zeros(codecs.get("bf16").encoded_size(2), np.uint8)
codecs.get("bf16").encode(np.ones(2, np.float32), data, 1.0)
print(data.tobytes().hex(), native.crc32(data))
"""


def test_the_environment_forces_the_twin() -> None:
    """With P2PAVG_NATIVE=0 nothing compiled is loaded, and codecs and checksums still work."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "P2PAVG_NATIVE": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "p2pavg was installed without its native module; build it with `make native`.",
        f"803f803f {zlib.crc32(bytes.fromhex('803f803f'))}",
    ]


@settings(deadline=None)
@given(
    piece=st.binary(max_size=300),
    times=st.integers(1, 8),
    before=st.integers(0, 2**32 - 1),
    cut=st.integers(0, 2400),
)
def test_crc32_is_that_of_zlib(piece: bytes, times: int, before: int, cut: int) -> None:
    """Checksums equal zlib's for every length, start value and way to cut the data."""
    data = times * piece
    assert native.crc32(data, before) == zlib.crc32(data, before)
    assert native.crc32(data[cut:], native.crc32(data[:cut], before)) == zlib.crc32(data, before)


@pytest.mark.skipif(not native.available(), reason="needs the native module")
def test_an_unknown_instruction_set_is_not_selected() -> None:
    """Selecting what this machine lacks fails and changes nothing."""
    before = native.module().isa()
    assert not native.module().select_isa("mmx")
    assert native.module().isa() == before


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module in the place of `p2pavg._cuda`."""
    module = types.ModuleType("p2pavg._cuda")
    monkeypatch.setitem(sys.modules, "p2pavg._cuda", module)
    native.cuda.cache_clear()
    yield module
    native.cuda.cache_clear()


@pytest.mark.parametrize(("driver", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_a_broken_driver_is_told_once(
    driver: bool,
    level: int,
    fake_cuda: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """When CUDA does not work there is no CUDA module and one log line: a warning where a driver is."""
    monkeypatch.setattr(fake_cuda, "problem", lambda: "the driver is too old", raising=False)
    monkeypatch.setattr(native, "_NVIDIA", tmp_path if driver else tmp_path / "absent")
    with caplog.at_level(logging.INFO, "p2pavg.native"):
        assert native.cuda() is None
        assert native.cuda() is None
    assert [record.levelno for record in caplog.records] == [level]
    assert "the driver is too old" in caplog.text


def test_a_working_device_is_used(fake_cuda: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a problem the module is returned."""
    monkeypatch.setattr(fake_cuda, "problem", lambda: "", raising=False)
    assert native.cuda() is fake_cuda
