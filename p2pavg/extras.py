"""Libraries that only some features need: what is said where one is missing, before any work is done."""

from __future__ import annotations

import importlib

from p2pavg.errors import ConfigurationError

# module: (the extra of this package that brings it, what pip is told)
LIBRARIES = {
    "aiohttp": ("monitor", "aiohttp>=3.9"),
    "prometheus_client": ("monitor", "prometheus-client>=0.20"),
    "matplotlib.figure": ("plot", "matplotlib>=3.8"),
}


def check_installed(user: str, *modules: str) -> None:
    """Raises ConfigurationError that names at once all of these libraries that are missing, and how to
    install them. user: who needs them, with the verb, such as "Plots need".
    """
    missing = [LIBRARIES[module] for module in modules if not _is_there(module)]
    if missing:
        names = " and ".join(wanted.partition(">")[0] for _, wanted in missing)
        wanted = " ".join(f"'{wanted}'" for _, wanted in missing)
        raise ConfigurationError(
            f"{user} {names}: pip install {wanted}, or in a clone of p2pavg pip install '.[{missing[0][0]}]'"
        )


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
