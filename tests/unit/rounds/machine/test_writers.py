"""Who may change what the parts of the rounds machine share: its owner alone, by verbs that others call."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from p2pavg.rounds.machine import machine

ROOM = Path(machine.__file__).parent
SHARED = ("core", "here", "own", "epoch_state", "promises")


def targets(tree: ast.AST) -> list[ast.expr]:
    """All that is assigned to, deleted, or changed in place by an operator."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.Delete)):
            found += node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            found.append(node.target)
    return [leaf for each in found for leaf in (each.elts if isinstance(each, ast.Tuple) else [each])]


def writes(source: str) -> list[str]:
    """Assignments to a field of one of the shared objects."""
    return [
        ast.unparse(target)
        for target in targets(ast.parse(source))
        if isinstance(target, (ast.Attribute, ast.Subscript))
        and any(
            isinstance(inner, (ast.Attribute, ast.Name))
            and (inner.attr if isinstance(inner, ast.Attribute) else inner.id) in SHARED
            for inner in ast.walk(target.value)
        )
    ]


@pytest.mark.parametrize("file", [path.name for path in ROOM.glob("*.py") if path.name != "core.py"])
def test_no_part_writes_a_field_that_all_share(file: str) -> None:
    """A field of the core, or of what stands in it, is changed by a method of its owner."""
    assert writes((ROOM / file).read_text()) == []


def test_a_write_is_found() -> None:
    """The check sees what it looks for."""
    text = (
        "core.here.epoch = 1\nself.core.own.samples -= 2\ndel core.epoch_state.excluded[peer]\na = core.now"
    )
    assert writes(text) == ["core.here.epoch", "self.core.own.samples", "core.epoch_state.excluded[peer]"]
