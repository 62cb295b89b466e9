"""Outer steps over real links: peers of unlike speed, one that joins, one that vanishes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer, Outer
from p2pavg.errors import IncompatiblePeerError
from p2pavg.report import RoundReport

pytestmark = pytest.mark.swarm

DEADLINE_S = 100.0
EPOCHS = 8
WHOLE = Outer()


def net(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), norm(64), nn.Linear(64, 4))


class Trainer(threading.Thread):
    """A peer on a thread of this process, until the swarm has taken EPOCHS outer steps."""

    def __init__(
        self,
        address: str | None,
        pause: float,
        vanishes_after: int | None = None,
        outer: Outer | str = WHOLE,
        compression: str = "int8",
        target: int | None = 256,
    ) -> None:
        super().__init__(daemon=True)
        self.ready = threading.Event()
        self.reports: dict[int, RoundReport] = {}
        self.model = net(nn.LayerNorm if outer == "sparse" else nn.BatchNorm1d)
        self.failure: BaseException | None = None
        self._address = address
        self._pause = threading.Event(), pause
        self._vanishes_after = vanishes_after
        self._outer = outer
        self._compression = compression
        self._target = target
        self.steps = 0
        self.first_epoch = 0
        self.over = threading.Event()  # the last outer step is taken
        self.all_over = threading.Event()  # by all others too

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.failure = error
        finally:
            self.ready.set()
            self.over.set()

    def _train(self) -> None:
        options: dict[str, Any] = {"initial_peers": [self._address] if self._address else []}
        opt = CollaborativeOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=1e-2),
            "outer",
            self._target,
            4,
            compression=self._compression,
            outer=self._outer,
            listen="127.0.0.1:0",
            on_round=lambda report: self.reports.__setitem__(report.epoch, report),
            **options,
        )
        self.address = opt.peer.address
        self.first_epoch = opt.epoch
        self.ready.set()
        generator = torch.Generator().manual_seed(id(self) % 1000)
        waits, pause = self._pause
        while opt.epoch < EPOCHS:
            waits.wait(pause)  # an accelerator computes
            self.model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            self.steps += 1
            if self._vanishes_after is not None and opt.epoch >= self._vanishes_after:
                opt.close(0)
                return
        self.over.set()
        self.all_over.wait(DEADLINE_S)  # who missed the last round needs somebody that has its result
        opt.close()


def end_together(*peers: Trainer) -> None:
    """Let no peer leave before the last one has taken its last outer step."""
    for peer in peers:
        peer.over.wait(DEADLINE_S)
    for peer in peers:
        peer.all_over.set()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("outer", "compression"),
    [(WHOLE, "int8"), (Outer(fragments=3, overlap=2), "int4"), ("sparse", "fp16")],
    ids=["whole", "fragments", "sparse"],
)
def test_theta_ref_is_equal_whatever_comes_and_goes(outer: Outer | str, compression: str) -> None:
    """A fast peer, one four times slower, one that joins and one that vanishes share θ_ref to the bit,
    always: all at once, in fragments behind the local steps, and where each sends a 64th to all others.
    """
    how: dict[str, Any] = {"outer": outer, "compression": compression}
    fast = Trainer(None, 0.002, **how)
    fast.start()
    assert fast.ready.wait(DEADLINE_S)
    slow, vanishing = Trainer(fast.address, 0.008, **how), Trainer(fast.address, 0.002, 4, **how)
    slow.start()
    vanishing.start()
    assert vanishing.ready.wait(DEADLINE_S)
    newcomer = Trainer(fast.address, 0.002, **how)
    newcomer.start()
    peers = (fast, slow, vanishing, newcomer)
    end_together(fast, slow, newcomer)
    for peer in peers:
        peer.join(DEADLINE_S)
        assert not peer.is_alive(), "a peer hangs"
        assert peer.failure is None
    common = 0
    for epoch in range(EPOCHS):
        stepped = [peer.reports[epoch].extra for peer in peers if epoch in peer.reports]
        # The report of an epoch that was downloaded says nothing.
        told = {extra["theta_sha256_low"] for extra in stepped if extra}
        assert len(told) <= 1, [peer.reports.get(epoch) for peer in peers]
        common += sum(epoch in peer.reports for peer in peers) > 1
    assert common >= 4
    for one, other in zip(fast.model.parameters(), slow.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert slow.steps < fast.steps


@pytest.mark.timeout(200)
def test_epochs_follow_the_peers_present() -> None:
    """With sync_every=8 and batches of 4 an average of two peers holds 64 samples, or some steps more."""
    how: dict[str, Any] = {"outer": Outer(sync_every=8), "target": None}
    one = Trainer(None, 0.004, **how)
    one.start()
    assert one.ready.wait(DEADLINE_S)
    other = Trainer(one.address, 0.004, **how)
    other.start()
    end_together(one, other)
    for peer in (one, other):
        peer.join(DEADLINE_S)
        assert not peer.is_alive(), "a peer hangs"
        assert peer.failure is None
    together = [report.samples for report in one.reports.values() if len(report.members) == 2]
    assert len(together) >= 3
    assert all(64 <= samples <= 80 for samples in together[2:])  # by then both see each other


def test_peers_whose_outer_steps_differ_are_refused_by_name() -> None:
    """Another outer learning rate, or none, is another run: the newcomer is told what differs."""
    model = net()
    with CollaborativeOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        "terms",
        64,
        4,
        outer="diloco",
        listen="127.0.0.1:0",
        initial_peers=[],
    ) as opt:
        for outer in (None, Outer(lr=0.5), "sparse"):
            with pytest.raises(IncompatiblePeerError, match="outer"):
                CollaborativeOptimizer(
                    torch.optim.SGD(net().parameters(), lr=0.1),
                    "terms",
                    64,
                    4,
                    outer=outer,
                    listen="127.0.0.1:0",
                    initial_peers=[opt.peer.address],
                )
