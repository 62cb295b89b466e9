"""What a newcomer does wrong on its first day: each mistake is answered with its fix, and disturbs nobody.

Peers of another version: see test_versions.py.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pavg import CollaborativeOptimizer, cli
from p2pavg.credentials import new_secret, texts
from p2pavg.errors import ConfigurationError, CredentialError, IncompatiblePeerError, UnreachableError
from p2pavg.membership import DHT
from p2pavg.membership.table.dialling_back import find_reachability
from p2pavg.transport.links.endpoint import Endpoint
from tests.ports import free_port
from tests.swarm.scripts import Script, Terminal

pytestmark = pytest.mark.timeout(300)  # several processes import PyTorch, each for seconds

TRAINER = """
import sys, time, torch
from p2pavg import CollaborativeOptimizer, cli

run_id, listen, credentials, walled = sys.argv[1:5]
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
with CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), run_id, 32, 8, initial_peers=[], listen=listen,
    credentials=credentials or None,
    on_round=lambda r: print(f"epoch {r.epoch} attempts {r.attempts} of {len(r.members)} peers"),
) as opt:
    if walled:  # a firewall that passes UDP alone
        opt.peer._thread.run(opt.peer._runtime.endpoint._listener.close())
    print("address", opt.peer.address)
    while True:
        time.sleep(0.02)
        model(torch.randn(8, 8)).square().mean().backward()
        opt.step()
        opt.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("credentials")
    for name in ("right", "wrong"):
        texts.write(path / name, new_secret("closed"))
    return path


@pytest.fixture(scope="module")
def swarms(folder: Path) -> Iterator[dict[str, Script]]:
    """Three runs of one trainer each: an open one, a closed one, one whose TCP port nobody can reach."""
    with Terminal() as terminal:

        def start(run_id: str, *, credentials: str = "", walled: str = "") -> Script:
            words = (run_id, "127.0.0.1:0", credentials, walled)
            return terminal("-c", TRAINER, *words)

        yield {
            "open": start("open"),
            "closed": start("closed", credentials=str(folder / "right")),
            "walled": start("walled", walled="yes"),
        }


class Swarm:
    """One of them, as the newcomer knows it."""

    def __init__(self, script: Script, address: str) -> None:
        self.script = script
        self.address = address

    def goes_on(self) -> None:
        """It ends an epoch from now on, at its first attempt."""
        self.script.skip()  # what it said so far
        assert "attempts 1 of" in self.script.line_with("epoch")


@pytest.fixture(scope="module")
def addresses(swarms: dict[str, Script]) -> dict[str, str]:
    return {name: script.line_with("address").split()[1] for name, script in swarms.items()}


@pytest.fixture
def swarm(swarms: dict[str, Script], addresses: dict[str, str]) -> Swarm:
    return Swarm(swarms["open"], addresses["open"])


def newcomer(*initial_peers: str, width: int = 8, optimizer: Any = torch.optim.SGD, **options: Any) -> Any:
    """The optimizer of a newcomer; what it does wrong is in the arguments."""
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 1)
    settings = {"run_id": "open", "target_batch_size": 32, "batch_size_per_step": 8, "listen": "127.0.0.1:0"}
    opt = CollaborativeOptimizer(
        optimizer(model.parameters(), lr=0.01), initial_peers=initial_peers, **(settings | options)
    )
    opt.model = model
    return opt


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


def test_wrong_address(swarm):
    """An address where nobody is: it is named, with what to check."""
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnreachableError, match=rf"{nobody}.*check that one of them runs"):
        newcomer(nobody)


def test_tcp_is_blocked(swarms, addresses, caplog, monkeypatch):
    """Two peers that see each other over UDP alone: the newcomer says which port to open, and trains on."""
    start = Endpoint.start

    async def walled(*args, **options):
        endpoint = await start(*args, **options)
        await endpoint._listener.close()
        return endpoint

    monkeypatch.setattr(Endpoint, "start", walled)
    with newcomer(addresses["walled"], run_id="walled", announce=f"127.0.0.1:{free_port()}") as opt:
        assert opt.epoch == 0
        deadline = time.monotonic() + 60
        while "none of them answers over TCP; open that port for TCP" not in warnings(caplog):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert addresses["walled"] in warnings(caplog)


