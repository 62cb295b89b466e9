"""Peers that must not take part as they are: one that sends NaN, and two that share one identity."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pavg import CollaborativeOptimizer
from p2pavg.credentials import Authority
from p2pavg.errors import ConfigurationError, IdentityInUseError, P2PAvgError
from p2pavg.identity import short_id
from p2pavg.peer import runtime as place
from p2pavg.peer.refusals import gives_way
from p2pavg.report import RoundReport
from p2pavg.transport.links.link import Link
from p2pavg.transport.python.engine import PythonEngine
from p2pavg.transport.python.reducer import Reducer

DEADLINE_S = 60.0


class Trainer:
    """A peer that trains in a thread, and keeps the weights of every epoch."""

    def __init__(self, initial_peers: list[str], **options: object) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(50, 1)
        self.weights: dict[int, torch.Tensor] = {}
        self.reports: dict[int, RoundReport] = {}
        self.error: P2PAvgError | None = None
        self.leave = threading.Event()
        self.moved = threading.Condition()
        self.opt = CollaborativeOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01),
            run_id="offenders",
            target_batch_size=96,
            batch_size_per_step=8,
            listen="127.0.0.1:0",
            initial_peers=initial_peers,
            on_round=self._on_round,
            **options,
        )
        self.thread = threading.Thread(target=self._run)

    def start(self) -> Trainer:
        self.thread.start()
        return self

    @property
    def address(self) -> str:
        return self.opt.peer.address

    @property
    def peer_id(self) -> bytes:
        return self.opt.peer.peer_id

    def _on_round(self, report: RoundReport) -> None:
        with self.moved:
            self.reports[report.epoch] = report
            self.moved.notify_all()

    def _run(self) -> None:
        generator = torch.Generator().manual_seed(int.from_bytes(self.peer_id[:4], "big"))
        while not self.leave.is_set():
            try:
                self._step(generator)
            except P2PAvgError as error:
                with self.moved:
                    self.error = error
                    self.moved.notify_all()
                return
            self.leave.wait(0.01)  # what a step takes

    def _step(self, generator: torch.Generator) -> None:
        self.model(torch.randn(8, 50, generator=generator)).square().mean().backward()
        self.opt.step()
        self.opt.zero_grad()
        with self.moved:
            self.weights.setdefault(self.opt.epoch, self.model.weight.detach().clone())
            self.moved.notify_all()

    def until(self, seen: Callable[[], Any]) -> Any:
        """Wait for what a step or a report brings; returns what is seen then."""
        with self.moved:
            found = self.moved.wait_for(seen, timeout=DEADLINE_S)
        assert found
        return found

    def close(self) -> None:
        self.leave.set()
        if self.thread.ident is not None:
            self.thread.join()
        self.opt.close()


@pytest.fixture
def trainers():
    """A function that builds a trainer; all are closed afterwards."""
    built: list[Trainer] = []

    def build(initial_peers: list[str], **options: object) -> Trainer:
        built.append(Trainer(initial_peers, **options))
        return built[-1]

    yield build
    for trainer in built:
        trainer.leave.set()
    with ThreadPoolExecutor() as pool:  # who leaves waits for one that downloads its state and steps no more
        list(pool.map(Trainer.close, built))


@pytest.mark.swarm
@pytest.mark.parametrize(("compression", "closed"), [("none", False), ("fp16", True)])
def test_a_peer_that_sends_nan_is_left_out(
    trainers, identities, compression, closed, monkeypatch, caplog
) -> None:
    """Its chunks are refused, the log and the reports name it, and the round is made without it: finite,
    equal; in an open run, and in a closed one, where they come encrypted.
    """
    caplog.set_level(logging.INFO, "p2pavg.rounds")
    credentials = identities if closed else (None, None, None)
    one = trainers([], compression=compression, credentials=credentials[0])
    two = trainers([one.address], compression=compression, credentials=credentials[1])
    monkeypatch.setattr(place, "make_engine", lambda events, codec, encrypted: PythonEngine(events))
    bad = trainers([one.address], compression=compression, credentials=credentials[2])
    assert bad.opt.peer.engine_name == "python"  # its sender is easily changed
    truly, poisonous = Reducer.contribution, threading.Event()

    def contribution(self: Reducer, number: int, scratch: np.ndarray) -> memoryview:
        body = truly(self, number, scratch)
        if poisonous.is_set() and threading.current_thread() is bad.opt.peer._thread._thread:
            return memoryview(b"\xff" * len(body))  # NaN in every codec of these
        return body

    monkeypatch.setattr(Reducer, "contribution", contribution)
    for trainer in (one, two, bad):
        trainer.start()
    one.until(lambda: any(len(report.members) == 3 for report in one.reports.values()))
    poisonous.set()

    def named(trainer: Trainer) -> list[RoundReport]:
        """The rounds of the two others that name it, and not because a busy machine kept somebody silent."""
        name = bad.peer_id.hex()
        rounds = [r for r in trainer.reports.values() if any("finite" in cause for cause in r.causes)]
        return [r for r in rounds if len(r.members) == 2 and any(map(name.startswith, r.failed_members))]

    first = {}
    for trainer in (one, two):
        report = first[trainer] = trainer.until(lambda trainer=trainer: named(trainer))[0]
        assert report.attempts > 1
        trainer.until(lambda trainer=trainer, report=report: max(trainer.weights) > report.epoch + 1)
    why = f"peer {short_id(bad.peer_id)} failed this round"
    assert any(why in record.message and "finite" in record.message for record in caplog.records)
    common = one.weights.keys() & two.weights.keys()
    assert max(common) > first[one].epoch
    for epoch in common:
        assert torch.isfinite(one.weights[epoch]).all()
        assert torch.equal(one.weights[epoch], two.weights[epoch])


@pytest.fixture
def identities(tmp_path: Path) -> list[Path]:
    """Credentials of three peers, as `invite --count 3` writes them."""
    authority, files = Authority.new("offenders"), []
    for number in range(3):
        files.append(tmp_path / f"spot-{number}")
        files[-1].touch(0o600)
        files[-1].write_text(authority.member().to_text())
    return files


@pytest.mark.swarm
@pytest.mark.parametrize("asked", ["another peer", "itself"])
def test_a_second_use_of_an_identity_is_refused(trainers, identities, asked) -> None:
    """Where the first is known to live, a second process with its credentials is told so, and disturbs
    nobody.
    """
    one = trainers([], credentials=identities[0])
    two = trainers([one.address], credentials=identities[1])
    for trainer in (one, two):
        trainer.start()
    one.until(lambda: any(len(report.members) == 2 for report in one.reports.values()))
    link = one.opt.peer._runtime.links[two.peer_id]
    with pytest.raises(ConfigurationError, match=r"another .*process uses the identity"):
        trainers([(one if asked == "another peer" else two).address], credentials=identities[1])
    after = max(one.reports)
    one.until(lambda: sum(len(one.reports[e].members) == 2 for e in one.reports if e > after) > 2)
    assert one.opt.peer._runtime.links[two.peer_id] is link


@pytest.mark.swarm
def test_two_uses_of_an_identity_meet_when_parts_merge(trainers, identities) -> None:
    """Of two swarms with a process of one identity each, the peers merge; the process that began later is
    refused, and ends with an error that says why.
    """
    one = trainers([], credentials=identities[0])
    first = trainers([one.address], credentials=identities[1])
    two = trainers([], credentials=identities[2])
    second = trainers([two.address], credentials=identities[1])
    assert first.peer_id == second.peer_id
    for trainer in (one, first, two, second):
        trainer.start()
    for trainer in (one, two):
        trainer.until(lambda trainer=trainer: any(len(r.members) == 2 for r in trainer.reports.values()))
    assert one.opt.peer._thread.run(one.opt.peer._runtime.dht.introduce(two.address))
    second.until(lambda: second.error is not None)
    assert isinstance(second.error, IdentityInUseError)
    second.close()
    for trainer in (one, two, first):  # the rest is one swarm
        trainer.until(lambda trainer=trainer: any(len(r.members) == 3 for r in trainer.reports.values()))
        assert trainer.error is None


@pytest.mark.swarm
def test_a_process_that_was_taken_for_dead_gives_way_to_its_successor(
    trainers, identities, monkeypatch
) -> None:
    """A second process takes over the identity of one that does not answer (it was stopped, say); when the
    first goes on, it is kept out, and ends with an error that says why.
    """
    one = trainers([], credentials=identities[0])
    first = trainers([one.address], credentials=identities[1])
    for trainer in (one, first):
        trainer.start()
    one.until(lambda: any(len(report.members) == 2 for report in one.reports.values()))
    with monkeypatch.context() as patch:
        patch.setattr(Link, "alive", lambda *_: asyncio.sleep(0, False))
        second = trainers([one.address], credentials=identities[1]).start()
    first.until(lambda: first.error is not None)
    assert isinstance(first.error, IdentityInUseError)
    second.until(lambda: any(len(report.members) == 2 for report in second.reports.values()))
    assert second.error is None


@pytest.mark.parametrize(
    ("shut_out", "peers", "later", "proven", "ends"),
    [
        (1, 3, False, True, False),
        (1, 3, True, True, True),  # closed: one word is enough for the later one
        (1, 3, True, False, False),  # open: anybody could say so
        (2, 3, False, False, True),
        (1, 2, True, False, True),
        (1, 2, False, False, False),
        (1, 1, False, False, True),
    ],
)
def test_which_of_two_processes_of_an_identity_ends(shut_out, peers, later, proven, ends) -> None:
    """The one that most keep out; of equals, and in a closed run at the first word, the later one."""
    assert gives_way(shut_out, peers, later=later, proven=proven) is ends
