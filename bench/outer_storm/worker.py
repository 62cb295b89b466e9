"""One peer of the storm: it trains until a given moment, and tells each step() that took long."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from p2pavg.bench.outer.worker import OuterPeer
from p2pavg.bench.workers import serve


class StormPeer(OuterPeer):
    """The worker's commands."""

    def endure(self, command: dict[str, Any]) -> dict[str, Any]:
        """Train until time.monotonic() is `until`. The number of steps stands in a file, for one that is
        killed.
        """
        opt, waits, steps = self.opt, [], 0
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
                    waits.append((now, now - start))
        return {
            "waits": waits,
            "commits": self._commits,
            "theta": {
                report.epoch: (report.lineage, report.extra.get("theta_sha256_low"))
                for report in self._all_reports()
            },
            "discarded": sum(report.samples_discarded for report in self._all_reports()),
        }


if __name__ == "__main__":
    peer = StormPeer()
    sys.exit(serve(peer.start, peer.gather, peer.endure, peer.leave))