def test_a_newcomer_behind_a_firewall(swarm, caplog, monkeypatch):
    """Nobody can open a connection to the newcomer: it says so, dials out, and trains."""
    walled = free_port()  # where the swarm is asked to dial back, and finds nobody

    async def dial_back(self, *, in_haste):
        return await find_reachability(self.node, [walled], in_haste=in_haste)

    monkeypatch.setattr(DHT, "check_reachability", dial_back)
    with newcomer(swarm.address) as opt:
        while opt.last_report is None or len(opt.last_report.members) < 2:
            opt.model(torch.randn(8, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    advice = f"other peers cannot open connections to 127.0.0.1:{walled}"
    assert re.search(
        rf"{advice}.*open or forward that port for TCP and UDP, or set announce", warnings(caplog)
    )


def test_another_model(swarm):
    """Another model: both sides are described."""
    with pytest.raises(IncompatiblePeerError, match=r"9 parameters in 2 tensors") as caught:
        newcomer(swarm.address, width=9)
    assert "10 parameters in 2 tensors" in str(caught.value)
    swarm.goes_on()


def test_another_optimizer(swarm):
    """Another optimizer: both are named."""
    with pytest.raises(IncompatiblePeerError, match=r"(?s)(?=.*SGD)(?=.*AdamW).*start all with the same"):
        newcomer(swarm.address, optimizer=torch.optim.AdamW)
    swarm.goes_on()


def test_another_target(swarm):
    """Another target batch size: both numbers are named."""
    with pytest.raises(IncompatiblePeerError, match=r"(?s)target_batch_size is (?=.*\b32\b)(?=.*\b64\b)"):
        newcomer(swarm.address, target_batch_size=64)
    swarm.goes_on()


def test_another_run_id(swarm, caplog):
    """A mistyped run_id: a warning says that the peer begins a run of its own."""
    with newcomer(swarm.address, run_id="opne") as opt:
        assert opt.epoch == 0
    assert f"{swarm.address} is in another run, and nobody of run 'opne' was found" in warnings(caplog)
    swarm.goes_on()


@pytest.mark.parametrize(
    ("credentials", "fix"),
    [
        ("wrong", "not of this run.*check credentials= on both sides"),
        (None, "that run is closed.*pass credentials="),
    ],
)
def test_wrong_credentials(swarms, addresses, folder, credentials, fix):
    """Credentials of another authority, or none, are refused with what to do."""
    given = None if credentials is None else str(folder / credentials)
    with pytest.raises(CredentialError, match=fix):
        newcomer(addresses["closed"], run_id="closed", credentials=given)
    Swarm(swarms["closed"], addresses["closed"]).goes_on()


def test_forgotten_zero_grad(swarm):
    """Without zero_grad() a peer steps as it does with it: gradients are cleared when an epoch ends."""
    weights = []
    for zero in (True, False):
        torch.manual_seed(1)
        with newcomer(run_id=f"alone-{zero}") as opt:
            while opt.epoch < 3:
                opt.model(torch.randn(8, 8)).square().mean().backward()
                opt.step()
                if zero:
                    opt.zero_grad()
            weights.append(opt.model.weight.detach().clone())
    assert torch.equal(*weights)


def test_forgotten_step(swarm):
    """zero_grad() without step() is refused at the first batch, with the fix."""
    with newcomer(run_id="alone") as opt:
        opt.model(torch.randn(8, 8)).square().mean().backward()
        with pytest.raises(ConfigurationError, match=r"call step\(\) to count the batch"):
            opt.zero_grad()


def test_ones_own_address():
    """Naming the port that this peer then takes itself would train alone for ever: it is refused by name."""
    own = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigurationError, match=f"{own} is this peer's own address"):
        newcomer(own, listen=own)


@pytest.mark.parametrize(("credentials", "why"), [("wrong", "not of this run"), (None, "that run is closed")])
def test_looking_with_wrong_credentials(addresses, folder, credentials, why, capsys, monkeypatch):
    """`p2pavg peers` with other credentials than the run's says so, instead of that nobody is there."""
    monkeypatch.delenv("P2PAVG_CREDENTIALS", raising=False)
    words = ["peers", "closed", "--initial-peers", addresses["closed"]]
    words += [] if credentials is None else ["--credentials", str(folder / credentials)]
    assert cli.main(words) == 1
    assert why in capsys.readouterr().err


def test_joining_is_said(swarm, caplog):
    """A newcomer says where it joined, and with how many, without being asked."""
    caplog.set_level(logging.INFO, "p2pavg.peer")

    def said() -> bool:
        told = [record.getMessage() for record in caplog.records if record.name == "p2pavg.peer"]
        return any(re.fullmatch(r"joined run 'open' at epoch \d+, with 1 peer", words) for words in told)

    with newcomer(swarm.address) as opt:
        assert opt.peer.wait_for_peers(1, timeout=60) == 1
        deadline = time.monotonic() + 60
        while not said():  # it follows averages before it has joined
            assert time.monotonic() < deadline
            opt.model(torch.randn(8, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()


def test_waiting_for_somebody_ends_with_enter(monkeypatch):
    """The first peer waits until somebody joins or Enter is pressed."""
    terminal, keys = os.pipe()
    with os.fdopen(terminal) as stdin, newcomer(run_id="waits") as opt:
        monkeypatch.setattr("sys.stdin", stdin)
        assert opt.peer.wait_for_peers(1, timeout=0.2, enter=True) == 0
        os.write(keys, b"\n")
        assert opt.peer.wait_for_peers(1, enter=True) == 0  # and not for ever
        os.close(keys)


def test_the_end_of_stdin_is_nobody_who_presses_enter(monkeypatch):
    """A first peer that was started with </dev/null waits for others all the same, and its first epoch begins
    after that.
    """
    started = time.monotonic()
    with open(os.devnull) as stdin, newcomer(run_id="waits") as opt:
        monkeypatch.setattr("sys.stdin", stdin)
        begun = time.monotonic()
        assert opt.peer.wait_for_peers(1, timeout=0.5, enter=True) == 0
        waited = time.monotonic() - begun
        assert waited >= 0.5
        while opt.last_report is None:
            opt.model(torch.randn(8, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        assert opt.last_report.seconds_total < time.monotonic() - started - 0.9 * waited
