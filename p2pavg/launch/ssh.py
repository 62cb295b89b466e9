"""Commands on another machine, through OpenSSH's client with the user's own keys and configuration."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from p2pavg.errors import P2PAvgError

CONNECT_S = 15
UNREACHABLE = 255  # ssh's exit code when there is no connection
MOST_WORDS = 300  # of what a command said last


class MachineError(P2PAvgError):
    """Something went wrong on one machine."""


class Ssh:
    """One machine."""

    def __init__(self, name: str, target: str, config: Path | None) -> None:
        """name: for messages. target: as for ssh. config: another one than the user's."""
        self.name = name
        self._target = target
        self._command = ["ssh", *(() if config is None else ("-F", str(config)))]

    @property
    def command(self) -> list[str]:
        """The client's command line up to the target."""
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
        return [*self._command, *options, self._target]

    def host(self) -> str:
        """The host that ssh connects to, by the user's configuration. Raises MachineError."""
        told = self._run([*self._command, "-G", self._target], b"", 30)
        for line in told.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname":
                return value.strip()
        raise MachineError(f"{self.name}: ssh does not say which host {self._target!r} is")

    def shell(self, script: str, timeout: float) -> str:
        """Run a POSIX shell script in the home directory there; returns its output. Raises MachineError."""
        return self._run([*self.command, "sh", "-s"], script.encode(), timeout)

    def send(self, command: str, data: bytes, timeout: float) -> None:
        """Run a command there, with `data` as its input. Raises MachineError."""
        self._run([*self.command, command], data, timeout)

    def follow(self, command: str) -> int:
        """Run a command there whose output is shown as it comes; returns the exit code."""
        return subprocess.call([*self.command, command], stdin=subprocess.DEVNULL)

    def _run(self, command: Sequence[str], data: bytes, timeout: float) -> str:
        try:
            done = subprocess.run(command, input=data, capture_output=True, timeout=timeout, check=False)
        except FileNotFoundError:
            raise MachineError("there is no ssh here; install OpenSSH's client") from None
        except subprocess.TimeoutExpired:
            raise MachineError(f"{self.name}: nothing came of it in {timeout:.0f} s") from None
        if done.returncode == 0:
            return done.stdout.decode(errors="replace")
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        why = lines[-1].strip()[:MOST_WORDS] if lines else f"exit code {done.returncode}"
        if done.returncode == UNREACHABLE:
            raise MachineError(f"{self.name} cannot be reached ({why}); try 'ssh {self._target}'")
        raise MachineError(f"{self.name}: {why}")
