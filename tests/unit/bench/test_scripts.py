"""The scripts of bench/ are a package: each can be imported, and run from the repository's folder."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "bench").rglob("*.py"))
WORKERS = [path for path in FILES if path.parent.name == "workers"]
OTHERS = {"lightning", "transformers"}  # what some scripts are about, where developers' packages are not
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES if path not in WORKERS]


def imported(path: Path) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("name", MODULES)
def test_every_script_is_a_module(name):
    """Importing any module of bench/ succeeds and leaves sys.path as it was."""
    before = list(sys.path)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OTHERS:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert sys.path == before


@pytest.mark.parametrize("path", WORKERS, ids=lambda path: path.stem)
def test_workers_of_other_systems_import_nothing_of_ours(path):
    """A worker that runs in another system's environment imports neither p2pavg nor bench; but the one that
    trains the model of `p2pavg bench outer` takes that from there, with the repository in its path.
    """
    ours = {"bench"} if path.stem in ("p2pavg_worker", "torchft_worker") else {"bench", "p2pavg"}
    assert not imported(path) & ours


def test_a_script_runs_by_its_name():
    """`python -m bench.versus --help` tells what the script does."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.versus", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Averaging side by side" in done.stdout
