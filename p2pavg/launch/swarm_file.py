"""The machines of a swarm and what runs on them, read from TOML and checked."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pavg.errors import ConfigurationError
from p2pavg.membership.peerinfo import MAX_NAME
from p2pavg.membership.table.address import parse_host_port

EXAMPLE = """\
run = "my-run"                    # as in the script
packages = ["torch==2.13.0"]      # beside p2pavg itself, for pip

[[machine]]
name = "lab"
ssh = "me@lab.example.org"        # as for ssh: a name of ~/.ssh/config, too

[[machine]]
name = "cloud"
ssh = "ubuntu@203.0.113.7"
arguments = ["--region", "eu-west"]
"""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
BUCKET = re.compile(r"[a-z0-9]+://")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
BOOTSTRAP_PORT = 31329
_SWARM = {
    "run": str,
    "closed": bool,
    "bootstrap": str,
    "bootstrap_port": int,
    "python": str,
    "install": bool,
    "wheel": str,
    "pip": dict,
    "packages": list,
    "constraints": str,
    "checkpoints": str,
    "directory": str,
    "setup": list,
    "environment": dict,
    "ssh_config": str,
    "machine": list,
}
_MACHINE = {
    "name": str,
    "ssh": str,
    "address": str,
    "region": str,
    "python": str,
    "arguments": list,
    "environment": dict,
    "resources": dict,
}


@dataclass(frozen=True, slots=True)
class MachineEntry:
    """One machine: where ssh finds it, and what is its own there."""

    name: str
    ssh: str | None  # what ssh is called with; None: it is started in another way
    address: str | None  # host under which the others reach it; None: the one that ssh connects to
    region: str | None  # where it is, for people and plans
    python: str  # on that machine
    arguments: tuple[str, ...]  # of the script, after those of all
    environment: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)  # of a SkyPilot task


@dataclass(frozen=True, slots=True)
class SwarmFile:
    """What all machines share, and the machines."""

    path: Path
    run: str
    machines: tuple[MachineEntry, ...]
    closed: bool  # only who has credentials takes part
    bootstrap: str | None  # HOST:PORT of a node that runs already; None: one is started on the first machine
    bootstrap_port: int
    install: bool  # into a virtual environment of its own; False: `python` has everything
    wheel: Path | None  # of p2pavg, or a folder with several; None: made from this installation
    pip: Mapping[str, Any]  # pip's own options there, as in its configuration file
    packages: tuple[str, ...]
    constraints: Path | None  # a file of pip's, which says what versions are taken there
    checkpoints: (
        str | None
    )  # a folder on the machines; for SkyPilot, of a bucket, too; None: none are written
    directory: Path | None  # copied to each machine; None: the script alone
    setup: tuple[str, ...]  # shell commands, run in the copied directory
    ssh_config: Path | None

    def limits(self) -> str:
        """The text of the constraints file; empty where none is named. Raises ConfigurationError."""
        if self.constraints is None:
            return ""
        try:
            return self.constraints.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{self.constraints} cannot be read ({error})") from None

    def folder_of_checkpoints(self) -> str | None:
        """The folder on the machines. Raises ConfigurationError for a bucket."""
        if self.checkpoints is not None and BUCKET.match(self.checkpoints):
            raise ConfigurationError(
                f"{self.path}: checkpoints = {self.checkpoints!r} is a bucket, which --to sky mounts; name a "
                "folder"
            )
        return self.checkpoints

    def environment(
        self, machine: MachineEntry, initial_peer: str, checkpoints: str | None
    ) -> dict[str, str]:
        """The variables of a machine's peer, those of the file last. checkpoints: the folder there."""
        found = {"P2PAVG_INITIAL_PEERS": initial_peer, "P2PAVG_NAME": machine.name[:MAX_NAME]}
        if machine.region is not None:
            found["P2PAVG_REGION"] = machine.region
        if checkpoints is not None:
            found["P2PAVG_CHECKPOINTS"] = checkpoints
        return {**found, **machine.environment}

    def machine(self, name: str) -> MachineEntry:
        """The machine of this name. Raises ConfigurationError."""
        for machine in self.machines:
            if machine.name == name:
                return machine
        known = ", ".join(machine.name for machine in self.machines)
        raise ConfigurationError(f"{self.path} has no machine {name!r}; it has {known}")


