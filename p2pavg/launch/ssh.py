"""Commands on another machine, through OpenSSH's client with the user's own keys and configuration."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from p2pavg.errors import P2PAvgError
from p2pavg.printable import printable

CONNECT_S = 15
ALIVE_S = 15  # between questions whether the other end is there; after three without an answer it is not
UNREACHABLE = 255  # ssh's exit code when there is no connection
MOST_WORDS = 300  # of what a command said last
BEGINS = "p2pavg begins here"  # what stands before it is of the shell's own start, such as of ~/.bashrc
# Lines after the one that says what went wrong.
_AFTERWARDS = re.compile(r"(hint|note|\[notice\])|.*(exiting now|previous errors)", re.IGNORECASE)


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
        options += ["-o", f"ServerAliveInterval={ALIVE_S}"]
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
        told = self._run([*self.command, "sh", "-s"], f"echo {BEGINS!r}\n{script}".encode(), timeout)
        _, begins, said = told.partition(f"{BEGINS}\n")
        return said if begins else told

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
        why = reason(done.stderr) or reason(done.stdout) or f"exit code {done.returncode}"
        if done.returncode == UNREACHABLE:
            raise MachineError(f"{self.name} cannot be reached ({why}); {self._hint(why)}")
        raise MachineError(f"{self.name}: {why}")

    def _hint(self, why: str) -> str:
        """What to do about a connection that does not come about."""
        by_hand = shlex.join([*self._command, self._target])
        if "Permission denied" in why:
            return (
                "nobody is asked for a password here: let a key of yours in (ssh-copy-id), or give it to "
                f"ssh-agent (ssh-add), until '{by_hand}' asks for nothing"
            )
        if "Host key verification failed" in why:
            return f"'{by_hand}' shows that machine's key, and whether it is another one than before"
        return f"try '{by_hand}'"


def reason(output: bytes) -> str:
    """The line of a program's output that says what went wrong, as far as a line can be told apart; empty:
    the program said nothing.
    """
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if not _AFTERWARDS.match(line)] or lines
    return printable(telling[-1])[:MOST_WORDS] if telling else ""
