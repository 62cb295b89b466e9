"""A swarm on rented machines: one managed job of SkyPilot, which rents and recovers machines, per peer."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from p2pavg.launch import pip
from p2pavg.launch.compose import CONSTRAINTS
from p2pavg.launch.swarm_file import BUCKET, MachineEntry, SwarmFile
from p2pavg.launch.yaml import render

PEER_PORT = 31330
CHECKPOINTS = "/checkpoints"  # where a bucket is mounted
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
    document: dict[str, Any] = {"name": f"{swarm.run}-{machine.name}", "resources": resources}
    mounts: dict[str, Any] = {}
    wanted = [shlex.quote(package) for package in swarm.packages]
    if wheel is not None:
        mounts[f"~/{wheel}"] = f"./{wheel}"
        wanted.append(f"~/{wheel}")
    if swarm.constraints is not None:
        mounts[f"~/{CONSTRAINTS}"] = f"./{CONSTRAINTS}"
    checkpoints = swarm.checkpoints
    if checkpoints is not None and BUCKET.match(checkpoints):
        mounts[CHECKPOINTS] = {"source": checkpoints, "mode": "MOUNT"}
        checkpoints = f"{CHECKPOINTS}/{machine.name}"  # which the job finds again wherever it recovers
    if mounts:
        document["file_mounts"] = mounts
    document["workdir"] = "./code"
    document["envs"] = swarm.environment(machine, swarm.bootstrap or "", checkpoints)
    if names := secrets(swarm):
        document["secrets"] = dict.fromkeys(names)
    limits = [] if swarm.constraints is None else [f"-c ~/{CONSTRAINTS}"]
    install = [" ".join(["pip install", *limits, *wanted])] if wanted else []
    document["setup"] = "\n".join(["set -e", *install, *swarm.setup])
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


def secrets(swarm: SwarmFile) -> list[str]:
    """Names of the variables that stand in no YAML: pip's options may hold a password, too."""
    return [*(["P2PAVG_CREDENTIALS"] if swarm.closed else []), *pip.environment(swarm.pip)]


def secret_file(swarm: SwarmFile, credentials: str | None) -> str:
    """The content of the file that `launching` names. credentials: the peer's line; None: an open run."""
    values = {} if credentials is None else {"P2PAVG_CREDENTIALS": credentials}
    return "".join(
        f"{name}={_quoted(value)}\n" for name, value in {**values, **pip.environment(swarm.pip)}.items()
    )


def _quoted(text: str) -> str:
    """As a file of variables has a text that is taken as it stands."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
