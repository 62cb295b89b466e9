"""What a monitor writes and reads, a line a second: plain text for people, JSON for `--jsonl`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from p2pavg.errors import ConfigurationError
from p2pavg.monitor.shown import Shown, run_line

log = logging.getLogger("p2pavg.monitor")
EVENTS_TOLD = 8  # in one line of JSON


class Lines:
    """Prints plain lines: what happened, then the state of the run."""

    def __init__(self) -> None:
        self._told: dict[int, str] = {}
        self._waits = False  # nobody was in the run at the last line

    def show(self, shown: Shown) -> None:
        """Print the events since the last call, and the line of the run; of an empty one, once."""
        told = {number: words for number, _, words in shown.events}
        for number, words in told.items():
            if self._told.get(number) != words:
                print(words)
        self._told = told
        waited, self._waits = self._waits, not shown.peers
        if not (waited and self._waits):
            print(run_line(shown), flush=True)


class JsonLines:
    """Writes the frames of a run. A round is in the lines once for each time that more of it became known."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._written: dict[int, int] = {}  # by epoch, how many members had told of it
        self._full = False  # the disk, when the last line was written

    def write(self, frame: Mapping[str, Any]) -> None:
        """Append one line."""
        rounds = frame["rounds"]
        fresh = [one for one in rounds if self._written.get(one["epoch"]) != len(one["peers"])]
        self._written = {one["epoch"]: len(one["peers"]) for one in rounds}
        told = {**frame, "rounds": fresh, "events": frame["events"][-EVENTS_TOLD:]}
        line = json.dumps(told, separators=(",", ":"), allow_nan=False) + "\n"
        try:
            self._file.write(f"\n{line}" if self._full else line)  # part of a line may be there
            self._file.flush()
        except BrokenPipeError:  # whoever read this has gone
            raise
        except OSError as error:
            if not self._full:
                log.warning("the file of --jsonl cannot be written (%s): it gets a gap", error.strerror)
            self._full = True
        else:
            self._full = False


def frames(path: str, run_id: str) -> Iterator[dict[str, Any]]:
    """The frames of a run in a file that `JsonLines` wrote; lines that hold none are left out and warned of.

    A file that is not there holds none. Raises ConfigurationError when it cannot be read.
    """
    strange: list[int] = []
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    frame = json.loads(line)
                except (ValueError, RecursionError):
                    if line.strip():
                        strange.append(number)
                    continue
                if isinstance(frame, dict) and frame.get("run_id") == run_id:
                    yield frame
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"cannot read {path!r}: {error.strerror}") from None
    if strange:
        first = (
            f"line {strange[0]}" if len(strange) == 1 else f"{len(strange)} lines, from line {strange[0]} on,"
        )
        log.warning("%s of %r: no JSON of a monitor, and left out", first, path)
