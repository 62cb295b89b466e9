"""Installing, starting and stopping on a machine, by the shell scripts that travel there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pavg.launch import unit
from p2pavg.launch.remote import Job, Remote
from p2pavg.launch.ssh import Ssh

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0
# As systemd's user manager: `enable --now` starts ExecStart, and again when SIGKILL ended that (a shell
# takes the exit code 241, which a keeper has of a peer that SIGTERM ended, for a signal, too).
SYSTEMCTL = """#!/bin/sh
echo "$*" >> "$HOME/asked"
case "$2" in
show-environment) exit 0 ;;
enable)
    unit="$HOME/.config/systemd/user/$4"
    grep -q '^Restart=on-abnormal' "$unit" || exit 1
    command=$(sed -n 's/^ExecStart=//p' "$unit")
    setsid sh -c 'while :; do eval "$1"; [ $? -eq 137 ] || exit; done' - "$command" \\
        > /dev/null 2>&1 < /dev/null & ;;
esac
"""
LOGINCTL = """#!/bin/sh
[ "$1" = show-user ] && cat "$HOME/linger"
exit 0
"""


class Here(Ssh):
    """A machine that is a folder: its scripts run here."""

    def __init__(self, home: Path) -> None:
        super().__init__("here", "here", None)
        path = f"{home / 'bin'}:{os.environ['PATH']}"
        self._environment = {**os.environ, "HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)}
        self._home = home

    def shell(self, script: str, timeout: float) -> str:
        done = subprocess.run(
            ["sh", "-s"],
            input=script,
            capture_output=True,
            text=True,
            cwd=self._home,
            env=self._environment,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def machine(tmp_path: Path, linger: str) -> tuple[Remote, Path]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "linger").write_text(linger)
    for name, text in (("systemctl", SYSTEMCTL), ("loginctl", LOGINCTL)):
        program = tmp_path / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    remote = Remote(Here(tmp_path), "run", "one")
    folder = tmp_path / ".p2pavg" / "run" / "one"
    (folder / "code").mkdir(parents=True)
    (folder / "python").write_text(sys.executable)
    return remote, folder


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


WAITING = ["-c", "import time; time.sleep(600)"]


def test_a_user_unit_keeps_the_keeper_where_there_is_one(tmp_path: Path) -> None:
    """It is written and enabled; a keeper that is killed is started again; after stop the unit is gone."""
    remote, folder = machine(tmp_path, "yes\n")
    remote.start(Job(WAITING, {}, None, None))
    written = tmp_path / ".config" / "systemd" / "user" / unit.name_of("run", "one")
    assert f'ExecStart="{sys.executable}" -m p2pavg.launch.keeper "{folder}"' in written.read_text()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-2:] == ["--user daemon-reload", "--user enable --now p2pavg-run-one.service"]
    first = json.loads((folder / "state.json").read_text())
    try:
        os.kill(first["keeper"], signal.SIGKILL)
        os.killpg(first["peer"], signal.SIGKILL)  # as systemd does with what is left of a unit
        until(lambda: json.loads((folder / "state.json").read_text())["keeper"] != first["keeper"])
        until(lambda: remote.state()["alive"])
    finally:
        assert remote.stop() == "left"
    assert not written.exists()
    assert "--user disable --now p2pavg-run-one.service" in (tmp_path / "asked").read_text()


def test_without_lingering_the_keeper_stands_by_itself(tmp_path: Path) -> None:
    """A unit would end with the user's session; no unit is written, and the peer runs."""
    remote, folder = machine(tmp_path, "no\n")
    remote.start(Job(WAITING, {}, None, None))
    state = json.loads((folder / "state.json").read_text())
    try:
        assert alive(state["peer"])
        assert not (tmp_path / ".config").exists()
    finally:
        assert remote.stop() == "left"
    assert not alive(state["keeper"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    """As systemd itself verifies it, with a folder in whose name stand a space and a percent sign."""
    text = unit.UNIT.format(run="run", name="one", stop_s=90.0)
    path = tmp_path / unit.name_of("run", "one")
    path.write_text(text.replace("@PYTHON@", sys.executable).replace("@FOLDER@", "/tmp/a b/100%%"))
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    complaints = [line for line in done.stderr.splitlines() if path.name in line]
    assert complaints == []
