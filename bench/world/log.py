"""What a trainer of the run writes down, and what it is told: one line of JSON each."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench.world.lies import Liar
from bench.world.model import BATCH, sha256
from p2pavg import CollaborativeOptimizer

USAGE_S = 5.0
LEAVES_S = 120.0  # until a peer leaves though nobody told it to
NO_LIMIT = resource.RLIM_INFINITY


class Log:
    """One life of one peer. Every event has "t" (its kind) and "at" (time.monotonic(), the same clock for
    all processes of this machine).

    Told over standard input: {"until": epoch} to end with that epoch, {"leave": true} when all others have it
    too, {"disk": bytes} for the largest file that can be written (null: any), {"lie": seconds, "seed": n} to
    lie so long.
    """

    def __init__(self, path: str, pace_s: float) -> None:
        """pace_s: seconds of a local step, as an accelerator would take."""
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115 (open as long as the process lives)
        self._writing = threading.Lock()
        self._pace_s = pace_s
        self._due = 0.0
        self._epoch = -1
        self._liar: Liar | None = None
        self._leave = threading.Event()
        self.until: int | None = None
        self.drawn: list[int] = []  # indices that the dataset gave out and no step has taken yet

    def say(self, kind: str, **fields: Any) -> None:
        """Write one event."""
        with self._writing:
            self._file.write(json.dumps({"t": kind, "at": time.monotonic(), **fields}) + "\n")

    def begin(self, opt: CollaborativeOptimizer, joining_s: float) -> None:
        """The peer is in the run."""
        self.say(
            "up", peer=opt.peer.peer_id.hex(), address=opt.peer.address, epoch=opt.epoch, joining_s=joining_s
        )
        print(json.dumps({"address": opt.peer.address}), flush=True)
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._measure, daemon=True).start()

    def wait_for_pace(self) -> None:
        """Before a step: until the accelerator would be done with the last one."""
        now = time.monotonic()
        self._due = max(self._due + self._pace_s, now - self._pace_s)
        if self._due > now:
            time.sleep(self._due - now)

    def taken(self) -> list[int]:
        """Before step(): the indices that it counts. Who is killed inside has written them down."""
        indices, self.drawn[:BATCH] = self.drawn[:BATCH], []
        self.say("took", indices=indices)
        return indices

    def stepped(self, opt: CollaborativeOptimizer, model: Any, indices: list[int], seconds: float) -> bool:
        """After a step() of these samples, which took so long; whether it is time to end."""
        self.say("step", indices=indices, seconds=round(seconds, 4), epoch=opt.epoch)
        if opt.epoch != self._epoch:
            self._epoch = opt.epoch
            with opt.averaged():
                self.say("theta", epoch=opt.epoch, sha256=sha256(model))
        return self.until is not None and opt.epoch >= self.until

    def end(self, opt: CollaborativeOptimizer, model: Any, path: str) -> None:
        """Leave θ_ref behind as a file, and wait until the others need this peer no more."""
        with opt.averaged():
            torch.save(model.state_dict(), path)
            self.say("end", epoch=opt.epoch, sha256=sha256(model))
        print(json.dumps({"done": opt.epoch}), flush=True)
        self._leave.wait(LEAVES_S)

    def _listen(self) -> None:
        for line in sys.stdin:
            told = json.loads(line)
            self.say("told", **told)
            self.until = told.get("until", self.until)
            if "leave" in told:
                self._leave.set()
            if "disk" in told:
                resource.setrlimit(resource.RLIMIT_FSIZE, (told["disk"] or NO_LIMIT, NO_LIMIT))
            if "lie" in told:
                self._liar = Liar(told["lie"], told["seed"], lambda what: self.say("lie", what=what))

    def _measure(self) -> None:
        """Every few seconds what would show a leak."""
        while True:
            status = Path("/proc/self/status").read_text()
            lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            self.say(
                "usage",
                rss_kib=int(lines["VmRSS"].split()[0]),
                threads=int(lines["Threads"]),
                descriptors=len(os.listdir("/proc/self/fd")),
            )
            time.sleep(USAGE_S)
