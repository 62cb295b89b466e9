"""Coverage-guided fuzzing of one parser: `python -m tests.fuzz.run_atheris TARGET [libFuzzer options]`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["p2pavg", "tests.fuzz.targets"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until the options or a crash end it."""
    name, *options = sys.argv[1:]
    parse = TARGETS[name].parse
    atheris.Setup([sys.argv[0], *options], lambda data: parse(data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
