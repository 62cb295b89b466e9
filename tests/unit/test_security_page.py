"""What the security page promises is tested: each row and each paragraph names tests, and they are there."""

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
FREE = ("What is not protected", "Reporting a hole")  # nothing is promised there


def rows(section: str) -> Iterator[list[str]]:
    """The cells of each row of the section's tables, their heads left out."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[-1].strip("| ") != "test":
            yield cells


def named(text: str) -> Iterator[tuple[Path, str]]:
    """(file, test) of each test that a cell or a paragraph names; test "": all of the file."""
    path = None
    for name in re.findall(r"`([^`]+)`", text):
        if name in TARGETS and f"fuzz target `{name}`" in text:
            yield ROOT / "tests" / "fuzz" / "targets.py", ""
        elif re.fullmatch(r"(tests/[\w/]+\.py|\w+)(::test_\w+)?|test_\w+", name):
            file, _, test = name.partition("::") if not name.startswith("test_") else ("", "", name)
            if file in SHORT or file.startswith("tests/") or test:
                path = ROOT / SHORT.get(file, file) if file else path
                assert path is not None, text
                yield path, test


def paragraphs() -> Iterator[tuple[str, str]]:
    """(section, text) of each paragraph: no heading, table, comment or block of code."""
    section = ""
    for block in re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL).split("\n\n"):
        if heading := re.match(r"\s*##? (.+)", block):
            section = heading[1]
        elif block.strip() and not block.lstrip().startswith(("|", "<!--")):
            yield section, block


def is_there(path: Path, test: str) -> bool:
    """Whether the file has this test, or any."""
    return path.is_file() and bool(
        re.search(rf"def {test}\b" if test else r"def test_|Target\(", path.read_text())
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_each_sentence_names_its_test(section: str) -> None:
    """A row without a test, or with one that does not exist, is no promise."""
    found = list(rows(section))
    assert len(found) >= SECTIONS[section]
    for cells in found:
        tests = list(named(cells[-1]))
        assert tests, cells[0]
        assert len(tests) == cells[-1].count("`") / 2, cells[-1]
        assert [each for each in tests if not is_there(*each)] == []


def test_each_paragraph_names_a_test() -> None:
    """Whatever is said outside of tables, and not under what is not protected, names a test that exists."""
    found = list(paragraphs())
    assert {section for section, _ in found} > {*SECTIONS, *FREE, "Closing a run", "Ending a membership"}
    for section, text in found:
        tests = list(named(text))
        assert tests or section in FREE, text
        assert [each for each in tests if not is_there(*each)] == [], text
