"""Tables as Markdown, and the first sentence of a docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are Markdown; a bar in one is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


def first_sentence(text: str) -> str:
    """Without its full stop; line breaks become spaces."""
    text = " ".join(text.split("\n\n")[0].split())
    match = re.match(r"(.*?[^.])\.(?: [A-Z`(]|$)", text)
    return match[1] if match else text.rstrip(".")


def told_by(path: Path) -> str:
    """The first sentence of a module's docstring, or of a package's."""
    file = path / "__init__.py" if path.is_dir() else path
    return first_sentence(ast.get_docstring(ast.parse(file.read_text())) or "")
