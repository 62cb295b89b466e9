"""Writes the tables, or checks them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pages
from pages import metrics, rooms, states, wire

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PLACE = re.compile(r"(<!-- code: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {**rooms.TABLES, **states.TABLES, **wire.TABLES, **metrics.TABLES}


def render(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n{place[3]}", page)


def main() -> int:
    """Exit code 1: a page differs from the code (--check), or the code has something that no page tells."""
    parser = argparse.ArgumentParser(prog="python -m pages", description=pages.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a page differs")
    check = parser.parse_args().check
    try:
        stale = {
            path: new for path in sorted(DOCS.glob("*.md")) if (new := render(old := path.read_text())) != old
        }
    except wire.Untold as untold:
        print(untold, file=sys.stderr)
        return 1
    for name, draw in states.DRAWINGS.items():
        if not (path := DOCS / name).exists() or path.read_text() != draw():
            stale[path] = draw()
    for path, new in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} differs from the code; run python -m pages", file=sys.stderr)
        else:
            path.write_text(new)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
