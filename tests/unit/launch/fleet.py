"""Machines that are folders: a program named ssh, first on the PATH, runs the commands that reach it here."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from p2pavg.launch.fleet import Fleet
from p2pavg.launch.swarm_file import load
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
# As OpenSSH's client, as far as launch calls it. A machine's folder is its home; TARGET.says is what ssh says
# of a machine that it does not get into; `noise` is what a login shell prints of itself.
SSH = """#!/bin/sh
world={world}
printf '%s\\n' "$*" >> $world/commands
while :; do
    case "$1" in
    -F | -o) shift 2 ;;
    -G) echo "hostname 127.0.0.1"; exit 0 ;;
    *) break ;;
    esac
done
target=$1; shift
if [ -e "$world/$target.says" ]; then cat "$world/$target.says" >&2; exit 255; fi
if [ ! -d "$world/$target" ]; then
    echo "ssh: connect to host $target port 22: Connection refused" >&2; exit 255
fi
cat "$world/noise" 2> /dev/null
unset PIP_FIND_LINKS PIP_CONFIG_FILE PIP_CONSTRAINT
cd "$world/$target" && HOME="$PWD" PATH="$PWD/bin:$PATH" PYTHONPATH={root} exec sh -c "$*"
"""


class World:
    """A launching machine, and those that it reaches."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "world"
        (self.folder / "bin").mkdir(parents=True)
        program = self.folder / "bin" / "ssh"
        program.write_text(SSH.format(world=self.folder, root=ROOT))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.folder / 'bin'}:{os.environ['PATH']}")
        (folder / "home").mkdir()
        monkeypatch.setenv("HOME", str(folder / "home"))
        self.script = folder / "train.py"
        self.script.write_text("print('up', flush=True)\nimport time\ntime.sleep(600)\n")
        self.file = folder / "swarm.toml"

    def machine(self, name: str) -> Path:
        """Make one; its home."""
        home = self.folder / name
        (home / "bin").mkdir(parents=True)
        return home

    def program(self, machine: str, name: str, text: str) -> None:
        """Put a program on a machine's PATH."""
        path = self.folder / machine / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def says(self, machine: str, text: str) -> None:
        """What ssh says of a machine that it does not get into."""
        (self.folder / f"{machine}.says").write_text(text + "\n")

    def commands(self) -> str:
        """The command lines of ssh so far."""
        path = self.folder / "commands"
        return path.read_text() if path.exists() else ""

    def swarm(self, *machines: str, more: str = "", each: str = "", install: bool = False) -> Path:
        """A file that names these machines, with this Python unless `more` names another."""
        common = ['run = "r"', f"install = {str(install).lower()}", f"bootstrap_port = {free_port()}"]
        if "python =" not in more:
            common.append(f"python = {sys.executable!r}")
        entries = [f'[[machine]]\nssh = "{name}"\naddress = "127.0.0.1"\n{each}' for name in machines]
        self.file.write_text("\n".join([*common, more, *entries]))
        return self.file

    def fleet(self) -> Fleet:
        """Of the file."""
        return Fleet(load(self.file))


def package(folder: Path, name: str, version: str, tag: str = "py3-none-any") -> Path:
    """A wheel of one empty package."""
    path, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{inside},,\n" for inside in (*files, f"{info}/RECORD")))
    return path
