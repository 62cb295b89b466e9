"""Outer steps of real processes, one killed and one that joins, beside one process that does the same."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pavg import codecs
from p2pavg.optim.outer.fragments import fragments_of
from p2pavg.optim.outer.reference import Reference, Stepped
from tests.swarm.outer_peer import BATCH, LR, WAYS, loss_of, net
from tests.swarm.scripts import Script, Terminal

pytestmark = pytest.mark.swarm


@dataclass
class Log:
    """What one process told. rounds: by epoch, the members' weights and samples by peer id; stands: by epoch,
    after which of its steps it stood there.
    """

    peer: str = ""
    first: int = 0
    rounds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    theta: dict[int, float] = field(default_factory=dict)
    stands: dict[int, int] = field(default_factory=dict)
    discarded: int = 0
    plans: set[str] = field(default_factory=set)
    stages: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, lines: list[str]) -> Log:
        log = cls()
        for line in lines:
            facts: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
            if "peer" in facts:
                log.peer, log.first = facts["peer"], facts["first"]
            elif "members" in facts:
                log.discarded += facts["discarded"]
                log.plans.add(facts["plan"])
                log.stages.update(facts["stages"])
                if facts["members"]:
                    log.rounds[facts["epoch"]] = facts["members"]
                if facts["theta"] is not None:
                    log.theta[facts["epoch"]] = facts["theta"]
            elif "stands" in facts:
                log.stands[facts["stands"]] = facts["step"]
        return log


class Replayed:
    """One peer in the process that does what all did."""

    def __init__(self, number: int, log: Log, how: str, theta: np.ndarray) -> None:
        self.number, self.log, self.how = number, log, how
        self.model = net()
        sizes = [param.numel() for param in self.model.parameters()]
        self.layout = fragments_of(sizes, 1)
        self.reference = Reference(list(self.model.parameters()), self.layout, WAYS[how])
        self.inner = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.steps = self.counted = 0
        self.unsent = np.zeros(self.layout.numel, np.float32)
        self.late: list[int] = []  # epochs whose outer step is yet to come under its own moves
        self.start_at(theta)

    def start_at(self, theta: np.ndarray) -> None:
        """Go on from the swarm's parameters, with what was not sent on top."""
        self.reference.theta[:] = theta
        self.reference.publish()
        unsent = self.reference.views(-self.unsent[: self.layout.total])
        self.reference.move(unsent, self.layout.whole, 1.0)

    def until(self, steps: int, theta: list[np.ndarray]) -> None:
        """Take local steps, and the outer steps that came between them."""
        while True:
            while self.late and self.log.stands.get(self.late[0] + 1, steps + 1) <= self.steps:
                epoch = self.late.pop(0)
                moved = np.zeros(self.layout.numel, np.float32)
                after = Stepped(self.layout.whole, theta[epoch + 1], None)
                self.reference.shift(moved, after, None, 1.0)
                self.reference.theta[:] = after.theta
                self.reference.move(self.reference.views(moved), after.of, 1.0)
            if self.steps == steps:
                return
            self.inner.zero_grad()
            loss_of(self.model, self.number, self.steps).backward()
            self.inner.step()
            self.steps += 1

    def contribution(self, samples: int, theta: list[np.ndarray]) -> np.ndarray:
        """What it moved in so many samples, as the others get it."""
        self.until(self.counted + samples // BATCH, theta)
        self.counted = self.steps
        moved = np.zeros(self.layout.numel, np.float32)
        self.reference.displacement(moved)
        if self.how == "dense":
            return moved
        codec, sent = codecs.get("sparse-16"), np.empty_like(moved)
        data = np.empty(codec.encoded_size(len(moved)), np.uint8)
        assert codec.encode(moved, data, 1.0)
        codec.decode(data, sent)
        self.unsent = moved - sent
        return sent


def replay(logs: list[Log], how: str, epochs: int) -> nn.Module:
    """One process that takes all local steps of all peers, and an outer step for each average."""
    model = net()
    sizes = [param.numel() for param in model.parameters()]
    swarm = Reference(list(model.parameters()), fragments_of(sizes, 1), WAYS[how])
    theta = [swarm.theta.copy()]
    peers: dict[str, Replayed] = {}
    for epoch in range(epochs):
        for number, log in enumerate(logs):
            if log.first == epoch and log.peer not in peers:
                peers[log.peer] = Replayed(number, log, how, theta[epoch])
        members = next(log.rounds[epoch] for log in logs if epoch in log.rounds)
        total = sum(weight for weight, _ in members.values())
        mean = np.zeros(swarm.fragments.numel, np.float32)
        for peer, (weight, samples) in members.items():  # in rank order
            if weight:
                share = weight / total
                mean += np.float32(share) * peers[peer].contribution(int(samples), theta)
        swarm.adopt(swarm.stepped(mean, gathered=len(members) > 1))
        theta.append(swarm.theta.copy())
        for peer, replayed in peers.items():
            if members.get(peer, [0.0])[0]:
                replayed.start_at(swarm.theta)
            else:
                replayed.late.append(epoch)
    swarm.publish()
    return model


def validation(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, 10**6, 0, 4096))


