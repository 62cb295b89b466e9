"""What the security page promises is tested: each row of its tables names its tests, and they are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
SHORT = dict(re.findall(r"`(\w+)`\s+is\s+`(tests/[\w/]+\.py)`", PAGE))
SECTIONS = {
    "What protects what": 9,
    "What others can cost": 20,
    "What holds against whom": 25,
}  # rows, at least


def rows(section: str) -> Iterator[list[str]]:
    """The cells of each row of the section's tables, their heads left out."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[-1].strip("| ") != "test":
            yield cells


def named(cell: str) -> Iterator[tuple[Path, str]]:
    """(file, test) of each test that a cell names; test "": all of the file."""
    path = None
    for name in re.findall(r"`([^`]+)`", cell):
        if name in TARGETS:
            yield ROOT / "tests" / "fuzz" / "targets.py", ""
            continue
        file, _, test = name.partition("::") if not name.startswith("test_") else ("", "", name)
        if file:
            path = ROOT / SHORT.get(file, file)
        assert path is not None, cell
        yield path, test


@pytest.mark.parametrize("section", SECTIONS)
def test_each_sentence_names_its_test(section: str) -> None:
    """A row without a test, or with one that does not exist, is no promise."""
    found = list(rows(section))
    assert len(found) >= SECTIONS[section]
    for cells in found:
        tests = list(named(cells[-1]))
        assert tests, cells[0]
        for path, test in tests:
            assert path.is_file(), path
            assert re.search(
                rf"def {test or 'test_'}\b" if test else r"def test_|Target\(", path.read_text()
            ), (
                path,
                test,
            )


def test_every_test_that_the_page_names_anywhere_is_there() -> None:
    """In its sentences, too."""
    for name in re.findall(r"`((?:tests/[\w/]+\.py|\w+)::\w+|tests/[\w/]+\.py)`", PAGE):
        file, _, test = name.partition("::")
        file = SHORT.get(file, file)
        assert (ROOT / file).is_file(), name
        assert not test or re.search(rf"def {test}\b", (ROOT / file).read_text()), name
