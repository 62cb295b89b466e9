"""Publisher: hands the report of each round to the user's callback, and appends it to a file."""

from __future__ import annotations

import logging
from collections.abc import Callable

from p2pavg.errors import ConfigurationError
from p2pavg.report import RoundReport
from p2pavg.report.reading import end_last_line

logger = logging.getLogger("p2pavg.peer.peer")


class Publisher:
    """Where the reports of one peer go. `publish` runs on the loop thread."""

    def __init__(self, path: str | None, on_round: Callable[[RoundReport], None] | None) -> None:
        """path: of the JSONL file; None: no file."""
        self._path = path
        self._on_round = on_round
        self._told_of_callback = False

    def check(self) -> None:
        """Raises ConfigurationError when the file cannot be written."""
        if self._path is None:
            return
        try:
            with open(self._path, "a", encoding="utf-8"):
                pass
            end_last_line(self._path)
        except OSError as error:
            raise ConfigurationError(
                f"cannot write reports to {self._path!r} ({error.strerror}); "
                f"name a writable file or unset P2PAVG_REPORTS"
            ) from None

    def publish(self, report: RoundReport) -> None:
        """Write and hand out the report of an epoch."""
        if self._path is not None:
            try:
                with open(self._path, "ab", buffering=0) as file:  # one write: peers may share the file
                    file.write(report.to_json().encode() + b"\n")
            except OSError as error:
                logger.warning(
                    "cannot append to %s (%s); no more reports are written", self._path, error.strerror
                )
                self._path = None
        if self._on_round is not None and report.members:  # none: the last word of who leaves
            try:
                self._on_round(report)
            except Exception:
                told, self._told_of_callback = self._told_of_callback, True
                logger.log(
                    logging.INFO if told else logging.ERROR, "the on_round callback raised", exc_info=True
                )
