"""A swarm as containers: an image, and a compose file with a bootstrap node and one service per peer."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from p2pavg.launch.swarm_file import SwarmFile
from p2pavg.launch.yaml import render

GRACE_S = 60  # that a container has after SIGTERM: more than a peer's notice
PYTHON = "python:3.12-slim"
PIP = "pip.conf"  # pip's options: a file beside the others, and the name of the secret
CONSTRAINTS = "constraints.txt"
CODE = "/code"  # in a container
MACHINE = "3.12 linux x86_64"  # as that Python tells of itself


def dockerfile(swarm: SwarmFile, wheel: str, code: str) -> str:
    """An image with p2pavg, the swarm's packages and the code. wheel, code: names beside the file. The
    program stands in exec form, so that SIGTERM reaches Python and the peer leaves without loss. pip's
    options may hold
    a password: they are there while the image is built, and not in the image.
    """
    wanted = " ".join(shlex.quote(package) for package in (*swarm.packages, f"/tmp/{wheel}"))
    carried = wheel
    if swarm.constraints is not None:
        carried, wanted = f"{wheel} {CONSTRAINTS}", f"-c /tmp/{CONSTRAINTS} {wanted}"
    run = f"RUN --mount=type=secret,id={PIP},target=/etc/pip.conf" if swarm.pip else "RUN"
    lines = [
        f"FROM {PYTHON} AS build",
        f"COPY {carried} /tmp/",
        f"{run} python -m venv /venv && /venv/bin/pip install --no-cache-dir {wanted}",
        "",
        f"FROM {PYTHON}",
        "COPY --from=build /venv /venv",
        'ENV PATH="/venv/bin:$PATH" PYTHONUNBUFFERED=1',
        f"COPY {code}/ /code/",
        "WORKDIR /code",
        *(f"{run} {json.dumps(['sh', '-ec', command])}" for command in swarm.setup),
        'ENTRYPOINT ["python"]',
    ]
    return "\n".join(lines) + "\n"


def compose(swarm: SwarmFile, script: str, arguments: Sequence[str], secrets: Mapping[str, str]) -> str:
    """The compose file. secrets: per service, the file beside it that holds the service's credentials."""
    port = swarm.bootstrap_port
    services: dict[str, dict[str, object]] = {}
    folder = swarm.folder_of_checkpoints()
    checkpoints = None if folder is None else posixpath.join(CODE, folder)
    initial = swarm.bootstrap or f"bootstrap:{port}"
    if swarm.bootstrap is None:
        command = ["-m", "p2pavg", "bootstrap", "--run", swarm.run, "--listen", f"0.0.0.0:{port}"]
        services["bootstrap"] = _service(swarm, "bootstrap", command, {}, secrets) | {
            "ports": [f"{port}:{port}/tcp", f"{port}:{port}/udp"]
        }
    for machine in swarm.machines:
        command = [script, *arguments, *machine.arguments]
        environment = swarm.environment(machine, initial, checkpoints)
        services[machine.name] = _service(swarm, machine.name, command, environment, secrets)
        if checkpoints is not None:
            services[machine.name]["volumes"] = [f"{machine.name}:{_literal(checkpoints)}"]
    document: dict[str, object] = {"name": _slug(swarm.run), "services": services}
    if checkpoints is not None:
        document["volumes"] = {machine.name: None for machine in swarm.machines}
    files = {**secrets, PIP: PIP} if swarm.pip else secrets
    if files:
        document["secrets"] = {name: {"file": f"./{path}"} for name, path in files.items()}
    return render(document)


def _service(
    swarm: SwarmFile,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    secrets: Mapping[str, str],
) -> dict[str, object]:
    where = "/run/secrets/credentials"
    if secrets and name == "bootstrap":
        command = [*command, "--credentials", where]
    if secrets:
        environment = {**environment, "P2PAVG_CREDENTIALS": where}
    service: dict[str, object] = {
        "image": f"{_slug(swarm.run)}-peer",
        "build": {"context": ".", "secrets": [PIP]} if swarm.pip else ".",
        "command": [_literal(word) for word in command],
        "environment": {key: _literal(value) for key, value in environment.items()},
        "restart": "on-failure",
        "stop_grace_period": f"{GRACE_S}s",
    }
    if secrets:
        service["secrets"] = [{"source": name, "target": "credentials"}]
    return service


def _slug(run: str) -> str:
    """A name as images and projects of Docker have."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")


def _literal(text: str) -> str:
    """As Compose leaves it: a dollar sign would name a variable of its own environment."""
    return text.replace("$", "$$")


def write(folder: Path, files: Mapping[str, str], private: Mapping[str, str]) -> None:
    """Write files; `private` ones are readable to their owner alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    for name, text in private.items():
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(text)
