"""The run: a lab, a closed run in it, its peers' lives, and what befalls them, all written down."""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.world import who
from bench.world.clock import build_shim
from bench.world.model import BATCH
from bench.world.screen import Camera
from p2pavg.bench.machine import environment as machine
from p2pavg.bench.workers import WorkerError, tell
from p2pavg.credentials import Authority
from p2pavg.credentials.members import accept, new_request
from p2pavg.lab import Lab

ROOT = Path(__file__).parents[2]
START_S = 300.0  # until all peers are in the run
END_S = 180.0  # until all have made the last average and left
TICK_S = 0.1
SETTLES_S = 20.0  # after the last fault, until the peers that it parted are together again
MARGIN = 2  # averages between the decision to end and the last one
LEAVES_S = 30.0  # in which a process leaves


@dataclass
class Life:
    """One process of one place."""

    place: who.Place
    number: int
    process: subprocess.Popen[bytes]
    folder: Path
    address: str = ""
    frozen: bool = False  # stopped, cut off or asleep
    done: bool = False  # it has the last average
    ended: bool = False

    @property
    def name(self) -> str:
        return f"{self.place.name}-{self.number}"

    @property
    def well(self) -> bool:
        """Whether a fault may strike it."""
        return bool(self.address) and not self.frozen and self.process.poll() is None


