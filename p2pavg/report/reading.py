"""Reads a file of reports: JSON lines, as peers write them with P2PAVG_REPORTS."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pavg.errors import ConfigurationError
from p2pavg.report import RoundReport

log = logging.getLogger("p2pavg.report")


def read_reports(path: str | os.PathLike[str]) -> tuple[list[RoundReport], bool]:
    """The reports of one file, and whether it has lines that are not whole, which are warned of and left out:
    a peer may have been killed while it wrote one. Raises ConfigurationError, which names the line that
    cannot be used.
    """
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {name!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{name!r} holds no reports: it is not text") from None
    lines = text.split("\n")
    reports, cut = [], []
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
            if line.startswith("{") or (number == len(lines) and reports):
                cut.append(number)
                continue
            raise ConfigurationError(f"line {number} of {name!r} is no JSON of a report") from None
    if cut and not reports:
        raise ConfigurationError(f"line {cut[0]} of {name!r} is no JSON of a report")
    if cut:
        which = f"line {cut[0]}" if len(cut) == 1 else f"{len(cut)} lines, the first of them line {cut[0]},"
        log.warning("%s of %r: not whole, and left out, as a peer was ended while it wrote", which, name)
    if not reports:
        raise ConfigurationError(
            f"{name!r} is empty: peers write there with P2PAVG_REPORTS={name}, a line after every epoch"
        )
    return reports, bool(cut)


def end_last_line(path: str | os.PathLike[str]) -> None:
    """Write the end of the last line of a file where it is missing, so that what is appended begins a new
    one. Raises OSError.
    """
    if not Path(path).is_file():  # but a pipe or a terminal, or nothing yet
        return
    with open(path, "rb+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


@dataclass(frozen=True, slots=True)
class Run:
    """All reports of one run, by epoch and then peer. cut: files with a line that is not whole.

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
        found, is_cut = read_reports(path)
        reports += found
        if is_cut:
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
