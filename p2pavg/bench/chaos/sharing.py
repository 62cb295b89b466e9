"""The swarm of `bench chaos --passes`: peers also leave in order, and twice all of them end and others
resume.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Any

from p2pavg.bench.chaos.passes import Data
from p2pavg.bench.chaos.process import SwarmProcess
from p2pavg.bench.chaos.swarm import Swarm
from p2pavg.bench.workers import tell

FEWEST, MOST = 4, 6  # peers of the swarm after a resume
RESUMES = 2


class SharingSwarm(Swarm):
    """Keeps its processes training until all passes over the data are whole."""

    worker = "p2pavg.bench.chaos.sampled"
    ends_s = 60.0  # torch and its threads are taken down

    def __init__(self, data: Data, **options: Any) -> None:
        super().__init__(epochs=0, **{**options, "encrypted": True})  # members' files are their identities
        self._data = data
        target = self._config["target"] * data.batch
        self._config |= {"data": asdict(data), "target": target}
        self._passes = 0.0  # over the data, so far
        self._resumes = 0
        self._held = False  # nobody trains before all of a start are there
        self._leaving: set[str] = set()

    def _configured(self) -> dict[str, Any]:
        return {"checkpoint_dir": str(self._folder / "checkpoints")}

    def _start(self) -> None:
        """All processes at once, as the first one's address is enough; they train when all are there."""
        self._fresh.clear()
        self._held = True
        self._spawn()
        self._wait_until(lambda: bool(self._fresh[0].address))
        for _ in range(self._peers - 1):
            self._spawn()
        self._wait_until(lambda: all(m.joined for m in self._fresh))
        self._held = False
        for member in self._fresh:
            self._let_go(member)

    def _let_go(self, member: SwarmProcess) -> None:
        with suppress(OSError):
            tell(member.process, {"go": True})

    def _take(self, member: SwarmProcess, event: dict[str, Any] | None) -> None:
        super()._take(member, event)
        if event is not None and event["t"] == "joined" and not self._held:
            self._let_go(member)
        if event is not None and event["t"] == "epoch":
            self._passes = max(self._passes, event["passes"])

    def _targets(self) -> list[SwarmProcess]:
        return [m for m in super()._targets() if m.who not in self._leaving]

    def _leave(self, victim: SwarmProcess) -> None:
        """As on SIGTERM: it hands over what it accumulated."""
        self._log("leave", victim.who, 0.0)
        self._leaving.add(victim.who)
        with suppress(OSError):
            tell(victim.process, {"leave": True})

    def _beat(self) -> None:
        due = self._data.passes * (self._resumes + 1) / (RESUMES + 1)
        if self._resumes < RESUMES and self._passes >= due:
            self._resumes += 1
            self._resume()

    def _resume(self) -> None:
        """All processes are killed; another number of them goes on from the newest checkpoint."""
        peers = self._random.choice([n for n in range(FEWEST, MOST + 1) if n != self._peers])
        self._note("", "resume", peers=peers)
        for member in self._living():
            member.process.kill()
            member.process.wait()
        self._mend()
        self._pump(0.5)
        self._peers = peers
        self._start()
