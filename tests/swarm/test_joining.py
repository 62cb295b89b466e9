"""Newcomers on slow links: they get in, go on where they were, and never train apart. Peers on loopback whose
upload limit makes the link slow.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from p2pavg.bench.toy import Epoch, ToyTrainer
from p2pavg.errors import P2PAvgError
from p2pavg.peer.peer import Peer
from p2pavg.rounds.loop.departure import TrainerDeparture
from p2pavg.rounds.state.donor import LOOK_S, Donor
from p2pavg.rounds.training import Contribution, KeepGoing

pytestmark = pytest.mark.swarm

DEADLINE_S = 60.0
NUMEL = 450_000  # a result has 0.9 MB, and every epoch makes one
STATE_MB = 3.0
EXTRA = np.random.default_rng(3).integers(0, 256, int(STATE_MB * 1e6) - 4 * NUMEL, np.uint8)
STEPS = 5


def until(there: Callable[[], bool]) -> None:
    """Wait for it, with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not there():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


class Trainee:
    """A peer of this process, and its training thread."""

    def __init__(self, run_id: str, upload_mbps: float, epoch_s: float, others: list[str]) -> None:
        self.peer = Peer(
            run_id,
            initial_peers=others,
            listen="127.0.0.1:0",
            compression="fp16",
            max_upload_mbps=upload_mbps,
        ).start()
        self.epochs: list[Epoch] = []
        self.trainer: ToyTrainer | None = None  # once it is in
        self.departing_with: float | None = None  # a notice: it leaves at its next step
        self._stop = False
        self._epoch_s = epoch_s
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        with suppress(P2PAvgError):  # closed
            self.trainer = ToyTrainer(
                self.peer,
                target=STEPS,
                step_seconds=self._epoch_s / STEPS,
                numel=NUMEL,
                on_epoch=self.epochs.append,
                extra=EXTRA.copy(),
                noise=True,
            )
            while not self._stop:
                if self.departing_with is not None:
                    self._leave(self.trainer, self.departing_with)
                    return
                self.trainer.step()

    def _leave(self, trainer: ToyTrainer, notice_s: float) -> None:
        session = trainer.session
        nothing = Contribution(None, 1.0, 0)
        session.discard("nothing is to be handed over")
        while not isinstance(outcome := session.leave(nothing, notice_s), KeepGoing):
            trainer._apply(outcome, time.monotonic())
        self.peer.close()

    @property
    def own(self) -> list[Epoch]:
        """Epochs that hold samples of its own."""
        return [epoch for epoch in self.epochs if epoch.report is not None and epoch.report.local_samples]

    @property
    def downloads(self) -> bool:
        """Whether it knows which state it gets."""
        return self.peer.download is not None and self.peer.download[1] > 0

    @property
    def downloaded(self) -> float:
        """The share of the state that is here."""
        progress = self.peer.download
        return progress[0] / progress[1] if progress is not None and progress[1] else 0.0

    def close(self) -> None:
        self._stop = True
        self.peer.close()
        self.thread.join(DEADLINE_S)


@contextmanager
def swarm(run_id: str, upload_mbps: float, epoch_s: float) -> Iterator[Callable[[], Trainee]]:
    """Makes peers: the first one has an epoch behind it before it is given; all are closed at the end."""
    made: list[Trainee] = []

    def another() -> Trainee:
        made.append(Trainee(run_id, upload_mbps, epoch_s, [one.peer.address for one in made[:1]]))
        if len(made) == 1:
            until(lambda: len(made[0].epochs) > 1)
        return made[-1]

    try:
        yield another
    finally:
        for one in made:
            one.close()


def equal(*trainees: Trainee) -> None:
    """All hold the same parameters after every epoch that two of them applied."""
    seen: dict[int, set[str]] = {}
    for one in trainees:
        for epoch in one.epochs:
            seen.setdefault(epoch.epoch, set()).add(epoch.parameters)
            assert epoch.wrong == ""
    assert all(len(values) == 1 for values in seen.values())


