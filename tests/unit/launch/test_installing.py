"""What a launch installs on a machine, with the machine's own venv and pip."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from p2pavg.launch import remote
from p2pavg.launch.ssh import MachineError
from p2pavg.launch.wheel import Wheels
from tests.unit.launch.fleet import World, package


def versions(python: Path) -> list[str]:
    command = [python, "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_an_installation_obeys_constraints_and_mends_what_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constraint of the file decides a version; what is there already is left alone; a virtual environment
    that lost its pip, as when a launch was killed while making it, is made anew.
    """
    world = World(tmp_path, monkeypatch)
    home = world.machine("one")
    wheel = package(tmp_path, "p2pavg", "0.1")
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for version in ("1.0", "2.0"):
        package(shelf, "leaf", version)
    limits = tmp_path / "limits.txt"
    limits.write_text("leaf < 2\n")
    pip = f"pip = {{no-index = true, find-links = {str(shelf)!r}}}"
    world.swarm("one", more=f'packages = ["leaf"]\nconstraints = "limits.txt"\n{pip}', install=True)

    def install() -> None:
        fleet = world.fleet()
        fleet.remotes["one"].install(sys.executable, Wheels([wheel]), fleet.swarm)

    install()
    venv = home / ".p2pavg" / "r" / "one" / "venv"
    python = venv / "bin" / "python"
    assert {"leaf==1.0", "p2pavg==0.1"} <= set(versions(python))
    made = (venv / "pyvenv.cfg").stat().st_mtime_ns
    before = world.commands().count("\n")
    install()
    assert world.commands().count("\n") == before + 1  # a look suffices
    limits.write_text("leaf >= 2\n")
    install()
    assert "leaf==2.0" in versions(python)
    assert (venv / "pyvenv.cfg").stat().st_mtime_ns == made
    (pip_of_it,) = venv.glob("lib/python*/site-packages/pip")
    shutil.rmtree(pip_of_it)
    install()
    assert {"leaf==2.0", "p2pavg==0.1"} <= set(versions(python))


def test_two_launches_that_install_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits for the first, and says so when that does not end; nothing is touched."""
    world = World(tmp_path, monkeypatch)
    folder = world.machine("one") / ".p2pavg" / "r" / "one"
    folder.mkdir(parents=True)
    world.swarm("one", install=True)
    monkeypatch.setattr(remote, "OTHER_S", 0)
    fleet, wheels = world.fleet(), Wheels([package(tmp_path, "p2pavg", "0.1")])
    with (folder / "installing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(MachineError, match="one: another launch has been installing there for 0 s"):
            fleet.remotes["one"].install(sys.executable, wheels, fleet.swarm)
    assert not (folder / "venv").exists()
