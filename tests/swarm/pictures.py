"""What benchmarks draw, as the tests look at it."""

from __future__ import annotations

from pathlib import Path


def check_picture(path: Path) -> None:
    """An SVG file is there, with more in it than empty axes."""
    assert "<svg" in path.read_text()[:1000]
    assert path.stat().st_size > 5000
