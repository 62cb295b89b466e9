"""One system with its processes, in a comparison; used by `versus`, `line_rate` and `beside`."""

from __future__ import annotations

from typing import Any

from p2pavg.bench.workers import Workers

DEADLINE_S = 600.0


class Contestant:
    """Plays rounds; the first ones warm up and are not measured."""

    def __init__(self, name: str, workers: Workers, warm_up: int = 1) -> None:
        self.name = name
        self.workers = workers
        self.warm_up = warm_up
        self._rounds: list[list[dict[str, Any]]] = []

    def play(self, fill: bool = True) -> None:
        """One round. fill: every process makes its vector anew before."""
        if fill:
            self.workers.all(deadline_s=DEADLINE_S, do="fill")
        self._rounds.append(self.workers.all(deadline_s=DEADLINE_S, do="round", index=len(self._rounds)))

    @property
    def measured(self) -> list[list[dict[str, Any]]]:
        """Every measured round's answers, one of each process."""
        return self._rounds[self.warm_up :]

    def seconds(self) -> list[float]:
        """Of each measured round: those of its slowest process."""
        return self.all_seconds()[self.warm_up :]

    def all_seconds(self) -> list[float]:
        """Those that warm up too."""
        return [max(answer["seconds"] for answer in answers) for answers in self._rounds]
