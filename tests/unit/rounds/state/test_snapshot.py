"""Copying the live state beside the training: an update goes first, and a copy never mixes two epochs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from p2pavg.rounds.session import Session
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state import snapshot
from p2pavg.rounds.training import Section, SwappedError


class Trainer:
    """A state of four pieces that an update changes all at once, and what happens while a piece is copied."""

    def __init__(self, session: Session, between: Callable[[int], None]) -> None:
        self.session = session
        self.between = between
        self.value = 1
        self.pieces = 0
        self.swapped = False

    def snapshot(self) -> Any:
        def copy_to(out: Any) -> Iterator[None]:
            for at in range(4):
                out[at] = self.value
                self.pieces += 1
                self.between(self.pieces)
                yield
            if self.swapped:
                raise SwappedError

        return {}, {"all": Section(4, copy_to)}

    def load(self, meta: Any, buffers: Any) -> None:
        raise AssertionError

    def update(self) -> None:
        with self.session.applying():
            self.value += 1
            self.session.next_standing = (self.value, bytes([self.value]))


def session() -> Session:
    made = Session(None, 1, lambda: None)  # type: ignore[arg-type]
    made.standing = made.next_standing = (1, b"\x01")
    return made


def taken(trainer: Trainer) -> tuple[int, bytes, list[int]]:
    manifest, blob = snapshot.take(trainer, trainer.session, snapshot.Work())
    return manifest.epoch, manifest.lineage, state.unpack(manifest, blob).buffers["all"].tolist()


class Updates:
    """At some pieces, another thread wants to update; the copy goes on when it waits for it."""

    def __init__(self, at: set[int]) -> None:
        self.at = at
        self.trainer: Trainer
        self.threads: list[threading.Thread] = []

    def __call__(self, piece: int) -> None:
        if piece in self.at:
            self.threads.append(threading.Thread(target=self.trainer.update))
            self.threads[-1].start()
            while self.trainer.session._calm.is_set():  # until it wants the state, which we hold
                pass


@pytest.mark.parametrize(
    ("at", "epoch", "pieces"),
    [
        (set(), 1, 4),
        ({2}, 2, 2 + 4),  # the update waited for one piece, and the copy began anew
        ({2, 3, 4}, 4, 2 + 1 + 1 + 4),
        ({1, 2, 3, 4}, 4, 1 + 1 + 1 + 4),  # updates that come too fast wait for the fourth copy
    ],
)
def test_an_update_goes_before_a_copy(at: set[int], epoch: int, pieces: int) -> None:
    """The training thread waits for one piece; what was taken is whole, and of the epoch that it names."""
    updates = Updates(at)
    updates.trainer = trainer = Trainer(session(), updates)
    assert taken(trainer) == (epoch, bytes([epoch]), [epoch] * 4)
    assert trainer.pieces == pieces
    for thread in updates.threads:
        thread.join(10)
    assert trainer.value == 1 + len(at)


@pytest.mark.parametrize("back", [True, False])
def test_other_parameters_are_waited_out(back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the copied parameters are not the run's, the copy is made again, up to SWAPPED_S."""
    now = [100.0]
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        now[0] += seconds
        if back and len(naps) == 3:
            trainer.swapped = False

    monkeypatch.setattr(snapshot.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(snapshot.time, "sleep", nap)
    trainer = Trainer(session(), lambda piece: None)
    trainer.swapped = True
    if back:
        assert taken(trainer) == (1, b"\x01", [1] * 4)
        assert len([seconds for seconds in naps if seconds == snapshot.LOOK_S]) == 3
    else:
        with pytest.raises(SwappedError):
            taken(trainer)
        assert now[0] >= 100.0 + snapshot.SWAPPED_S


def test_reading_does_not_change_what_the_state_stands_for() -> None:
    """While an average waits to be applied, whoever reads twice finds the state before it, and its name."""
    live = session()
    trainer = Trainer(live, lambda piece: None)
    live.next_standing = (2, b"\x02")  # it was given, and is not in the parameters yet
    assert taken(trainer) == (1, b"\x01", [1] * 4)
    assert taken(trainer) == (1, b"\x01", [1] * 4)


def test_large_sections_are_copied_in_pieces() -> None:
    """No piece of a section has more bytes than a piece may have, and together they are the section."""
    values = np.arange(snapshot.PAGE_BYTES * 10_000, dtype=np.uint32).view(np.uint8)
    section = Section.of(values)
    out = np.zeros_like(values)
    assert sum(1 for _ in section.copy_to(out)) == -(-values.nbytes // (1 << 22))
    assert np.array_equal(out, values)


def test_the_size_is_known_without_a_copy() -> None:
    """That of the packed state, though no piece of it was copied."""
    trainer = Trainer(session(), lambda piece: None)
    found = snapshot.size(trainer, trainer.session)
    assert trainer.pieces == 0
    assert found == snapshot.take(trainer, trainer.session, snapshot.Work())[0].total_bytes
