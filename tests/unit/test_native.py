"""The one door to compiled code."""

from __future__ import annotations

import ast
import importlib
import logging
import os
import re
import subprocess
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg import codecs, native

CHECKOUT = pytest.mark.skipif(native.sources() is None, reason="an installation has no sources")
SCRIPT = """
import numpy as np
from p2pavg import codecs, native
assert not native.available() and native.cuda() is None
try:
    native.compiled.isa()
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
    before = native.compiled.isa()
    assert not native.compiled.select_isa("mmx")
    assert native.compiled.isa() == before


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module in the place of `p2pavg._cuda`."""
    module = types.ModuleType("p2pavg._cuda")
    module.SOURCES = native.sources()  # type: ignore[attr-defined]
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
    monkeypatch.setattr(native, "NVIDIA", tmp_path if driver else tmp_path / "absent")
    with caplog.at_level(logging.INFO, "p2pavg.native"):
        assert native.cuda() is None
        assert native.cuda() is None
    assert [record.levelno for record in caplog.records] == [level]
    assert "the driver is too old" in caplog.text


def test_a_working_device_is_used(fake_cuda: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a problem the module is returned."""
    monkeypatch.setattr(fake_cuda, "problem", lambda: "", raising=False)
    assert native.cuda() is fake_cuda


@CHECKOUT
def test_a_cuda_module_of_other_sources_is_not_used(
    fake_cuda: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Built before the last change of csrc/, the CUDA module is left alone, and the command is named."""
    monkeypatch.setattr(fake_cuda, "problem", lambda: "", raising=False)
    monkeypatch.setattr(fake_cuda, "SOURCES", "0" * 64)
    assert native.cuda() is None
    assert "make native" in caplog.text


STALE = """
import sys, types
sys.modules["p2pavg._native"] = types.ModuleType("p2pavg._native")
import numpy as np
from p2pavg import codecs, native
from p2pavg.cli.machine_checks import modules
assert native.stale() and not native.available()
assert "make native" in modules().advice
data = np.zeros(codecs.get("bf16").encoded_size(2), np.uint8)
codecs.get("bf16").encode(np.ones(2, np.float32), data, 1.0)
print(data.tobytes().hex())
"""


@CHECKOUT
def test_a_module_of_other_sources_is_not_used() -> None:
    """A native module from before an update of the checkout: the twin works in its place, and a warning and
    the doctor name the command that builds it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "P2PAVG_NATIVE"}
    done = subprocess.run(
        [sys.executable, "-c", STALE], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "803f803f\n"
    assert "run 'make native'" in done.stderr


@CHECKOUT
@pytest.mark.skipif(not native.available(), reason="needs the native module")
def test_the_build_and_the_package_agree_on_the_sources() -> None:
    """CMake and Python make the same digest of the same files."""
    assert native.sources() == native.compiled.SOURCES
    assert not native.stale()


def stubbed(name: str) -> dict[str, ast.FunctionDef | None]:
    """What a stub declares, members of classes as "Class.member"; functions with their parameters."""
    tree = ast.parse((Path(native.__file__).parent / f"{name}.pyi").read_text())
    found: dict[str, ast.FunctionDef | None] = {}
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = None
            case ast.FunctionDef():
                found[node.name] = node
            case ast.ClassDef():
                found[node.name] = None
                members = [member for member in node.body if isinstance(member, ast.FunctionDef)]
                found |= {f"{node.name}.{member.name}": member for member in members}
    return found


def built(module: types.ModuleType) -> dict[str, ast.FunctionDef | None]:
    """The same of a compiled module, from the signatures that it carries."""
    holders: dict[str, object] = {"": module}
    holders |= {f"{name}.": kind for name, kind in vars(module).items() if isinstance(kind, type)}
    found: dict[str, ast.FunctionDef | None] = {}
    for prefix, holder in holders.items():
        for name in dir(holder):
            signature = getattr(getattr(holder, name), "__nb_signature__", None)
            if signature is not None:
                text = re.sub(r"ndarray\[[^\]]*\]", "ndarray", signature[0][0])
                text = re.sub(r"\\\d+", "None", text)  # defaults, by number
                function = ast.parse(text + ": ...").body[0]
                assert isinstance(function, ast.FunctionDef)
                found[prefix + name] = function
            elif not name.startswith("__"):
                found[prefix + name] = None
    return found


def parameters(function: ast.FunctionDef) -> tuple[list[str], int]:
    """Names, and how many have a default."""
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args)], len(function.args.defaults)


@pytest.mark.parametrize("name", ["_native", "_cuda"])
def test_the_stub_is_what_was_built(name: str) -> None:
    """A stub declares exactly the names that its module has, and each function's parameters."""
    try:
        module = importlib.import_module(f"p2pavg.{name}")
    except ImportError:
        pytest.skip(f"{name} was not built")
    told, has = stubbed(name), built(module)
    assert told.keys() == has.keys()
    for what, function in has.items():
        stub = told[what]
        assert (function is None) == (stub is None), what
        if function is None or stub is None:
            continue
        (names, defaults), (declared, with_default) = parameters(function), parameters(stub)
        assert defaults == with_default, what
        assert [a if re.fullmatch(r"arg\d*", a) else b for a, b in zip(names, declared, strict=True)] == names


@pytest.mark.skipif(not native.available(), reason="needs the native module")
def test_codecs_have_the_same_wire_ids_in_every_implementation() -> None:
    """The native module numbers the built-in codecs as the Python twin does."""
    assert dict(enumerate(native.compiled.CODECS)) == {
        wire_id: name for name, wire_id in codecs.WIRE_IDS.items()
    }