@pytest.mark.timeout(120)
def test_a_newcomer_gets_in_though_results_outpace_the_link(caplog: pytest.LogCaptureFixture) -> None:
    """Results of 0.9 MB every 0.2 s are 36 Mb/s: over 24 Mb/s rounds wait for the newcomer, as both say."""
    with swarm("outpaced", 24, 0.2) as another:
        donor = another()
        newcomer = another()
        until(lambda: len(newcomer.own) > 2)
        joined = newcomer.peer.joined
        assert joined is not None
        state_s = 8e-6 * joined.state_bytes / 24
        assert joined.seconds < 2.5 * state_s + 3 * 0.2 + 3.0  # this machine may be busy
        assert joined.results > 0
        equal(donor, newcomer)
    assert re.search(r"joining: 3(\.0\d)? MB of state", caplog.text)
    assert "rounds wait for newcomer" in caplog.text


@pytest.mark.timeout(120)
def test_a_download_goes_on_where_it_was_when_its_link_breaks() -> None:
    """A link that breaks half-way costs what was under way, and not what was here."""
    with swarm("broken", 12, 2.0) as another:
        donor = another()
        newcomer = another()
        until(lambda: newcomer.downloaded > 0.5)
        place: Any = donor.peer._runtime
        loop: Any = donor.peer._thread

        async def break_it() -> None:
            for link in list(place.links.values()):
                link.close("a test breaks it")

        before = newcomer.downloaded
        loop.run(break_it())
        until(lambda: newcomer.peer.joined is not None)
        joined, received = (
            newcomer.peer.joined,
            newcomer.peer.received_bytes,
        )  # over the links that are up now
        assert joined is not None
        assert received - joined.result_bytes < (1 - before) * joined.state_bytes + 0.9e6
        until(lambda: bool(newcomer.own))
        equal(donor, newcomer)


@pytest.fixture
def given_by_leavers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer gives anything of its state before the rounds are over for it: so no newcomer is in earlier."""
    leaving = threading.Event()
    leave = TrainerDeparture.leave

    def leaves(departure: TrainerDeparture, links: Any) -> None:
        leaving.set()
        leave(departure, links)

    waits = Donor._wait_s
    monkeypatch.setattr(TrainerDeparture, "leave", leaves)
    monkeypatch.setattr(
        Donor, "_wait_s", lambda donor, now: waits(donor, now) if leaving.is_set() else LOOK_S
    )


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("given_by_leavers")
def test_who_leaves_serves_the_state_that_nobody_else_has() -> None:
    """The only peer that has the state averages while a newcomer downloads it, and leaves: that one gets the
    state from it, and the results that follow on it, and goes on from there.
    """
    with swarm("last", 48, 0.3) as another:
        donor = another()
        newcomer = another()
        until(lambda: newcomer.downloads)
        count = len(donor.epochs)
        until(lambda: len(donor.epochs) > count + 1)  # the first of the two may be in the state
        donor.departing_with = 30.0
        donor.thread.join(DEADLINE_S)
        last = donor.epochs[-1].epoch
        until(lambda: len(newcomer.own) > 1)
        assert newcomer.own[0].epoch == last + 1
        assert newcomer.peer.joined is not None
        assert newcomer.peer.joined.results > 0
        equal(donor, newcomer)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("given_by_leavers")
def test_newcomers_without_a_state_do_not_train_apart(caplog: pytest.LogCaptureFixture) -> None:
    """The only peer that has the state is gone before two newcomers have it: they wait, say so, and begin no
    run of their own.
    """
    with swarm("orphans", 4, 0.3) as another:
        donor = another()
        newcomers = [another(), another()]
        until(lambda: all(one.downloads for one in newcomers))
        donor.departing_with = 0.2
        donor.thread.join(DEADLINE_S)
        until(lambda: caplog.text.count("the members that have the state of this run are gone") >= 2)
        assert all(one.trainer is None and not one.epochs for one in newcomers)
