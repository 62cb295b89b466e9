"""One machine of a launched swarm: installing, starting, looking and stopping there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from p2pavg.launch import pip, unit
from p2pavg.launch.ssh import MachineError, Ssh
from p2pavg.launch.swarm_file import SwarmFile
from p2pavg.launch.wheel import ASKED, OLDEST, Wheels, too_old

HOME = ".p2pavg"  # in the home directory of that machine
INSTALL_S = 1800.0
STEP_S = 120.0
KEEPER_S = 30  # for a keeper to have started its peer
OTHER_S = 900  # for another launch, which installs into the same folder, to be through
LEAVES_S = 90.0  # that a peer may take: more than the default notice
LIVED = ("running", "crashed", "away")  # states that a keeper wrote which was killed afterwards


@dataclass(frozen=True, slots=True)
class Job:
    """What a keeper keeps alive."""

    arguments: Sequence[str]  # of the interpreter there, which runs in the folder `code`
    environment: Mapping[str, str]
    credentials: str | None  # the secret line of this member; None: an open run
    watcher: str | None  # and of a member that only looks on


class Remote:
    """A folder of one machine, and the peer (or bootstrap node) whose folder that is."""

    def __init__(self, ssh: Ssh, run: str, name: str) -> None:
        """Both names have letters, digits, `.`, `_` and `-` alone."""
        self.ssh = ssh
        self._run, self._name = run, name
        self._folder = f"{HOME}/{run}/{name}"

    def install(self, python: str, wheels: Wheels | None, swarm: SwarmFile) -> None:
        """Make a virtual environment with p2pavg and the swarm's packages, or bring up to date what is there.
        wheels: of p2pavg; None: `python` has everything. Raises MachineError.
        """
        lines = ["set -e", f"mkdir -p {self._folder}/code && cd {self._folder}", *_found(python)]
        if wheels is None:
            without = f"{python} there has no p2pavg: leave install = false out, or name another with python="
            lines += [
                f'"$P" -c {shlex.quote(_HAS_PACKAGE)} 2> /dev/null || {_refused(without)}',
                'printf %s "$P" > python',
            ]
            self.ssh.shell("\n".join(lines), STEP_S)
            return
        ask = [f'"$P" -c {shlex.quote(ASKED)}', f"{_SAME_PYTHON} && cat installed 2> /dev/null || true"]
        told, _, before = self.ssh.shell("\n".join([*lines, *ask]), STEP_S).partition("\n")
        wheel = self.fitting(wheels, python, told)
        options, constraints = pip.configuration(swarm.pip), swarm.limits()
        carried = sha256(wheel.read_bytes() + options.encode() + b"\0" + constraints.encode()).hexdigest()
        described = f"{carried} {' '.join(swarm.packages)}"
        if before.strip() == described.strip():
            return
        self.ssh.send(f"cat > {self._folder}/{shlex.quote(wheel.name)}", wheel.read_bytes(), INSTALL_S)
        wanted = " ".join(shlex.quote(package) for package in swarm.packages)
        # The script is the shell's input: nothing may read from there, or ask.
        command = "< /dev/null venv/bin/python -m pip install --no-input --quiet --no-compile"
        command += " --disable-pip-version-check"
        no_venv = (
            f"{python} there makes no virtual environment: install its module venv (Debian, Ubuntu: apt "
            "install python3-venv), or name another with python="
        )
        busy = f"another launch has been installing there for {OTHER_S} s"
        lines += [
            "if command -v flock > /dev/null; then exec 9> installing; "
            f"flock -w {OTHER_S} 9 || {_refused(busy)}; fi",
            "rm -f installed",
            f'NEW=; {_SAME_PYTHON} || {{ NEW=1; "$P" -m venv --clear venv >&2 || {_refused(no_venv)}; }}',
            f"( umask 077; printf %s {shlex.quote(options)} > venv/pip.conf )",
            f"printf %s {shlex.quote(constraints)} > constraints.txt",
            f"{command} -c constraints.txt {wanted} ./{shlex.quote(wheel.name)} >&2",
            # of the same version, too
            f'[ "$NEW" ] || {command} --force-reinstall --no-deps ./{shlex.quote(wheel.name)} >&2',
            'printf %s "$PWD/venv/bin/python" > python',
            f"printf %s {shlex.quote(described)} > installed",
        ]
        self.ssh.shell("\n".join(lines), INSTALL_S)

    def fitting(self, wheels: Wheels, python: str, told: str) -> Path:
        """The wheel for a Python that told so of itself. Raises MachineError."""
        try:
            fitting = None if too_old(told) else wheels.fitting(told)
        except ValueError:
            raise MachineError(
                f"{self.ssh.name}: {python} there is no Python (it says {told[:60]!r}); name one with python="
            ) from None
        if fitting is not None:
            return fitting
        version = told.split()[0]
        if too_old(told):
            raise MachineError(
                f"{self.ssh.name}: {python} there is Python {version}, and p2pavg needs "
                f"{'.'.join(map(str, OLDEST))} or newer: name another one with python="
            )
        raise MachineError(
            f"{self.ssh.name}: no wheel fits its Python ({told.strip()}): 'make wheel' makes more; "
            "name their folder with wheel="
        )

    def look(self, python: str) -> tuple[str, int]:
        """What that Python tells of itself (see `wheel.ASKED`), and the bytes that are free in the home
        directory. Changes nothing. Raises MachineError.
        """
        lines = [
            *_found(python),
            f'"$P" -c {shlex.quote(ASKED)}',
            "df -Pk . 2> /dev/null | sed -n '2s/^.* \\([0-9]*\\) *[0-9]*% .*/\\1/p'",
        ]
        told, _, free = self.ssh.shell("\n".join(lines), STEP_S).partition("\n")
        return told, int(free.strip() or 0) * 1024

    def share(self, other: Remote) -> None:
        """Use what another folder of the same machine has installed. Raises MachineError."""
        self.ssh.shell(
            f"set -e\nmkdir -p {self._folder}/code\ncp {other._folder}/python {self._folder}/python", STEP_S
        )

    def copy(self, code: bytes) -> None:
        """Bring the code there, as `code.packed` makes it. Raises MachineError."""
        self.ssh.send(f"tar -xzf - -C {self._folder}/code", code, INSTALL_S)

    def set_up(self, commands: Sequence[str], timeout: float) -> None:
        """Run the user's commands in the code, with the environment's programs first. Raises MachineError."""
        if commands:
            path = f'set -e\ncd {self._folder}/code\nexport PATH="$(dirname "$(cat ../python)"):$PATH"'
            each = (f"( {command}\n) >&2 < /dev/null" for command in commands)
            self.ssh.shell("\n".join([path, *each]), timeout)

    def start(self, job: Job) -> None:
        """Start a keeper, which lives on without this connection. Raises MachineError."""
        secret = "rm -f credentials watcher"
        if job.credentials is not None and job.watcher is not None:
            secret = (
                f"printf %s {shlex.quote(job.credentials)} > credentials\n"
                f"printf %s {shlex.quote(job.watcher)} > watcher"
            )
        described = json.dumps({"arguments": list(job.arguments), "environment": dict(job.environment)})
        silent = f"echo 'its keeper wrote nothing in {KEEPER_S} s: is the disk full, or the machine slow?'"
        running = "its peer runs already; 'p2pavg launch stop' lets that peer leave"
        alone = 'nohup setsid "$PY" -m p2pavg.launch.keeper "$D" > keeper.log 2>&1 < /dev/null &'
        lines = [
            "set -e",
            "umask 077",
            f"cd {self._folder}",
            f"if {_ALIVE}; then echo {shlex.quote(running)} >&2; exit 4; fi",
            secret,
            "rm -f state.json",
            "D=$(pwd -P); PY=$(cat python)",
            f"printf %s {shlex.quote(described)} > peer.json",
            ": > keeper.log",
            *unit.starting(self._run, self._name, LEAVES_S, alone),
            f"i=0; until [ -s state.json ] || [ $i -ge {10 * KEEPER_S} ]; do sleep 0.1; i=$((i+1)); done",
            f"[ -s state.json ] || {{ tail -n 1 keeper.log; [ -s keeper.log ] || {silent}; exit 6; }} >&2",
        ]
        self.ssh.shell("\n".join(lines), STEP_S)

    def state(self) -> Mapping[str, Any]:
        """What the keeper wrote last, and `alive`: whether a keeper runs. Raises MachineError."""
        lines = [
            f"cd {self._folder} 2>/dev/null || {{ echo '{{}}'; exit 0; }}",
            f"if {_ALIVE}; then echo alive; else echo gone; fi",
            "cat state.json 2>/dev/null || echo '{}'",
        ]
        alive, _, told = self.ssh.shell("\n".join(lines), STEP_S).partition("\n")
        try:
            state = json.loads(told or "{}")
        except ValueError:
            state = {}
        return {**state, "alive": alive.strip() == "alive"}

    def stop(self) -> str:
        """Let the peer leave, and wait until its keeper has ended. Returns the state. Raises MachineError."""
        lines = [
            f"cd {self._folder} 2>/dev/null || exit 0",
            f"if {_ALIVE}; then kill -TERM $(cat keeper.lock); else {_ORPHAN}; fi",
            f"i=0; while {_ALIVE} && [ $i -lt {round(10 * LEAVES_S)} ]; do sleep 0.1; i=$((i+1)); done",
            f"if {_ALIVE}; then echo 'it has not left in {LEAVES_S:.0f} s' >&2; exit 5; fi",
            *unit.stopping(self._run, self._name),
        ]
        self.ssh.shell("\n".join(lines), LEAVES_S + STEP_S)
        state = self.state()
        told = str(state.get("state", "not started"))
        return "left" if told in LIVED and not state["alive"] else told

    def tail(self, lines: int) -> str:
        """The end of the peer's log, and of the keeper's where that has something to say. Raises
        MachineError.
        """
        never = f"{self._name} was never started there"
        return self.ssh.shell(
            f"cd {self._folder} 2> /dev/null && [ -e keeper.log ] || {_refused(never)}\n"
            f"cat keeper.log; cat peer.log.1 peer.log 2> /dev/null | tail -n {lines}",
            STEP_S,
        )

    def follow(self, lines: int) -> int:
        """Show the log as it grows, until Ctrl-C. Raises MachineError."""
        self.tail(1)
        return self.ssh.follow(f"tail -n {lines} -F {self._folder}/peer.log")

    def peers(self, run: str, initial_peer: str) -> str:
        """What `p2pavg peers --json -` prints there. Raises MachineError."""
        command = (
            f'"$(cat python)" -m p2pavg peers {run} --initial-peers {shlex.quote(initial_peer)} --json -'
        )
        lines = [
            f"cd {self._folder}",
            "C=$([ -e watcher ] && echo '--credentials watcher')",
            f"{command} $C 2> /dev/null || true",
        ]
        return self.ssh.shell("\n".join(lines), STEP_S)


def _refused(sentence: str) -> str:
    """Ends a script with a sentence."""
    return f"{{ echo {shlex.quote(sentence)} >&2; exit 3; }}"


def _found(python: str) -> Sequence[str]:
    """Lines of a script that set P to the path of a Python."""
    missing = f"there is no {python} on that machine; name another one with python="
    return [f"P=$(command -v {shlex.quote(python)}) || {_refused(missing)}"]


_HAS_PACKAGE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('p2pavg') is None)"
# Whether the virtual environment is whole, and of the Python P.
_SAME_PYTHON = (
    f'{{ [ "$(venv/bin/python -c {shlex.quote(ASKED)} 2> /dev/null)" = "$("$P" -c {shlex.quote(ASKED)})" ] '
    "&& venv/bin/python -c 'import pip' 2> /dev/null; }"
)
# Whether a keeper holds its lock: the file names the process, and stays when that process is gone.
_ALIVE = (
    '[ -s keeper.lock ] && kill -0 "$(cat keeper.lock)" 2>/dev/null '
    '&& ! { [ -r "/proc/$(cat keeper.lock)/cmdline" ] '
    '&& ! tr "\\0" " " < "/proc/$(cat keeper.lock)/cmdline" '
    '| grep -qF "p2pavg.launch.keeper $(pwd -P)"; }'
)
# A peer whose keeper was killed is asked to leave: the process that state.json names, if it works in this
# folder.
_ORPHAN = (
    "P=$(sed -n 's/.*\"peer\": \\([0-9]*\\).*/\\1/p' state.json 2>/dev/null); "
    'if [ -n "$P" ] && [ "$(readlink "/proc/$P/cwd")" = "$(pwd -P)/code" ]; then kill -TERM "$P"; '
    'i=0; while kill -0 "$P" 2>/dev/null && [ $i -lt 900 ]; do sleep 0.1; i=$((i+1)); done; fi'
)
