"""Arrival: tells a person how this peer gets into the run, and back into it when it fell behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pavg.peer.notice import tell
from p2pavg.printable import counted

FIRST_WORD_S = 1.0  # a download that is quicker needs none
NEXT_WORD_S = 5.0
LOOK_S = 0.25


class Arrival:
    """Looks at where this peer stands, on the loop."""

    def __init__(
        self,
        run_id: str,
        stands: Callable[[], tuple[int, bool]],
        company: Callable[[], int],
        downloaded: Callable[[], tuple[int, int, int] | None],
    ) -> None:
        """stands: (epoch, whether the state is missing). company: how many others are linked. downloaded:
        (verified bytes, all bytes, donors); None: nobody has offered the state yet.
        """
        self._run_id = run_id
        self._stands = stands
        self._company = company
        self._downloaded = downloaded
        self._loop = asyncio.get_running_loop()
        self._missing = False
        self._next_word = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """The peer has entered the rounds."""
        epoch, missing = self._stands()
        if not missing and self._company():
            self._joined(epoch)
        self._watch()

    def look(self) -> None:
        """Where the peer stands may have changed."""
        epoch, missing = self._stands()
        now = self._loop.time()
        if missing and not self._missing:
            self._next_word = now + FIRST_WORD_S
        elif missing and now >= self._next_word:
            self._next_word = now + NEXT_WORD_S
            self._downloading()
        elif self._missing and not missing:
            self._joined(epoch)
        self._missing = missing

    def close(self) -> None:
        """Tell nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        self.look()
        self._timer = self._loop.call_later(LOOK_S, self._watch)

    def _joined(self, epoch: int) -> None:
        tell("joined run %r at epoch %d, with %s", self._run_id, epoch, counted(self._company(), "peer"))

    def _downloading(self) -> None:
        progress = self._downloaded()
        if progress is None:
            tell("asking %s for the state of run %r", counted(self._company(), "peer"), self._run_id)
            return
        verified, total, donors = progress
        tell(
            "downloading the state of run %r from %s: %.0f of %.0f MB",
            self._run_id,
            counted(donors, "peer"),
            verified / 1e6,
            total / 1e6,
        )