@pytest.mark.timeout(250)
@pytest.mark.parametrize("how", WAYS)
def test_a_swarm_trains_as_one_process_does_what_its_peers_did(how: str, tmp_path: Path) -> None:
    """Three processes, of which one is killed, and one that joins end with the loss of one process that
    takes the same local and outer steps; θ_ref is equal on all of them after every outer step.
    """

    def start(number: int, others: int, seconds: float, *addresses: str) -> tuple[Script, str]:
        words = (str(number), how, str(others), str(seconds), str(tmp_path), *addresses)
        script = terminal("-m", "tests.swarm.outer_peer", *words)
        return script, json.loads(script.line_with("address"))["address"]

    with Terminal() as terminal:
        first, address = start(0, 2, 0.01)
        others = [start(number, 2, 0.01 * number, address)[0] for number in (1, 2)]
        others[1].line_with('"stands": 3')
        others[1].process.kill()
        joined, _ = start(3, 1, 0.01, address)
        for _ in range(3):
            stands = json.loads(joined.line_with('"stands"'))["stands"]
        last = stands + 8
        (tmp_path / "now").write_text(str(last))
        (tmp_path / "now").rename(tmp_path / "last")
        for script in (first, others[0], joined):
            script.line_with("ended")
        scripts = [first, *others, joined]
        logs = [Log.of(script.rest().splitlines()) for script in scripts]
    for epoch in range(last):
        assert len({log.theta[epoch] for log in logs if epoch in log.theta}) <= 1, epoch
    assert ("all-gather" if how == "sparse" else "flat") in logs[0].plans
    sent = {"contributions"} if how == "sparse" else {"contributions", "results"}
    assert sent <= logs[0].stages
    together = [len(log.rounds) for log in logs]
    assert together[2] >= 2, "the one that was killed was in no average"
    assert min(map(len, logs[0].rounds.values())) > 1, "one committed alone while another was reachable"
    assert any(sum(weight > 0 for weight, _ in m.values()) > 1 for m in logs[0].rounds.values())
    assert [logs[number].discarded for number in (0, 1)] == [0, 0]
    alone = replay(logs, how, last)
    kept = net()
    for number in (0, 1, 3):
        nn.utils.vector_to_parameters(
            torch.from_numpy(np.load(tmp_path / f"{number}.npy")), kept.parameters()
        )
        assert abs(validation(kept) - validation(alone)) <= 0.001
    start_loss = validation(net())
    assert validation(alone) < 0.7 * start_loss, "nothing was learnt"


@pytest.mark.timeout(150)
def test_who_is_away_for_a_round_loses_no_sample(tmp_path: Path) -> None:
    """A process that is stopped while the others average gets that result alone, and its samples count in
    the next average.
    """
    with Terminal() as terminal:

        def start(number: int, *addresses: str) -> Script:
            return terminal(
                *(
                    "-m",
                    "tests.swarm.outer_peer",
                    str(number),
                    "dense",
                    "2",
                    "0.05",
                    str(tmp_path),
                    *addresses,
                )
            )

        first = start(0)
        address = json.loads(first.line_with("address"))["address"]
        other, away = start(1, address), start(2, address)
        away.line_with('"stands": 2')
        for _ in range(2):
            away.line_with('"taken"')
        away.process.send_signal(signal.SIGSTOP)
        first.line_with('"stands": 3')
        away.process.send_signal(signal.SIGCONT)
        (tmp_path / "now").write_text("6")
        (tmp_path / "now").rename(tmp_path / "last")
        for script in (first, other, away):
            script.line_with("ended")
        logs = [Log.of(script.rest().splitlines()) for script in (first, other, away)]
    peer = logs[2].peer
    assert logs[0].rounds[2].get(peer, [0.0])[0] == 0
    counted = sum(samples for epoch in range(6) for _, samples in [logs[0].rounds[epoch].get(peer, (0, 0))])
    assert logs[2].discarded == 0
    assert counted > 0
    assert len({log.theta[5] for log in logs}) == 1
