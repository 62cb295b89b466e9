"""A swarm on rented machines: one managed job of SkyPilot, which rents and recovers machines, per peer."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from p2pavg.launch import pip
from p2pavg.launch.swarm_file import MachineEntry, SwarmFile
from p2pavg.launch.yaml import render

PEER_PORT = 31330
RECOVERED = (1, 137, 143)  # exit codes after which a job is started again: an error, a kill, a machine taken
MOST_RESTARTS = 5


def task(
    swarm: SwarmFile, machine: MachineEntry, script: str, arguments: Sequence[str], wheel: str | None
) -> str:
    """The YAML of one peer's job. wheel: a file beside the YAML; None: the image has p2pavg. Credentials come
    as the secret P2PAVG_CREDENTIALS, which the file does not hold. The table's requests travel over TCP,
    since SkyPilot opens no UDP port.
    """
    resources: dict[str, Any] = {
        "ports": [PEER_PORT],
        "job_recovery": {
            "strategy": "EAGER_NEXT_REGION",
            "max_restarts_on_errors": MOST_RESTARTS,
            "recover_on_exit_codes": list(RECOVERED),
        },
        **machine.resources,
    }
    environment: dict[str, str] = {
        "P2PAVG_INITIAL_PEERS": swarm.bootstrap or "",
        **pip.environment(swarm.pip),
        **machine.environment,
    }
    document: dict[str, Any] = {"name": f"{swarm.run}-{machine.name}", "resources": resources}
    if wheel is not None:
        document["file_mounts"] = {f"~/{wheel}": f"./{wheel}"}
    document["workdir"] = "./code"
    document["envs"] = environment
    if swarm.closed:
        document["secrets"] = {"P2PAVG_CREDENTIALS": None}
    wanted = " ".join(shlex.quote(package) for package in swarm.packages)
    install = (
        f"pip install {wanted} ~/{wheel}" if wheel is not None else f"pip install {wanted}" if wanted else ""
    )
    document["setup"] = "\n".join(["set -e", *filter(None, [install]), *swarm.setup])
    command = shlex.join(["python", script, *arguments, *machine.arguments])
    document["run"] = f"exec {command}\n# exec: SIGTERM reaches the peer, which hands over what it has\n"
    return render(document)


def launching(swarm: SwarmFile, machine: MachineEntry, path: str, secret: str | None) -> list[str]:
    """The command that hands a task to SkyPilot. secret: a file with the line of credentials."""
    command = [
        "sky",
        "jobs",
        "launch",
        "--yes",
        "--detach-run",
        "--name",
        f"{swarm.run}-{machine.name}",
        path,
    ]
    return command if secret is None else [*command, "--secret-file", secret]


def secret_file(line: str) -> str:
    """The content of the file that `launching` names."""
    return f"P2PAVG_CREDENTIALS={line}\n"
