"""What a release is built from and runs on is pinned to the byte, and the repository holds nothing else."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_requirement_of_a_release_has_a_version_and_hashes() -> None:
    """Among them all that p2pavg needs; pip takes no other file with --require-hashes."""
    text = (ROOT / "constraints" / "release.txt").read_text()
    assert "pip install --require-hashes -r constraints/release.txt" in text
    entries = [
        entry
        for entry in re.sub(r"\\\n\s*", " ", text).splitlines()
        if entry.strip() and not entry.lstrip().startswith(("#", "--"))
    ]
    pinned = set()
    for entry in entries:
        name = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?==[\w.+!-]+ ", entry)
        assert name, entry[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), name[1]
        pinned.add(re.sub(r"[-_.]+", "-", name[1]).lower())
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for requirement in (*needed["project"]["dependencies"], *needed["build-system"]["requires"]):
        name = re.match(r"[\w.-]+", requirement)
        assert name
        assert re.sub(r"[-_.]+", "-", name[0]).lower() in pinned, requirement


def test_nothing_lies_about_at_the_root() -> None:
    """The files at the root of the repository are those that belong there: no dump, no download."""
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    assert {name for name in found.stdout.splitlines() if "/" not in name} == {
        ".gitignore",
        "CHANGELOG.md",
        "CMakeLists.txt",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "mkdocs.yml",
        "pyproject.toml",
    }
