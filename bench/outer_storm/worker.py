"""One peer of the storm: trains until a given moment, and writes down its averages and each long step()."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import IO, Any

from p2pavg.bench.outer.worker import OuterPeer
from p2pavg.bench.workers import serve
from p2pavg.report import RoundReport


class StormPeer(OuterPeer):
    """The worker's commands. What it writes down stands in files, for one that is killed."""

    _diary: IO[str] | None = None

    def _report(self, report: RoundReport) -> None:
        if report.members:
            self._write(
                t="average",
                at=time.monotonic(),
                members=len(report.members),
                epoch=report.epoch,
                lineage=report.lineage,
                theta=report.extra.get("theta_sha256_low"),
                discarded=report.samples_discarded,
            )
        super()._report(report)

    def _write(self, **event: Any) -> None:
        if self._diary is not None:
            self._diary.write(json.dumps(event) + "\n")

    def endure(self, command: dict[str, Any]) -> dict[str, Any]:
        """Train until time.monotonic() is `until`."""
        opt, steps = self.opt, 0
        with Path(command["diary"]).open("w", buffering=1) as self._diary:
            with Path(command["count"]).open("wb", buffering=0) as count:
                while time.monotonic() < command["until"]:
                    self.job.backward()
                    start = time.monotonic()
                    opt.step()
                    now = time.monotonic()
                    opt.zero_grad()
                    steps += 1
                    count.seek(0)
                    count.write(steps.to_bytes(8, "little"))
                    if now - start > command["long_s"]:
                        self._write(t="wait", at=now, seconds=now - start)
            self._all_reports()
            diary, self._diary = self._diary, None
            diary.flush()
        return {}


if __name__ == "__main__":
    peer = StormPeer()
    sys.exit(serve(peer.start, peer.gather, peer.endure, peer.leave))
