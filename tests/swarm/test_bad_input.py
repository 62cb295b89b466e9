from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from p2pavg import CollaborativeOptimizer
from p2pavg.errors import ConfigurationError, IncompatiblePeerError, UnreachableError
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SECONDS = 15.0  # "within seconds", on a machine that does other things


def build(width: int = 4, **options) -> tuple[torch.nn.Module, CollaborativeOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 1)
    settings = {"run_id": "bad-input", "target_batch_size": 64, "batch_size_per_step": 8}
    settings |= {"listen": "127.0.0.1:0", "initial_peers": [], **options}
    return model, CollaborativeOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), **settings)


class Training:
    """A peer that trains in a thread until it is left."""

    def __enter__(self) -> Training:
        self.model, self.opt = build()
        self.leave = threading.Event()
        self.moved = threading.Condition()
        self.reports = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            while not self.leave.is_set():
                self.model(torch.randn(8, 4)).square().mean().backward()
                self.opt.step()
                self.opt.zero_grad()
                with self.moved:
                    self.moved.notify_all()
        except BaseException as error:
            self.error = error
        finally:
            self.opt.close()

    def wait_for_epochs(self, more: int) -> None:
        """Until it is this many epochs further."""
        goal = self.opt.epoch + more
        with self.moved:
            assert self.moved.wait_for(lambda: self.opt.epoch >= goal, timeout=30)

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self.thread.join()


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1", "127.0.0.1:notaport", "127.0.0.1:99999", ":31330"]
)
def test_malformed_initial_peer(address):
    """An initial peer that is no address is refused at once, and the error shows the right form."""
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match="host:port") as caught:
        build(initial_peers=[address])
    assert repr(address) in str(caught.value)
    assert time.monotonic() - started < SECONDS


def test_unreachable_initial_peer():
    """An initial peer that does not answer is named within seconds."""
    address = f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(UnreachableError, match=address):
        build(initial_peers=[address])
    assert time.monotonic() - started < SECONDS


def test_target_below_one_step():
    """A target batch size below one step's samples is refused, with both numbers."""
    with pytest.raises(ConfigurationError, match=r"(?s)(?=.*\b4\b)(?=.*\b8\b)"):
        build(target_batch_size=4)


def test_another_model_is_refused_and_disturbs_nobody():
    """A peer with another model is told so within seconds; the swarm goes on without a failed round."""
    with Training() as swarm:
        swarm.wait_for_epochs(2)
        started = time.monotonic()
        with pytest.raises(IncompatiblePeerError, match="model"):
            build(width=5, initial_peers=[swarm.opt.peer.address])
        assert time.monotonic() - started < SECONDS
        swarm.wait_for_epochs(3)
        report = swarm.opt.last_report
        assert report is not None
        assert report.attempts == 1
        assert report.failed_members == ()
    assert swarm.error is None


def test_bootstrap_on_a_taken_port():
    """bootstrap on a port in use ends with code 1 and one line that names the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "p2pavg", "bootstrap", "--listen", f"127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert str(port) in done.stderr


def test_a_training_peer_takes_the_next_port(caplog):
    """When the default port is taken a training peer listens on the next free one and says which."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before may linger
        with contextlib.suppress(OSError):  # whoever else has it serves as well
            taken.bind(("0.0.0.0", 31330))
            taken.listen()
        _, opt = build(listen="0.0.0.0:31330")
        with opt:
            mine = int(opt.peer.address.rpartition(":")[2])
    assert 31330 < mine < 31400
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"port 31330 is taken, listening on {mine}" in messages
