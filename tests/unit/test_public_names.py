from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import p2pavg

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", p2pavg.__all__)
def test_public_names_are_there(name):
    """Each name in __all__ can be imported from p2pavg."""
    assert getattr(p2pavg, name) is not None


@pytest.mark.parametrize(
    "name", ["Codec", "CollaborativeOptimizer", "Outer", "Peer", "SwarmSampler", "SwarmShards"]
)
def test_arguments_of_public_names_are_described(name):
    """Each argument of a constructor and of a public method has a line under `Args:`."""
    public = getattr(p2pavg, name)
    methods = {
        key: value for key, value in vars(public).items() if inspect.isfunction(value) and key[0] != "_"
    }
    for what, told in {name: public, **methods}.items():
        described = inspect.getdoc(told) or ""
        for argument in inspect.signature(told).parameters:
            if argument not in ("self", "args", "kwargs"):
                assert f"\n    {argument}: " in described, f"{what}({argument})"


def test_unknown_name_is_an_attribute_error():
    """A misspelt name fails as in any module."""
    name = "CollaborativeOptimiser"
    with pytest.raises(AttributeError, match=name):
        getattr(p2pavg, name)


def test_import_is_light():
    """import p2pavg loads neither torch nor the network stack."""
    code = "import sys, p2pavg; sys.exit(' '.join({'torch', 'kademlia', 'uvloop'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.strip() == ""
