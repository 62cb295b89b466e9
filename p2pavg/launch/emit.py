"""`--to docker` and `--to sky`: write what those need into a folder, and start it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from p2pavg.credentials import Authority
from p2pavg.errors import ConfigurationError, P2PAvgError
from p2pavg.launch import compose, pip, sky
from p2pavg.launch import wheel as wheels
from p2pavg.launch.code import packed
from p2pavg.launch.swarm_file import SwarmFile

NEEDS = {"docker": "Docker, with its compose plugin", "sky": "SkyPilot (pip install skypilot)"}


class Emission:
    """One folder: code, wheel, credentials, and the files of the tool that starts the peers."""

    def __init__(self, swarm: SwarmFile, script: Path, arguments: Sequence[str], folder: Path) -> None:
        self._swarm = swarm
        self._script = script
        self._arguments = arguments
        self._folder = folder
        self._authority = Authority.new(swarm.run) if swarm.closed else None

    def docker(self) -> list[list[str]]:
        """Write an image and a compose file. Returns the commands that start them. Raises P2PAvgError."""
        script, made = self._code(), self._wheel()
        if made is None:
            raise ConfigurationError("an image needs a wheel: leave install = false out")
        names = [machine.name for machine in self._swarm.machines]
        services = names if self._swarm.bootstrap is not None else ["bootstrap", *names]
        secrets = {} if self._authority is None else {name: f"{name}.credentials" for name in services}
        files = {
            "Dockerfile": compose.dockerfile(self._swarm, made.name, "code"),
            "compose.yaml": compose.compose(self._swarm, script, self._arguments, secrets),
            ".dockerignore": f"**/*.credentials\n**/*.secret\n{compose.PIP}\n",
        }
        if self._swarm.constraints is not None:
            files[compose.CONSTRAINTS] = self._swarm.limits()
        private = {path: self._member() for path in secrets.values()}
        if self._swarm.pip:
            private[compose.PIP] = pip.configuration(self._swarm.pip)
        self._write(files, private)
        return [["docker", "compose", "up", "--build", "--detach"]]

    def sky(self) -> list[list[str]]:
        """Write a managed job per peer. Returns the commands that start them. Raises P2PAvgError."""
        if self._swarm.bootstrap is None:
            raise ConfigurationError(
                "bootstrap = HOST:PORT is missing: rented machines find each other through a node with an "
                "address of its own, such as 'p2pavg bootstrap' on one that stays"
            )
        script, made = self._code(), self._wheel()
        files, private, commands = {}, {}, []
        for machine in self._swarm.machines:
            name = None if made is None else made.name
            files[f"{machine.name}.yaml"] = sky.task(self._swarm, machine, script, self._arguments, name)
            secret = None
            if names := sky.secrets(self._swarm):
                secret = f"{machine.name}.secret"
                credentials = None if self._authority is None else self._member()
                private[secret] = sky.secret_file(self._swarm, credentials)
                assert private[secret].count("\n") == len(names)
            commands.append(sky.launching(self._swarm, machine, f"{machine.name}.yaml", secret))
        if self._swarm.constraints is not None:
            files[compose.CONSTRAINTS] = self._swarm.limits()
        self._write(files, private)
        return commands

    def _member(self) -> str:
        assert self._authority is not None
        return self._authority.member().to_text()

    def _wheel(self) -> Path | None:
        if not self._swarm.install:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._swarm.wheel is None:
                return wheels.made(self._folder).files[0]
            machine = compose.MACHINE
            fitting = wheels.given(self._swarm.wheel).fitting(machine)
            if fitting is None:
                raise ConfigurationError(f"{self._swarm.wheel} has no wheel for Python {machine}")
            return Path(shutil.copy(fitting, self._folder))
        except OSError as error:
            raise P2PAvgError(f"{self._folder} cannot be written ({error.strerror})") from None

    def _code(self) -> str:
        """Copy the code; the script's path in it."""
        directory = self._swarm.directory
        try:
            # Variables of the environment stand in the files there, too: that folder is its owner's alone.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            code = self._folder / "code"
            if code.exists():
                shutil.rmtree(code)
            code.mkdir(parents=True)
            with tarfile.open(fileobj=BytesIO(packed(directory, self._script, self._folder))) as tar:
                tar.extractall(code, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise P2PAvgError(f"the code cannot be copied to {self._folder} ({error})") from None
        return inside(self._swarm, self._script)

    def _write(self, files: dict[str, str], private: dict[str, str]) -> None:
        try:
            compose.write(self._folder, files, private)
        except OSError as error:
            raise P2PAvgError(f"{self._folder} cannot be written ({error.strerror})") from None


def inside(swarm: SwarmFile, script: Path) -> str:
    """The script's path in the copied code. Raises ConfigurationError."""
    if swarm.directory is None:
        return script.name
    try:
        return str(script.resolve().relative_to(swarm.directory.resolve()))
    except ValueError:
        raise ConfigurationError(
            f"{script} is not in the directory {swarm.directory} that is copied"
        ) from None


def start(folder: Path, commands: Sequence[Sequence[str]], *, only_show: bool) -> int:
    """Run the commands in the folder, or only show them. Returns the first exit code that is not 0."""
    for command in commands:
        print(f"cd {shlex.quote(str(folder))} && {shlex.join(command)}", flush=True)
        if only_show:
            continue
        if shutil.which(command[0]) is None:
            raise P2PAvgError(f"there is no {command[0]} here; install {NEEDS[command[0]]}, or use --emit")
        if code := subprocess.call(command, cwd=folder):
            return code
    return 0
