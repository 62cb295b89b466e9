"""Floors, rooms and files, from import-linter's contracts and the first sentences of docstrings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pages.markdown import table, told_by

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "p2pavg"


def layers(container: str) -> list[list[str]]:
    """The contract's layers of this package, from the ground up: the names of each."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = next(one for one in contracts if one["type"] == "layers" and container in one["containers"])
    return [re.findall(r"\w+", layer) for layer in reversed(found["layers"])]


def place(container: str, name: str) -> Path:
    """The folder or file of this module."""
    folder = ROOT.joinpath(*container.split("."), name)
    return folder if folder.is_dir() else folder.with_suffix(".py")


def entries(folder: Path) -> set[str]:
    """The modules of a folder, by name."""
    here = {path.stem for path in folder.glob("*.py") if path.name != "__init__.py"}
    return here | {path.parent.name for path in folder.glob("*/__init__.py")}


def floors(container: str = "p2pavg") -> str:
    """The rooms of a package from the roof down, and what each is for."""
    rows = []
    for number, names in reversed(list(enumerate(layers(container)))):
        for name in names:
            path = place(container, name)
            label = f"`{name}/`" if path.is_dir() else f"`{name}`"
            rows.append([str(number), label, told_by(path)])
    return table(["floor", "room", "what it is for"], rows)


def files(container: str) -> str:
    """Every file of the rooms of a package, and what it is for."""
    rows = []
    for names in reversed(layers(container)):
        for name in names:
            path = place(container, name)
            if path.is_dir():
                rows += room(path, name)
            else:
                rows.append([f"`{path.name}`", told_by(path)])
    return table(["file", "what it is for"], rows)


def room(folder: Path, label: str) -> list[list[str]]:
    """A row for the room, for each of its files, and for the rooms inside it."""
    rows = [[f"**`{label}/`**", f"**{told_by(folder)}**"]]
    rows += [[f"`{label}/{one.name}`", told_by(one)] for one in sorted(folder.glob("[a-z]*.py"))]
    for inside in sorted(folder.glob("*/__init__.py")):
        rows += room(inside.parent, f"{label}/{inside.parent.name}")
    return rows


TABLES: dict[str, Callable[[], str]] = {
    "floors": floors,
    "rounds_files": partial(files, "p2pavg.rounds"),
    "transport_files": partial(files, "p2pavg.transport"),
}