def load(path: Path) -> SwarmFile:
    """Read a file. Raises ConfigurationError, which names the file and the key."""
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None
    checked = _checked(given, _SWARM, str(path))
    run = checked.get("run")
    if not run:
        raise ConfigurationError(f"{path}: 'run' is missing: the run_id of the script")
    if not NAME.fullmatch(run):
        raise ConfigurationError(f"{path}: run = {run!r} has characters beside letters, digits, . _ -")
    if "bootstrap" in checked:
        parse_host_port(checked["bootstrap"])
    port = checked.get("bootstrap_port", BOOTSTRAP_PORT)
    if not 1 <= port <= 65535:
        raise ConfigurationError(f"{path}: bootstrap_port = {port} is no port")
    beside = path.parent
    return SwarmFile(
        path=path,
        run=run,
        machines=_machines(checked, path),
        closed=checked.get("closed", True),
        bootstrap=checked.get("bootstrap"),
        bootstrap_port=port,
        install=checked.get("install", True),
        wheel=_path(checked, "wheel", beside),
        pip=_pip(checked.get("pip", {}), f"{path}: pip"),
        packages=_packages(checked, str(path)),
        constraints=_file(checked, "constraints", path),
        checkpoints=checked.get("checkpoints"),
        directory=_directory(checked, path),
        setup=_texts(checked, "setup", str(path)),
        ssh_config=_file(checked, "ssh_config", path),
    )


def _machines(checked: Mapping[str, Any], path: Path) -> tuple[MachineEntry, ...]:
    entries = checked.get("machine", [])
    if not entries:
        raise ConfigurationError(f"{path} has no [[machine]]; an example:\n{EXAMPLE}")
    found: list[MachineEntry] = []
    for number, entry in enumerate(entries, 1):
        where = f"{path}: machine {number}"
        machine = _checked(entry, _MACHINE, where)
        ssh = machine.get("ssh")
        if ssh is not None and (not ssh or ssh.startswith("-")):
            raise ConfigurationError(f"{where}: ssh = {ssh!r} is nothing that ssh is called with")
        name = machine.get("name", (ssh or "").rpartition("@")[2])
        if not NAME.fullmatch(name):
            raise ConfigurationError(f"{where}: name = {name!r} has characters beside letters, digits, . _ -")
        if name == "bootstrap":
            raise ConfigurationError(f"{where}: the name 'bootstrap' is that of the node; choose another")
        if name in {other.name for other in found}:
            raise ConfigurationError(f"{where}: the name {name!r} is there twice")
        environment = {**checked.get("environment", {}), **machine.get("environment", {})}
        _check_environment(environment, where)
        address = machine.get("address")
        if address is not None and not HOST.fullmatch(address):
            raise ConfigurationError(f"{where}: address = {address!r} is no host, without a port")
        found.append(
            MachineEntry(
                name,
                ssh,
                address,
                machine.get("region"),
                machine.get("python", checked.get("python", "python3")),
                _texts(machine, "arguments", where),
                environment,
                machine.get("resources", {}),
            )
        )
    return tuple(found)


def _checked(given: object, known: Mapping[str, type], where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} is not a table")
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            meant = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise ConfigurationError(f"{where}: there is no key {key!r}; {meant}")
        if type(value) is not known[key]:
            raise ConfigurationError(f"{where}: {key!r} is not of type {known[key].__name__}")
    return given


def _texts(given: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = given.get(key, [])
    if not all(isinstance(value, str) and "\0" not in value for value in values):
        raise ConfigurationError(f"{where}: {key!r} is a list of texts")
    return tuple(values)


def _packages(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    packages = _texts(given, "packages", where)
    for package in packages:
        if package.startswith("-") or not package.isprintable():
            raise ConfigurationError(
                f"{where}: packages: {package!r} is none; options of pip stand in 'pip', versions in "
                "'constraints'"
            )
    return packages


def _check_environment(environment: Mapping[str, Any], where: str) -> None:
    for name, value in environment.items():
        if not VARIABLE.fullmatch(name):
            raise ConfigurationError(f"{where}: environment: {name!r} is no name of a variable")
        if not isinstance(value, str) or "\0" in value:
            raise ConfigurationError(f"{where}: values of 'environment' are texts")


def _pip(given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    for option, value in given.items():
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str | int) for one in values):
            raise ConfigurationError(
                f"{where}: {option!r} is a text, a number, true, false, or a list of texts"
            )
        if not re.fullmatch(r"[a-z][a-z-]*", option) or any("\n" in str(one) for one in values):
            raise ConfigurationError(
                f"{where}: {option!r} is no option of pip on one line; one is 'index-url'"
            )
    return given


def _path(given: Mapping[str, Any], key: str, beside: Path) -> Path | None:
    return beside / Path(given[key]).expanduser() if key in given else None


def _file(given: Mapping[str, Any], key: str, path: Path) -> Path | None:
    found = _path(given, key, path.parent)
    if found is not None and not found.is_file():
        raise ConfigurationError(f"{path}: {key} = {given[key]!r}, and {found} is no file")
    return found


def _directory(given: Mapping[str, Any], path: Path) -> Path | None:
    found = _path(given, "directory", path.parent)
    if found is not None and not found.is_dir():
        raise ConfigurationError(f"{path}: directory = {given['directory']!r}, and {found} is no folder")
    return found
