"""What bench/results holds, and words about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


RESULTS = ROOT / "bench" / "results"


def results(prefix: str) -> Iterator[tuple[str, Any]]:
    """(file name, content) of PREFIX.json and PREFIX_*.json."""
    for path in sorted(RESULTS.glob(f"{prefix}*.json")):
        if path.stem == prefix or path.stem.startswith(f"{prefix}_"):
            yield path.name, json.loads(path.read_text())


def result(name: str) -> Any:
    """The content of NAME.json; None when it was not measured."""
    return next((content for file, content in results(name) if file == f"{name}.json"), None)


def measured(content: Any) -> str:
    """When, on what."""
    about = content.get("environment") if isinstance(content, dict) else None
    if not about:
        return "–"
    load = about.get("load_1min")
    busy = f", load {load:.1f}" if load is not None else ""
    return f"{about['date'][:10]}, {about['cores']} × {about['cpu']}{busy}"


def fractions(content: Any, *names: str, part: str = "kernels") -> str:
    """Of the copy rate, one for each kernel."""
    found = {kernel["name"]: kernel["fraction_of_copy"] for kernel in content["cuda"][part]}
    return " / ".join(f"{found[name]:.2f}" for name in names)


def size(content: dict[str, Any]) -> str:
    values = content.get("numel", content.get("params"))
    return "–" if values is None else f"{values / 1e6:.3g}M"


def network(content: dict[str, Any]) -> str:
    where = content.get("topology") or content.get("lab") or "loopback"
    return f"{where}, encrypted" if content.get("encrypted") is True else where


def lab_rows() -> list[dict[str, str]]:
    return result("lab_truth") or []
