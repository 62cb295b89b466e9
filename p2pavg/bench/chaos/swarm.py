"""The swarm of `bench chaos`: processes, their events, and the faults."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from p2pavg.bench.chaos.check import HANG_S
from p2pavg.bench.chaos.kinds import BREAKS, CUT_S, DRAINS_S, GARBAGE_BYTES, STAGES, STOP_S
from p2pavg.bench.chaos.process import SwarmProcess, send_garbage
from p2pavg.bench.workers import WorkerError, start, tell
from p2pavg.credentials import Authority

RUN = "chaos"
NUMEL = 8192  # values of the vector
HALT_S = 5.0  # in which a process that says so has stopped itself
START_S = 180.0  # without a word


class Swarm(AbstractContextManager["Swarm"]):
    """Keeps `peers` processes training until all have applied `epochs` epochs, and injects faults."""

    worker = "p2pavg.bench.chaos.worker"
    ends_s = 15.0  # in which a process that is told to end does

    def __init__(
        self,
        *,
        peers: int,
        epochs: int,
        steps: int,
        epoch_seconds: float,
        topology: str | None,
        seed: int,
        encrypted: bool,
        numel: int = NUMEL,
        plan: str | None = None,
        regions: int = 0,
    ) -> None:
        """encrypted: make the run a closed one. plan: of the rounds. regions: that peers say they are in; 0:
        they say nothing.
        """
        self.events: list[dict[str, Any]] = []
        self._peers = peers
        self._epochs = epochs
        self._config: dict[str, Any] = {
            "target": peers * steps,
            "step_seconds": epoch_seconds / steps,
            "epochs": epochs,
            "numel": numel,
            **({} if plan is None else {"plan": plan}),
        }
        self._regions = [f"region-{number}" for number in range(regions)]
        self._topology = topology
        self._random = random.Random(seed)
        self._authority = Authority.new(RUN) if encrypted else None
        self._members: dict[str, SwarmProcess] = {}
        self._queue: queue.Queue[tuple[str, dict[str, Any] | None]] = queue.Queue()
        self._stack = ExitStack()
        self._lab: Any = None
        self._fresh: list[SwarmProcess] = []  # of the start that is under way
        self._born = 0
        self._undo: list[tuple[float, Callable[[], None]]] = []

    def __enter__(self) -> Swarm:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pavg-chaos-")))
        if self._topology is not None:
            from p2pavg.lab import Lab

            self._lab = self._stack.enter_context(Lab(self._topology))
            if self._peers > len(self._lab.hosts):
                self._stack.close()
                raise WorkerError(f"topology {self._topology!r} has only {len(self._lab.hosts)} hosts")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members.values():
            if member.process.poll() is None:
                member.process.send_signal(signal.SIGCONT)
                member.process.kill()
            member.process.wait()
        self._stack.close()

    # ------------------------------------------------------------------------------------ the run

    def run(self, faults: Sequence[str], fault_every: float, advance: Callable[[float], None]) -> None:
        """Start, inject faults, and wait for the end. Raises WorkerError when the swarm cannot start."""
        self._note("", "run", peers=self._peers)
        self._start()
        next_fault = time.monotonic() + fault_every
        shown = 0
        while not self._over():
            now = time.monotonic()
            if now >= next_fault and faults:
                self._fault(self._random.choice(list(faults)))
                next_fault = now + fault_every * self._random.uniform(0.7, 1.3)
            self._repair(now)
            self._beat()
            self._pump(0.05)
            latest = max((m.epoch for m in self._members.values()), default=0)
            if latest > shown:
                advance(latest - shown)
                shown = latest
            if any(self._hangs(m, now) for m in self._members.values()):
                break
        self._mend()
        self._finish()

    def _mend(self) -> None:
        """End all faults that are under way."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()

    def _start(self) -> None:
        """All processes, one after the other, so that each knows the others."""
        self._fresh.clear()
        for _ in range(self._peers):
            self._spawn()
            self._wait_until(lambda: all(m.address for m in self._fresh))
        self._wait_until(lambda: all(m.joined for m in self._fresh))

    def _over(self) -> bool:
        members = self._living()
        return bool(members) and all(m.finished for m in members)

    def _hangs(self, member: SwarmProcess, now: float) -> bool:
        if member.process.poll() is not None or member.finished:
            return False
        if now - max(member.heard_at, member.stopped_until) > HANG_S:
            self._note(member.who, "hang", epoch=member.epoch)
            return True
        return False

    def _finish(self) -> None:
        """Let every process leave in order; a process that does not leave counts as hanging."""
        for member in self._living():
            assert member.process.stdin is not None
            member.process.stdin.close()
        deadline = time.monotonic() + self.ends_s
        for member in self._living():
            try:
                member.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._note(member.who, "hang", epoch=member.epoch)
        self._pump(0.2)

    # ---------------------------------------------------------------------------------- processes

    def _living(self) -> list[SwarmProcess]:
        return [m for m in self._members.values() if m.process.poll() is None]

    def _own(self, who: str) -> dict[str, str]:
        if self._authority is not None:
            return {"credentials": self._authority.member().to_text()}
        return {"identity": str(self._folder / f"{who}.key")}

    def _spawn(self, own: dict[str, str] | None = None, host: str | None = None) -> SwarmProcess:
        who = f"p{self._born}"
        self._born += 1
        argv = [sys.executable, "-m", self.worker]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self._lab is not None:
            used = {m.host for m in self._living()}
            host = host or next((h for h in self._lab.hosts if h not in used), self._lab.hosts[0])
        process = start(argv, env, lab=self._lab, host=host)
        member = SwarmProcess(who, host, process, own or self._own(who), heard_at=time.monotonic())
        here = [m.region for m in self._living()]
        member.region = min(self._regions, key=here.count, default="")
        known = [m.address for m in self._living() if m.address]
        config = {
            **self._config,
            "run_id": RUN,
            "initial_peers": self._random.sample(known, min(3, len(known))),
            "own": member.own,
            **({"region": member.region} if member.region else {}),
            **self._configured(),
        }
        tell(process, config)
        threading.Thread(target=self._read, args=(member,), daemon=True).start()
        self._members[who] = member
        self._fresh.append(member)
        return member

    def _configured(self) -> dict[str, Any]:
        """What else a process is told."""
        return {}

    def _beat(self) -> None:
        """Called time and again, during the run."""

    def _read(self, member: SwarmProcess) -> None:
        assert member.process.stdout is not None
        for line in member.process.stdout:
            self._queue.put((member.who, json.loads(line)))
        self._queue.put((member.who, None))

    def _pump(self, seconds: float) -> None:
        """Read the events that the processes have written."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                who, event = self._queue.get(timeout=left)
            except queue.Empty:
                return
            self._take(self._members[who], event)

    def _take(self, member: SwarmProcess, event: dict[str, Any] | None) -> None:
        if event is None:
            self._note(member.who, "ended", code=member.process.wait())
            return
        member.heard_at = time.monotonic()
        self.events.append({"who": member.who, **event})
        match event["t"]:
            case "up":
                member.address, member.peer = event["address"], event["peer"]
            case "joined":
                member.joined = True
            case "epoch":
                member.epoch, member.leader = event["epoch"], event["leader"]
            case "finished":
                member.finished = True
            case "halts":
                self._strike(member, event["stage"])
            case "dies":
                self._log(f"leader-{event['phase']}", member.who, 0.0)

    def _note(self, who: str, kind: str, **fields: Any) -> None:
        self.events.append({"who": who, "t": kind, "at": time.monotonic(), **fields})

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Raises WorkerError when a process of the start ended, or those that have not joined said nothing
        for START_S.
        """
        begun = time.monotonic()
        while not ready():
            self._pump(0.05)
            ended = [m.who for m in self._fresh if m.process.poll() is not None]
            waiting = [m for m in self._fresh if not m.joined]
            if ended or time.monotonic() > max([begun, *(m.heard_at for m in waiting)]) + START_S:
                why = f"{ended[0]} ended" if ended else f"nothing was heard for {START_S:.0f} s"
                raise WorkerError(
                    f"the swarm did not start: {why}, and {len(waiting)} of {len(self._fresh)} processes "
                    "have not joined; use an idle machine, or run one peer by hand to see why"
                )

    # -------------------------------------------------------------------------------------- faults

    def _fault(self, name: str) -> None:
        targets = self._targets()
        if len(targets) < 2 and name != "join":
            return
        victim = self._random.choice(targets) if targets else None
        if name.startswith("leader"):
            leading = [m for m in targets if any(m.peer == other.leader for other in targets)]
            victim = leading[0] if leading else victim
        match name:
            case "join":
                if len(self._living()) < self._peers + 1 and self._room():
                    self._log(name, "", 0.0)
                    self._spawn()
            case "all-but-one":
                for member in targets[1:]:
                    self._kill(member, name)
            case "kill" | "leader" if victim is not None:
                self._kill(victim, name)
            case _ if name.startswith("leader-") and victim is not None:
                with suppress(OSError):
                    tell(victim.process, {"die_at": name.removeprefix("leader-")})
            case "stop" if victim is not None:
                self._stop(victim)
            case "stages" if victim is not None:
                kinds = ("kill", "stop", *(("cut", "cut-one-way") if self._lab is not None else ()))
                victim.halted_for = self._random.choice(kinds)
                with suppress(OSError):
                    tell(victim.process, {"halt_at": self._random.choice(STAGES)})
            case "leave" if victim is not None:
                self._leave(victim)
            case "cut" | "cut-one-way" | "slow" if victim is not None:
                self._break_link(name, victim)
            case "corrupt" if victim is not None:
                if self._lab is None:
                    self._log(name, "", 0.0)
                else:
                    self._break_link(name, victim)
                send_garbage(victim, self._random.randbytes(GARBAGE_BYTES), self._lab)
            case "duplicate" if victim is not None and len(self._living()) <= self._peers and self._room():
                double = self._spawn(own=victim.own)
                self._log(name, "", 0.0, share=[victim.who, double.who])
                double.finished = True  # the run does not wait for this process
                self._undo.append((time.monotonic() + 3.0, lambda: self._kill_quietly(double)))

    def _strike(self, member: SwarmProcess, stage: str) -> None:
        """A member is about to stop itself at a stage of a transfer."""
        if not member.stops_within(HALT_S):
            return
        match member.halted_for:
            case "kill":
                self._kill(member, "kill", stage=stage)
            case "stop":
                self._stop(member, stage=stage)
            case name:
                self._break_link(name, member, stage=stage)
                member.process.send_signal(signal.SIGCONT)

    def _targets(self) -> list[SwarmProcess]:
        """Whom a fault may strike."""
        return [m for m in self._living() if m.joined and not m.finished and not m.stopped_until]

    def _leave(self, victim: SwarmProcess) -> None:
        raise NotImplementedError

    def _room(self) -> bool:
        return self._lab is None or len(self._living()) < len(self._lab.hosts)

    def _log(self, name: str, victim: str, seconds: float, **fields: Any) -> None:
        self._note("", "fault", fault=name, victim=victim, until=time.monotonic() + seconds, **fields)

    def _kill(self, member: SwarmProcess, name: str, **fields: Any) -> None:
        self._log(name, member.who, 0.0, **fields)
        member.process.kill()

    def _kill_quietly(self, member: SwarmProcess) -> None:
        if member.process.poll() is None:
            member.process.kill()

    def _stop(self, member: SwarmProcess, **fields: Any) -> None:
        seconds = self._random.uniform(*STOP_S)
        self._log("stop", member.who, seconds, **fields)
        member.process.send_signal(signal.SIGSTOP)
        member.stopped_until = time.monotonic() + seconds

        def resume() -> None:
            if member.process.poll() is None:
                member.process.send_signal(signal.SIGCONT)
            member.heard_at = time.monotonic()
            member.stopped_until = 0.0

        self._undo.append((member.stopped_until, resume))

    def _break_link(self, name: str, victim: SwarmProcess, **fields: Any) -> None:
        """Break all paths from and to a host for a while; "cut-one-way" breaks those of one direction."""
        seconds = self._random.uniform(*CUT_S)
        settings = BREAKS[name]
        self._log(name, victim.who, seconds + DRAINS_S.get(name, 0.0), **fields)
        paths = [pair for pair in self._lab.topology.paths if victim.host in pair]
        broken = paths
        if name == "cut-one-way":
            side = self._random.randrange(2)
            broken = [pair for pair in paths if pair[side] == victim.host]
        for pair in broken:
            self._lab.set(*pair, **settings)
        victim.stopped_until = time.monotonic() + seconds

        def mend() -> None:
            for pair in broken:
                usual = self._lab.topology.paths[pair]
                self._lab.set(*pair, **{setting: getattr(usual, setting, 0) for setting in settings})
            victim.heard_at = time.monotonic()
            victim.stopped_until = 0.0

        self._undo.append((victim.stopped_until, mend))

    def _repair(self, now: float) -> None:
        """End faults whose time is over, and bring the swarm back to its size."""
        due = [entry for entry in self._undo if entry[0] <= now]
        self._undo = [entry for entry in self._undo if entry[0] > now]
        for _, undo in due:
            undo()
        starting = [m for m in self._living() if not m.joined]
        short = len(self._living()) < self._peers and len(starting) < 2 and not self._over()
        if short and any(m.joined for m in self._living()) and self._room():
            self._spawn()
