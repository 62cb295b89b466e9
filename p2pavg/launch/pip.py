"""How pip finds packages on the machines: options of its own, as a configuration file or as variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def configuration(options: Mapping[str, Any]) -> str:
    """The text of a pip.conf. options: as in `SwarmFile.pip`."""
    lines = ["[global]"]
    for option, value in options.items():
        lines.append(f"{option} = " + "\n    ".join(_words(value)))
    return "\n".join(lines) + "\n"


def environment(options: Mapping[str, Any]) -> dict[str, str]:
    """The same as variables, for machines where no file can be laid beforehand."""
    return {
        f"PIP_{option.upper().replace('-', '_')}": " ".join(_words(value))
        for option, value in options.items()
    }


def _words(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