class World(AbstractContextManager["World"]):
    """Holds the lab, the members' credentials and their processes."""

    def __init__(self, folder: Path, *, seed: int, gradients: bool, lightning: bool) -> None:
        """folder: where everything is written down; made empty by the caller."""
        self.folder, self.seed = folder, seed
        self.places = who.places(gradients)
        self.gradients, self.lightning = gradients, lightning
        self.lives: dict[str, Life] = {}  # the last one of each place
        self.lab: Lab
        self._born: dict[str, int] = {}
        self._heard: queue.Queue[tuple[Life, bytes]] = queue.Queue()
        self._stack = ExitStack()
        self._events = (folder / "events.jsonl").open("a", buffering=1)
        self._began = time.monotonic()
        steps = who.GRADIENT_STEPS if gradients else who.LOCAL_STEPS
        self.target = int(steps * BATCH * who.speed(self.places))

    # ------------------------------------------------------------------------------ the lab and the run

    def __enter__(self) -> World:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _open(self) -> None:
        self._stack.callback(self._events.close)
        self.lab = self._stack.enter_context(Lab(who.TOPOLOGY))
        self._stack.callback(self._kill_all)
        self._shim = build_shim(self.folder)
        self._credentials()
        self.note(
            "run", seed=self.seed, target=self.target, batch=BATCH, pace_s=who.PACE_S, block=who.BLOCK,
            gradients=self.gradients, lightning=self.lightning, **machine(),
            places=[vars(place) for place in self.places],
        )  # fmt: skip
        argv = ["bootstrap", "--listen", f"0.0.0.0:{who.PORT}", "--run", who.RUN]
        self._tool(who.BOOTSTRAP, argv)
        self.camera = Camera(self.lab, self.folder, self.environment(who.MONITOR), self.way_in)

    @property
    def way_in(self) -> str:
        """The address that all know."""
        return f"{self.lab.address(who.BOOTSTRAP)}:{who.PORT}"

    def _credentials(self) -> None:
        """Each member asks to be let in, and is invited."""
        authority = Authority.new(who.RUN)
        for name in (who.BOOTSTRAP, who.MONITOR, *(place.name for place in self.places)):
            kept, request = new_request()
            member = accept(kept, authority.invite(request))
            path = self._folder_of(name) / "credentials"
            path.touch(mode=0o600)
            path.write_text(member.to_text())

    def _folder_of(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        return path

    def environment(self, name: str) -> dict[str, str]:
        folder = self._folder_of(name)
        return {
            **os.environ,
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "P2PAVG_CREDENTIALS": str(folder / "credentials"),
        }

    def _tool(self, host: str, argv: list[str]) -> subprocess.Popen[bytes]:
        log = (self._folder_of(host) / f"{argv[0]}.log").open("ab")
        with log:
            return self.lab.spawn(
                host, [sys.executable, "-m", "p2pavg", *argv], env=self.environment(host),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    # ---------------------------------------------------------------------------------------- lives

    def born(self, place: who.Place) -> Life:
        """Start a peer on its machine."""
        number = self._born[place.name] = self._born.get(place.name, -1) + 1
        folder = self._folder_of(place.name)
        stem = f"{place.name}-{number}"
        clock = folder / "clock"
        if not clock.exists():
            clock.write_bytes(struct.pack("d", 0.0))
        config = {
            "run_id": who.RUN,
            "name": place.name,
            "region": place.region,
            "initial_peers": [self.way_in],
            "listen": f"0.0.0.0:{who.PORT}",
            "credentials": str(folder / "credentials"),
            "checkpoints": str(folder / "checkpoints"),
            "output": str(folder / "output"),
            "log": str(self.folder / f"{stem}.jsonl"),
            "theta": str(self.folder / f"{stem}.pt"),
            "pace_s": who.PACE_S * place.slowness,
            "target": self.target,
            "seed": self.seed,
            "block": who.BLOCK,
            "gradients": self.gradients,
        }
        env = {
            **self.environment(place.name),
            "P2PAVG_REPORTS": str(self.folder / f"{stem}.reports.jsonl"),
            "WRONG_CLOCK": str(clock),
            **({"LD_PRELOAD": str(self._shim)} if self._shim else {}),
        }
        module = "bench.world.lightning" if self.lightning else "bench.world.trainer"
        argv = [sys.executable, "-m", module, json.dumps(config)]
        with (self.folder / f"{stem}.err").open("wb") as errors:
            process = self.lab.spawn(
                place.name, argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        life = Life(place, number, process, folder)
        self.lives[place.name] = life
        threading.Thread(target=self._read, args=(life,), daemon=True).start()
        self.note("born", who=life.name)
        return life

    def _read(self, life: Life) -> None:
        assert life.process.stdout is not None
        for line in life.process.stdout:
            self._heard.put((life, line))
        self._heard.put((life, b""))

    def hear(self, seconds: float) -> None:
        """Take what the peers say, for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                life, line = self._heard.get(timeout=left)
            except queue.Empty:
                return
            if not line:
                life.ended = True
                self.note("ended", who=life.name, code=life.process.wait())
            elif line.startswith(b'{"address"'):  # Trainer prints its losses there, too
                life.address = json.loads(line)["address"]
                self.note("joined", who=life.name, address=life.address)
            elif line.startswith(b'{"done"'):
                life.done = True

    def well(self) -> list[Life]:
        """Who can be struck by a fault now, in the order of the places."""
        return [life for life in self.lives.values() if life.well]

    def tell(self, life: Life, **command: Any) -> None:
        """A line to a peer's script."""
        with suppress(OSError):
            tell(life.process, command)

    # ------------------------------------------------------------------------------------ begin and end

    def begin(self) -> None:
        """All peers, and the first average. Raises WorkerError when some do not get in."""
        for place in self.places:
            self.born(place)
        end = time.monotonic() + START_S
        while not all(life.address for life in self.lives.values()):
            self.hear(TICK_S)
            self.retry()
            if time.monotonic() > end:
                waiting = [life.name for life in self.lives.values() if not life.address]
                raise WorkerError(f"{', '.join(waiting)} did not get into the run; see {self.folder}/*.err")
        self.note("complete")

    def retry(self) -> None:
        """Start those again that ended before they were in the run, as a machine's supervisor does."""
        for life in list(self.lives.values()):
            if life.ended and not life.address:
                self.born(life.place)

    def finish(self) -> None:
        """All make some more averages together, and leave when all have the last one."""
        self.hear(SETTLES_S)
        until = self.epoch() + MARGIN
        self.note("finish", until=until)
        for life in self.well():
            self.tell(life, until=until)
        lives, end = list(self.lives.values()), time.monotonic() + END_S
        while not all(life.ended or life.done for life in lives) and time.monotonic() < end:
            self.hear(TICK_S)
        for life in lives:
            self.tell(life, leave=True)
        end = time.monotonic() + LEAVES_S
        while not all(life.ended for life in lives) and time.monotonic() < end:
            self.hear(TICK_S)
        for life in self.lives.values():
            if not life.ended:
                self.note("hang", who=life.name)
        self.note("lab", **self.lab.stats().to_json(self.lab.topology.smallest_rtt_ms()))

    def epoch(self) -> int:
        """The highest that a peer has told of."""
        found = [0]
        for path in self.folder.glob("*-*.jsonl"):
            if path.name.endswith(".reports.jsonl"):
                continue
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - 4096))
                for line in log.read().splitlines():
                    with suppress(ValueError):
                        found.append(json.loads(line).get("epoch", 0))
        return max(found)

    def note(self, kind: str, **fields: Any) -> None:
        """Write an event down."""
        self._events.write(json.dumps({"t": kind, "at": time.monotonic(), **fields}) + "\n")

    def _kill_all(self) -> None:
        for life in self.lives.values():
            if life.process.poll() is None:
                life.process.send_signal(signal.SIGCONT)
                life.process.kill()
                life.process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
