from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pavg.rounds.loop.backlog import Backlog
from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.training import Average, Contribution, Heal, Inheritance, Outcome, State
from tests.unit.rounds.loop.test_backlog import average

HERE = b"h" * 32


def commit(epoch: int, before: bytes, *, following: bool) -> Any:
    """As much of a commit as deliveries read."""
    ballot = SimpleNamespace(epoch=epoch)
    return SimpleNamespace(ballot=ballot, before=before, lineage=b"n" * 32, following=following)


def arrive(deliveries: Deliveries) -> Future[Outcome]:
    """The training thread comes to a boundary."""
    answer: Future[Outcome] = Future()
    deliveries.wait(Contribution(None, 1.0, 3), answer)
    return answer


@pytest.fixture
def deliveries() -> Deliveries:
    """Of a peer at epoch 4."""
    session: Any = SimpleNamespace(standing=(4, HERE), next_standing=(4, HERE))
    return Deliveries(session, Backlog())


@pytest.mark.parametrize("downloading", [False, True])
def test_only_what_waits_for_a_state_goes_to_disk(tmp_path: Path, downloading: bool) -> None:
    """However large an average is, it stays in memory when the training thread takes it next."""
    session: Any = SimpleNamespace(standing=(4, HERE), next_standing=(4, HERE))
    deliveries = Deliveries(session, Backlog(memory_bytes=0, directory=tmp_path))
    deliveries.unloaded = downloading
    deliveries.put(average(4)[0], commit(4, HERE, following=False))
    deliveries.unloaded = False
    answer = arrive(deliveries)
    assert deliveries.give()
    outcome = answer.result()
    assert isinstance(outcome, Average)
    assert isinstance(outcome.result.data, np.memmap) is downloading


@pytest.mark.parametrize("departing", [False, True])
def test_who_leaves_loads_no_state(deliveries: Deliveries, departing: bool) -> None:
    """A state is there, with a result that follows on it: whoever stays gets it, whoever leaves neither."""
    deliveries.put(average(9)[0], commit(9, b"s" * 32, following=True))
    deliveries.put_state(Heal(State(9, b"s" * 32, {})))
    deliveries.departing = departing
    answer = arrive(deliveries)
    assert deliveries.give() is not departing
    assert answer.done() is not departing
    if not departing:
        assert isinstance(answer.result(), Heal)


@pytest.mark.parametrize("departing", [False, True])
def test_who_leaves_takes_its_last_average_and_what_it_inherited(
    deliveries: Deliveries, departing: bool
) -> None:
    """Whoever leaves during a download gets the average of its own round, then its inheritance to hand on."""
    own, _ = average(4)
    deliveries.put(own, commit(4, HERE, following=False))
    deliveries.put_inheritance(Inheritance(7, own.result))
    deliveries.downloading = deliveries.unloaded = True
    deliveries.departing = departing
    answer = arrive(deliveries)
    assert deliveries.give() is departing
    if departing:
        assert answer.result() is own
        deliveries.applied()
        answer = arrive(deliveries)
        assert not deliveries.give()
    assert deliveries.give_inheritance() is departing
    assert answer.done() is departing


def test_an_average_from_before_a_state_is_void(deliveries: Deliveries) -> None:
    """An older state is loaded, on which an average follows that waits: that comes again, as a result."""
    older = b"o" * 32
    deliveries.put(average(4)[0], commit(3, older, following=False))
    deliveries.put(average(4)[0], commit(3, older, following=True))
    deliveries.put_state(Heal(State(3, older, {})))
    given = []
    for _ in range(3):
        answer = arrive(deliveries)
        if deliveries.give():
            outcome = answer.result()
            given.append(type(outcome))
            deliveries._session.standing = deliveries._session.next_standing
            if isinstance(outcome, Average):
                assert deliveries.applied()[1].following  # type: ignore[index,union-attr]
            else:
                deliveries.applied()
    assert given == [Heal, Average]
