"""The pages say what the code says: every error, every warning, every figure."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pavg import errors
from pages import rooms

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "p2pavg"
GUIDE = " ".join((ROOT / "docs" / "failures.md").read_text().split())
CLASSES = [name for name, value in vars(errors).items() if isinstance(value, type)]
LOUD = ("warning", "error", "exception", "critical")
TOOLS = ("bench", "forecast", "lab")  # their messages are about their own arguments


def literal(node: ast.expr, names: dict[str, str]) -> str:
    """The text of a message, with … for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%(\.\d+)?[srdf]", "…", text)
        case ast.JoinedStr(values=parts):
            return "".join(literal(part, names) if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.BinOp(left=left, right=right):
            return literal(left, names) + literal(right, names)
        case ast.IfExp(body=body, orelse=orelse):
            return max(literal(body, names), literal(orelse, names), key=len)
        case ast.Name(id=name):
            return names.get(name, "…")
    return "…"


def beginning(text: str) -> str:
    """The first words of the longest stretch of a message before it says what to do."""
    clause = re.split(r"[;:,] ", text)[0]
    words = ""
    for word in max(clause.split("…"), key=len).strip(" ('").split():
        if len(words) + len(word) > 28:
            break
        words = f"{words} {word}".strip()
    return words.rstrip(" ('")


def calls() -> Iterator[tuple[str, str, str]]:
    """(file and line, what is called, its message) of errors that are made and warnings that are logged."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in TOOLS:
            continue
        tree = ast.parse(path.read_text())
        names = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func)
            at = f"{path.relative_to(ROOT)}:{node.lineno}"
            if called in CLASSES:
                yield at, called, literal(node.args[0], names)
            elif called == "Refusal":
                yield at, called, literal(node.args[1], names)
            elif re.fullmatch(rf"(log|logger)\.({'|'.join(LOUD)})", called):
                yield at, called, literal(node.args[0], names)


MESSAGES = [(at, called, beginning(text)) for at, called, text in calls() if len(beginning(text)) > 3]


def test_messages_are_found():
    """The search below sees the package's messages: well over a hundred."""
    assert len(MESSAGES) > 120
    assert {called for _, called, _ in MESSAGES} > {"ConfigurationError", "CredentialError", "Refusal"}


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_class_is_in_the_guide(name):
    """Every exception class has its place in docs/failures.md."""
    assert f"{name}" in GUIDE


QUIET = (  # in the guide as the beginnings of messages of one kind
    "a frame",
    "a heartbeat",
    "a blob chunk",
    "a data stream",
    "a downloaded state",
    "a state",
    "a donor",
    "this is a p2pavg",
    "scheduler must be",
    "run_id must be a",
    "a hello without a right",
    "cannot listen on",
    "this peer is closed",
)


@pytest.mark.parametrize(("at", "called", "words"), MESSAGES, ids=[at for at, _, _ in MESSAGES])
def test_every_message_is_in_the_guide(at, called, words):
    """Every message of an exception and every warning is in docs/failures.md, by its own words."""
    words = next((kind for kind in QUIET if words.startswith(kind)), words)
    assert words in GUIDE, f"{at}: {called}({words!r}) is not in docs/failures.md"


def test_figures_come_from_results():
    """The tables of README.md and docs/numbers.md are what bench.tables makes of bench/results."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.tables", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_tables_come_from_the_code():
    """The tables of wire.md, design.md and rounds.md are what `pages` makes of the code."""
    done = subprocess.run(
        [sys.executable, "-m", "pages", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("container", ["p2pavg", "p2pavg.rounds", "p2pavg.transport"])
def test_every_room_has_its_floor(container):
    """Import-linter's layers name exactly the modules of a package."""
    named = [name for names in rooms.layers(container) for name in names]
    assert sorted(named) == sorted(rooms.entries(ROOT.joinpath(*container.split("."))))


ROOMS = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(PACKAGE)))
def test_every_room_introduces_itself(room):
    """A package's first lines say what it is for and where to start reading, and its folder stays small."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert text is not None
    assert "tart reading" in text or "Start at" in text or room.parent.name == "bench"
    assert len(list(room.glob("*.py"))) <= 21, "a folder of more than twenty files wants rooms"


def test_unit_tests_mirror_the_rooms():
    """Each folder of tests/unit has the name of a room of the package, and stays small."""
    for folder in {path.parent for path in (ROOT / "tests" / "unit").rglob("*.py")}:
        assert (PACKAGE / folder.relative_to(ROOT / "tests" / "unit")).is_dir(), folder
        assert len(list(folder.glob("*.py"))) <= 20, folder


def test_the_readme_shows_the_example_as_it_is():
    """The complete script in README.md is examples/digits.py, to the letter."""
    script = (ROOT / "examples" / "digits.py").read_text()
    code = script.split('"""', 2)[2].lstrip("\n")
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_page_can_be_found(page):
    """Every page is in the navigation of mkdocs.yml."""
    assert page.name in (ROOT / "mkdocs.yml").read_text()


def test_the_site_shows_what_a_newcomer_needs(tmp_path):
    """The front page has a picture, the install and code; the reference the optimizer's signature."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    pytest.importorskip("mkdocs")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    front = (tmp_path / "index.html").read_text()
    assert 'src="epoch.svg"' in front
    text = re.sub(r"<[^>]+>", "", front)
    for words in ("pip install", "CollaborativeOptimizer(", "opt.step()"):
        assert words in text
    reference = re.sub(r"<[^>]+>", "", (tmp_path / "reference.html").read_text())
    assert re.search(r"CollaborativeOptimizer\(\s*optimizer: Optimizer,\s*run_id: str", reference)
    assert re.search(r"resync_epochs\s+\(int \| None, default:\s+None\s*\)", reference)  # a list of arguments


def test_the_files_to_change_are_there() -> None:
    """Each file that the table of changes names exists, and the kinds of change are the ones that come up."""
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.partition("<!-- changes -->")[2].partition("<!-- end of changes -->")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| ")][2:]
    named = re.findall(r"`((?:p2pavg|csrc|tests|pages|docs|bench)(?:/[^`]*)?)`", table)
    assert len(named) > 40
    missing = [path for path in named if not (ROOT / path.split("/NAME")[0]).exists()]
    assert not missing
    kinds = " ".join(row[0] for row in rows)
    common = r"codec|topology|message|timer|verb|option|mode|metric|NAT|bench|fault"
    for kind in common.split("|"):
        assert kind in kinds
    for place, attribute in (
        ("p2pavg/rounds/machine/machine.py", "_message_table"),
        ("p2pavg/rounds/machine/machine.py", "_timer_table"),
        ("p2pavg/optim/optimizer.py", "_make_update"),
        ("p2pavg/optim/member.py", "_terms"),
        ("p2pavg/transport/links/endpoint.py", "_received"),
        ("p2pavg/bench/chaos/kinds.py", "BREAKS"),
    ):
        assert attribute in table
        assert attribute in (ROOT / place).read_text()
