"""Real peers in real processes, driven by one line of JSON at a time over their standard input and output."""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from p2pavg.errors import ConfigurationError, P2PAvgError
from p2pavg.lab.topology import Topology
from p2pavg.peer.peer import Peer

START_DEADLINE_S = 180.0
Command = Callable[[dict[str, Any]], Mapping[str, Any]]

Spawn = Callable[[int, Sequence[str], Mapping[str, str]], "subprocess.Popen[bytes]"]


class WorkerError(P2PAvgError):
    """A worker process failed; the message carries its last words."""


class Worker:
    """One child process that answers every JSON line with one JSON line."""

    def __init__(self, index: int, process: subprocess.Popen[bytes]) -> None:
        self.index = index
        self.process = process
        self._buffer = b""

    def send(self, **command: Any) -> None:
        """Write one command; does not wait."""
        try:
            tell(self.process, command)
        except OSError:
            raise WorkerError(f"worker {self.index} ended with code {self.process.wait()}") from None

    def receive(self, deadline_s: float) -> dict[str, Any]:
        """The next answer. Raises WorkerError when the worker ended, failed, or is too slow."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise WorkerError(f"worker {self.index} did not answer within {deadline_s:.0f} s")
                data = os.read(descriptor, 1 << 16)
                if not data:
                    raise WorkerError(f"worker {self.index} ended with code {self.process.wait()}")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:  # arguments, which are the same for all
            raise ConfigurationError(answer["refused"])
        if "error" in answer:
            raise WorkerError(f"worker {self.index}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process: close its input, then kill the process if it does not end by itself."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Workers(AbstractContextManager["Workers"]):
    """N worker processes running `python -m MODULE`, on this machine or on the hosts of a lab topology."""

    def __init__(
        self,
        count: int,
        module: str,
        *,
        topology: str | Topology | None = None,
        environment: Mapping[str, str] | None = None,
        argv: Sequence[str] | None = None,
    ) -> None:
        """argv: a command to run instead of `python -m module`; it must speak the same JSON lines."""
        self._stack = ExitStack()
        self.lab: Any = None
        self.topology = topology
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        command = [sys.executable, "-m", module] if argv is None else list(argv)
        self.workers: list[Worker] = []
        try:
            spawn = self._spawner(count)
            self._spawn: Callable[[int], subprocess.Popen[bytes]] = lambda index: spawn(
                index, command, variables
            )
            for _ in range(count):
                self.another()
        except BaseException:
            self._stack.close()
            raise

    def another(self) -> Worker:
        """One more process; in the lab there must be a host for it."""
        index = len(self.workers)
        worker = Worker(index, self._spawn(index))
        self._stack.callback(worker.close)
        self.workers.append(worker)
        return worker

    def _spawner(self, count: int) -> Spawn:
        if self.topology is None:
            return lambda _, argv, env: start(argv, env)
        from p2pavg.lab import Lab

        lab = self._stack.enter_context(Lab(self.topology))
        self.lab = lab
        hosts = list(lab.hosts)
        if count > len(hosts):
            raise WorkerError(
                f"topology {self.topology!r} has {len(hosts)} hosts; use --peers {len(hosts)} or fewer"
            )
        return lambda index, argv, env: start(argv, env, lab=lab, host=hosts[index])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def all(self, *, deadline_s: float, **command: Any) -> list[dict[str, Any]]:
        """Send one command to every worker at once and gather the answers in order."""
        for worker in self.workers:
            worker.send(**command)
        return [worker.receive(deadline_s) for worker in self.workers]

    def lab_verdict(self) -> dict[str, Any]:
        """How late the lab's router was, and its byte counters; empty outside the lab."""
        if self.lab is None:
            return {}
        return {"lab": self.lab.stats().to_json(self.lab.topology.smallest_rtt_ms())}

    def join(self, **config: Any) -> list[dict[str, Any]]:
        """Start every worker's peer: the first opens the swarm, the others join through its address."""
        first = self.workers[0]
        first.send(do="start", index=0, initial_peers=[], **config)
        answers = [first.receive(START_DEADLINE_S)]
        for worker in self.workers[1:]:
            worker.send(do="start", index=worker.index, initial_peers=[answers[0]["address"]], **config)
        answers += [worker.receive(START_DEADLINE_S) for worker in self.workers[1:]]
        return answers


def start(
    argv: Sequence[str], env: Mapping[str, str], *, lab: Any = None, host: str | None = None
) -> subprocess.Popen[bytes]:
    """A process that speaks JSON lines over its standard input and output, here or on a host of the lab."""
    pipe = subprocess.PIPE
    if lab is None:
        return subprocess.Popen(list(argv), env=dict(env), stdin=pipe, stdout=pipe)
    process: subprocess.Popen[bytes] = lab.spawn(host, list(argv), env=dict(env), stdin=pipe, stdout=pipe)
    return process


def tell(process: subprocess.Popen[bytes], command: Mapping[str, Any]) -> None:
    """Write one line to a process. Raises OSError when the process has ended."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")
    process.stdin.flush()


def own_host() -> str:
    """The address on which this process listens: its host's in the lab, else the loopback's."""
    return os.environ.get("P2PAVG_LAB_ADDRESS", "127.0.0.1")


def start_peer(run_id: str, config: Mapping[str, Any], **options: Any) -> Peer:
    """The peer of a worker, in the swarm that its configuration names. Raises what `Peer.start` raises."""
    return Peer(run_id, initial_peers=config["initial_peers"], listen=f"{own_host()}:0", **options).start()


def serve(*commands: Command) -> int:
    """A worker's main loop: one JSON command a line, {"do": name, ...}, one JSON answer a line; ends with
    its input.
    """
    handlers = {command.__name__: command for command in commands}
    logging.getLogger("p2pavg").setLevel(logging.ERROR)  # without the warning that the run is open
    for line in sys.stdin.buffer:
        command = json.loads(line)
        try:
            answer = dict(handlers[command.pop("do")](command))
        except ConfigurationError as error:
            answer = {"refused": str(error)}
        except P2PAvgError as error:
            answer = {"error": str(error)}
        except MemoryError as error:
            answer = {"error": f"the memory does not suffice ({error}); measure less, or fewer peers"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0
