"""From bare machines to a swarm that trains: `p2pavg launch --to ssh` in a lab's hosts, timed.

python -m bench.ssh_launch [--hosts cloud desk strict] [--missing] [--python PYTHON] [--json PATH]

Each host of the topology `homes` gets an sshd in a namespace of its own, behind the NAT that the topology
gives the host; the launcher reaches it as through a jump host. Nothing is installed there. Before the clock
starts, the wheels that pip will want are laid into a folder, as a warm cache would have them, since hosts of
a lab have no internet. It stops when every peer has stepped in a round of all. Then `launch stop` lets all
leave: what all peers drew is compared with what was averaged or named as discarded.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p2pavg.bench.machine import environment
from p2pavg.lab import Lab

SSHD = "/usr/sbin/sshd"
BAR_S = 60.0
TRAINS_S = 300.0
SCRIPT = """
import sys, time
import torch
from p2pavg import CollaborativeOptimizer
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
drawn = 0
def told(report):
    print("round", report.epoch, len(report.members), report.samples, report.samples_discarded, flush=True)
opt = CollaborativeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "launched", 48, 4, on_round=told)
try:
    with opt:
        while True:
            time.sleep(0.05)
            model(torch.randn(4, 4)).square().mean().backward()
            drawn += 4
            opt.step()
finally:
    last = opt.last_report
    if last is not None and not last.members:  # what was lost by leaving
        told(last)
    print("drew", drawn, flush=True)
