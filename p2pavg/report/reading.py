"""Reads a file of reports: JSON lines, as peers write them with P2PAVG_REPORTS."""

from __future__ import annotations

import json
import os
from pathlib import Path

from p2pavg.errors import ConfigurationError
from p2pavg.report import RoundReport


def read_reports(path: str | os.PathLike[str]) -> tuple[list[RoundReport], bool]:
    """The reports of one file, and whether its last line is complete: a peer may have been killed while it
    wrote.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {name!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{name!r} holds no reports: it is not text") from None
    lines = text.split("\n")
    reports = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError
            reports.append(RoundReport.from_dict(data))
        except ConfigurationError as error:
            raise ConfigurationError(f"line {number} of {name!r}: {error}") from None
        except (ValueError, RecursionError):
            if number == len(lines) and reports:
                return reports, False
            raise ConfigurationError(f"line {number} of {name!r} is no JSON of a report") from None
    if not reports:
        raise ConfigurationError(
            f"{name!r} is empty: peers write there with P2PAVG_REPORTS={name}, a line after every epoch"
        )
    return reports, True
