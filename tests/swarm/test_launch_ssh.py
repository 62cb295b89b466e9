"""p2pavg launch --swarm: one peer per machine over ssh, and what looks after them."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.swarm
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, time
import torch
from p2pavg import CollaborativeOptimizer
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with CollaborativeOptimizer(optimizer, "remote", 48, 4, listen="127.0.0.1:0") as opt:
    print("arguments", sys.argv[1:], flush=True)
    while True:
        time.sleep(0.02)
        model(torch.randn(4, 4)).square().mean().backward()
        opt.step()
"""


class Machines:
    """An sshd on loopback, which gives each name a home of its own, and the ssh configuration to reach it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "launcher"
        self.home.mkdir()
        for key in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (folder / "authorized").write_text((folder / "user.pub").read_text())
        self.config = folder / "ssh_config"
        self.daemons = []
        lines = []
        for name in ("one", "two", "three"):
            (folder / name).mkdir()
            port = free_port()
            self.daemons.append(self._daemon(name, port))
            lines += [f"Host {name}", "  HostName 127.0.0.1", f"  Port {port}"]
        lines += ["Host gone", "  HostName 127.0.0.1", f"  Port {free_port()}", "Host *"]
        lines += [f"  IdentityFile {folder / 'user'}", "  StrictHostKeyChecking no", "  IdentitiesOnly yes"]
        lines += [
            f"  UserKnownHostsFile {folder / 'known'}",
            f"  User {getpass.getuser()}",
            "  LogLevel ERROR",
        ]
        self.config.write_text("\n".join(lines) + "\n")

    def _daemon(self, name: str, port: int) -> subprocess.Popen[bytes]:
        home = self.folder / name
        force = self.folder / f"{name}.sh"
        force.write_text(f'cd {home} && export HOME={home} PYTHONPATH={ROOT}\neval "$SSH_ORIGINAL_COMMAND"\n')
        settings = self.folder / f"{name}.conf"
        settings.write_text(
            f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {self.folder / 'host'}\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder / 'authorized'}\nStrictModes no\nUsePAM no\n"
            f"PermitRootLogin yes\nForceCommand sh {force}\n"
        )
        os.makedirs("/run/sshd", exist_ok=True)
        daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(settings)], stderr=subprocess.PIPE)
        assert daemon.stderr is not None
        while b"listening" not in daemon.stderr.readline():
            assert daemon.poll() is None
        return daemon

    def swarm(self, *names: str) -> Path:
        """A file with these machines, on each of which this interpreter has p2pavg."""
        path = self.folder / "swarm.toml"
        machines = [
            f'[[machine]]\nssh = "{name}"\naddress = "127.0.0.1"\narguments = ["--of", "{name}"]'
            for name in names
        ]
        common = [
            'run = "remote"',
            f"ssh_config = {str(self.config)!r}",
            f"python = {sys.executable!r}",
            "install = false",
            f"bootstrap_port = {free_port()}",
        ]
        path.write_text("\n".join([*common, *machines]))
        return path

    def launch(self, *words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "p2pavg", "launch", *words]
        environment = {**os.environ, "HOME": str(self.home)}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=170, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def keepers(self) -> list[int]:
        """Of peers and bootstrap nodes that still run."""
        here = f"p2pavg.launch.keeper\0{self.folder}".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if here in _read(path)]

    def close(self) -> None:
        for keeper in self.keepers():
            os.kill(keeper, signal.SIGTERM)
        for daemon in self.daemons:
            daemon.terminate()
            daemon.wait()
            assert daemon.stderr is not None
            daemon.stderr.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if os.geteuid() != 0 or not Path(SSHD).exists():
        pytest.skip("needs root and OpenSSH's server")
    made = Machines(tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(300)
def test_a_swarm_is_started_looked_at_enlarged_and_stopped(machines: Machines) -> None:
    """Two machines train, one that is missing is one sentence; a third is added; status, logs and stop tell
    of each; nothing runs afterwards.
    """
    script = machines.folder / "train.py"
    script.write_text(SCRIPT)
    file = machines.swarm("one", "two", "gone")
    code, said = machines.launch(str(script), "--swarm", str(file), "--", "--deep")
    assert code == 1, said
    assert re.search(r"^gone cannot be reached \(.*refused\); try 'ssh -F .* gone'$", said, re.M), said
    assert re.search(r"^one: peer [0-9a-f]{8} at 127.0.0.1:\d+, epoch \d+, \w+$", said, re.M), said
    assert "2 peers of 3 in the table" in said

    code, again = machines.launch(str(script), "--swarm", str(file))
    assert code == 1
    assert "run 'remote' has a peer on one, two already" in again

    file.write_text(file.read_text().replace('"gone"', '"three"'))
    code, added = machines.launch("add", "three", "--swarm", str(file))
    assert code == 0, added
    code, status = machines.launch("status", "--swarm", str(file))
    assert code == 0, status
    assert len(re.findall(r"^\w+ +running +peer [0-9a-f]{8}", status, re.M)) == 3, status
    code, logs = machines.launch("logs", "three", "--swarm", str(file))
    assert "arguments ['--deep', '--of', 'three']" in logs, logs
    code, stopped = machines.launch("stop", "--swarm", str(file))
    assert code == 0, stopped
    assert sorted(stopped.split()) == sorted(["one:", "left", "two:", "left", "three:", "left"])
    code, status = machines.launch("status", "--swarm", str(file))
    assert code == 1
    assert status.count("left") == 3
    assert machines.keepers() == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