"""


class Machines:
    """An sshd per connection, started in a host's namespace, and the configuration that leads ssh there."""

    def __init__(self, folder: Path, lab: Lab, hosts: Sequence[str]) -> None:
        self.folder, self._lab = folder, lab
        for key in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (folder / "authorized").write_text((folder / "user.pub").read_text())
        (folder / "launcher").mkdir()
        os.makedirs("/run/sshd", exist_ok=True)
        lines = []
        for host in hosts:
            enter = shlex.join(lab.command(host, [SSHD, "-i", "-f", str(self._settings(host))]))
            lines += [f"Host {host}", f"  HostName {lab.address(host)}", f"  ProxyCommand {enter}"]
        lines += [
            "Host gone",
            "  HostName 127.0.0.1",
            "  Port 1",
            "Host *",
            f"  IdentityFile {folder / 'user'}",
        ]
        lines += [
            "  StrictHostKeyChecking no",
            f"  UserKnownHostsFile {folder / 'known'}",
            "  IdentitiesOnly yes",
        ]
        lines += [f"  User {getpass.getuser()}", "  LogLevel ERROR"]
        (folder / "ssh_config").write_text("\n".join(lines) + "\n")

    def _settings(self, host: str) -> Path:
        home, force, settings = (self.folder / f"{host}{end}" for end in ("", ".sh", ".conf"))
        home.mkdir()
        force.write_text(f'cd {home} && export HOME={home}\neval "$SSH_ORIGINAL_COMMAND"\n')
        settings.write_text(
            f"HostKey {self.folder / 'host'}\nPidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
            f"AuthorizedKeysFile {self.folder / 'authorized'}\nForceCommand sh {force}\n"
        )
        return settings

    def launch(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Of the machine that launches, with a home of its own."""
        home = {**os.environ, "HOME": str(self.folder / "launcher")}
        command = [sys.executable, "-m", "p2pavg", "launch", *words]
        return subprocess.run(command, capture_output=True, text=True, env=home, check=False)

    def log(self, host: str) -> str:
        """What a peer printed."""
        found = list((self.folder / host / ".p2pavg").glob(f"*/{host}/peer.log"))
        return found[0].read_text() if found else ""


def rounds(log: str) -> list[tuple[int, int, int, int]]:
    """(epoch, members, samples, samples discarded) of each report."""
    return [tuple(map(int, found)) for found in re.findall(r"^round (\d+) (\d+) (\d+) (\d+)$", log, re.M)]  # type: ignore[misc]


def prepared(cache: Path, python: str, wheel: Path | None, torch: str) -> Path:
    """Fill a folder, if it is empty, with the wheels that pip wants there: p2pavg's, torch and all they need.
    Returns p2pavg's.
    """
    pip = [python, "-m", "pip"]
    cache.mkdir(parents=True, exist_ok=True)
    if wheel is None and not list(cache.glob("p2pavg-*.whl")):
        subprocess.run([*pip, "wheel", "-q", "--no-deps", "--wheel-dir", cache, "."], check=True)
    wheel = wheel or next(cache.glob("p2pavg-*.whl"))
    if not list(cache.glob("torch-*.whl")):
        subprocess.run([*pip, "download", "-q", "--dest", cache, torch, wheel], check=True)
    return wheel.resolve()


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Launch, wait, stop; the figures."""
    cache = (args.wheels or folder / "wheels").resolve()
    wheel = prepared(cache, args.python, args.wheel, args.torch)
    script, file = folder / "train.py", folder / "swarm.toml"
    script.write_text(SCRIPT)
    names = [*args.hosts, *(["gone"] if args.missing else [])]
    with Lab("homes") as lab:
        machines = Machines(folder, lab, args.hosts)
        tables = "\n".join(f'[[machine]]\nssh = "{name}"' for name in names)
        pip = f"{{no-index = true, find-links = {str(cache)!r}}}"
        file.write_text(
            f'run = "launched"\nssh_config = "ssh_config"\nwheel = {str(wheel)!r}\npip = {pip}\n'
            f"packages = [{args.torch!r}]\npython = {args.python!r}\n{tables}\n"
        )
        load = os.getloadavg()[0]
        began = time.monotonic()
        launched = machines.launch(str(script), "--swarm", str(file))
        table_s = time.monotonic() - began
        trained: dict[str, float] = {}
        while len(trained) < len(args.hosts) and time.monotonic() < began + TRAINS_S:
            for host in args.hosts:
                if host not in trained and any(
                    told[1] == len(args.hosts) for told in rounds(machines.log(host))
                ):
                    trained[host] = time.monotonic() - began
            time.sleep(0.05)
        stopping = time.monotonic()
        stopped = machines.launch("stop", "--swarm", str(file))
        stop_s = time.monotonic() - stopping
        logs = [machines.log(host) for host in args.hosts]
    print(launched.stdout + launched.stderr + stopped.stdout + stopped.stderr, file=sys.stderr)
    return {
        "hosts": list(args.hosts),
        "launch_exit_code": launched.returncode,
        "in_the_table_s": table_s,
        "training_s": max(trained.values()) if len(trained) == len(args.hosts) else None,
        "bar_s": BAR_S,
        "missing": [line for line in launched.stdout.splitlines() if line.startswith("gone ")],
        "stop_exit_code": stopped.returncode,
        "stop_s": stop_s,
        **counted_samples(logs),
        "load_before": load,
        "environment": environment(),
    }


def counted_samples(logs: Sequence[str]) -> dict[str, int]:
    """What all drew, and where that is: every sample in an average, or named as discarded."""
    drawn = sum(int(found) for log in logs for found in re.findall(r"^drew (\d+)$", log, re.M))
    averaged: dict[int, int] = {}
    for epoch, _, samples, _ in (told for log in logs for told in rounds(log)):
        averaged[epoch] = max(samples, averaged.get(epoch, 0))  # a last report of who leaves has none
    discarded = sum(told[3] for log in logs for told in rounds(log))
    lost = drawn - sum(averaged.values()) - discarded
    return {
        "samples_drawn": drawn,
        "samples_averaged": sum(averaged.values()),
        "samples_discarded": discarded,
        "samples_lost": lost,
    }


def main() -> int:
    """Prints the figures; the exit code is 1 when a peer did not train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--hosts", nargs="+", default=["cloud", "desk", "strict"], help="of the topology 'homes'"
    )
    parser.add_argument("--missing", action="store_true", help="name a machine, too, that is not there")
    parser.add_argument("--python", default=sys.executable, help="of the machines; default: this one")
    parser.add_argument("--wheel", type=Path, help="of p2pavg; default: built before the clock starts")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="keep what pip will want there")
    parser.add_argument("--torch", default="torch==2.13.0", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2pavg-ssh-") as folder:
        found = measured(args, Path(folder))
    document = json.dumps(found, indent=2)
    print(document)
    if args.json is not None:
        args.json.write_text(document + "\n")
    return int(found["training_s"] is None)


if __name__ == "__main__":
    sys.exit(main())
