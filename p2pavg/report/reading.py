"""Reads a file of reports: JSON lines, as peers write them with P2PAVG_REPORTS."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Run:
    """All reports of one run, by epoch and then peer. cut: files whose last line is incomplete.

    The last report of a peer that leaves names what it discarded and has no members, as no round ended with
    it.
    """

    run_id: str
    reports: tuple[RoundReport, ...]
    cut: tuple[str, ...] = ()

    def rounds(self) -> list[RoundReport]:
        """The reports of epochs that ended with an average."""
        return [report for report in self.reports if report.members]

    def epochs(self) -> dict[int, list[RoundReport]]:
        """The reports of `rounds`, by epoch."""
        found: dict[int, list[RoundReport]] = {}
        for report in self.rounds():
            found.setdefault(report.epoch, []).append(report)
        return found


def load(paths: Sequence[str | os.PathLike[str]], run_id: str | None = None) -> Run:
    """Read JSONL files. Raises ConfigurationError, which names the file and line that cannot be used."""
    reports: list[RoundReport] = []
    cut = []
    for path in paths:
        found, whole = read_reports(path)
        reports += found
        if not whole:
            cut.append(str(path))
    names = sorted({report.run_id for report in reports})
    if run_id is None and len(names) > 1:
        raise ConfigurationError(
            f"these are reports of several runs ({', '.join(names)}); choose one with --run"
        )
    chosen = names[0] if run_id is None else run_id
    mine = [report for report in reports if report.run_id == chosen]
    if not mine:
        raise ConfigurationError(f"no report of run {chosen!r} is there, only of {', '.join(names)}")
    if not any(report.members for report in mine):
        raise ConfigurationError(
            f"no epoch of run {chosen!r} ended with an average, so there is nothing to report"
        )
    return Run(chosen, tuple(sorted(mine, key=lambda r: (r.epoch, r.peer, r.finished_at))), tuple(cut))
