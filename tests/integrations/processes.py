"""Peers as processes of their own: each framework keeps state that only one peer of a process could have."""

from __future__ import annotations

import multiprocessing.connection
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tests.swarm.trainers import forking

F32 = npt.NDArray[np.float32]
DEADLINE_S = 100.0  # without a word of anybody, while all have the processors that they want
LOOK_S = 1.0
STEPS = 8
BATCH = 4  # of each peer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(8, generator=generator), torch.randn(4, generator=generator)) for _ in range(count)]


def share(rank: int, peers: int, steps: int = 4 * STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The samples that a peer draws in order: with those of the others they are the whole's batches."""
    whole = samples(steps * BATCH * peers)
    return [whole[at] for at in range(len(whole)) if at // BATCH % peers == rank]


def bits(model: nn.Module) -> F32:
    found: F32 = torch.cat([param.detach().flatten() for param in model.parameters()]).numpy().copy()
    return found


def _body(work: Callable[..., Any], rank: int, peers: int, pipe: Connection, extra: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    pipe.send(("done", work(rank, peers, Meeting(pipe), *extra)))


class Patience:
    """How long the processes may still say nothing. A busy machine is no hang: what a thread of theirs waits
    for a processor does not count.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.heard()

    def heard(self) -> None:
        """One of them said something."""
        self.left, self._at, self._queued = DEADLINE_S, time.monotonic(), self._queues()

    def look(self) -> None:
        """Let the time since the last look pass."""
        now, queued = time.monotonic(), self._queues()
        waited = max(
            (total - self._queued.get(thread, total) for thread, total in queued.items()), default=0.0
        )
        self.left -= max(0.0, now - self._at - waited)
        self._at, self._queued = now, queued

    def _queues(self) -> dict[Path, float]:
        """Seconds that each thread has waited for a processor so far."""
        found = {}
        for pid in self._pids:
            for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with suppress(OSError):  # it has ended
                    found[thread] = int(thread.read_text().split()[1]) / 1e9
        return found


class Meeting:
    """How the peers of a test find each other."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def first(self, rank: int) -> list[str]:
        """Whom to name as initial peers."""
        return [] if rank == 0 else [self._pipe.recv()]

    def there(self, opt: Any, others: int) -> None:
        """This peer has joined: go on when it sees all the others."""
        self._pipe.send(("address", opt.peer.address))
        opt.peer.wait_for_peers(others, timeout=10 * DEADLINE_S)  # `run` ends the test before

    def together(self) -> None:
        """Wait until all came here."""
        self._pipe.send(("here", None))
        self._pipe.recv()


def run(
    work: Callable[..., Any],
    peers: int,
    *extra: Any,
    lost: Collection[int] = (),
    meets: Collection[int] | None = None,
) -> list[Any]:
    """What `work(rank, peers, meeting, *extra)` returned in each of `peers` processes. lost: those that end
    without a result: None. meets: those that come `together`; None: all.
    """
    context = forking()
    pipes, started = [], []
    for rank in range(peers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_body, args=(work, rank, peers, theirs, extra), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        started.append(process)
    try:
        patience = Patience([process.pid for process in started if process.pid is not None])
        return _conduct(pipes, lost, set(range(peers)) if meets is None else set(meets), patience)
    finally:
        for process in started:
            process.join(5.0)
            if process.is_alive():
                process.kill()


def _conduct(
    pipes: Sequence[Connection], lost: Collection[int], meets: set[int], patience: Patience
) -> list[Any]:
    results: dict[int, Any] = {}
    here: set[int] = set()
    address = None
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, LOOK_S)
        if ready:
            patience.heard()
        else:
            patience.look()
        assert patience.left > 0, "a peer hangs"
        for pipe in ready:
            rank = list(pipes).index(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                if rank in lost:
                    results[rank] = None
                    continue
                raise AssertionError(f"peer {rank} ended without a result") from None
            if kind == "done":
                results[rank] = value
            elif kind == "address" and address is None:
                address = value
                for other in pipes[1:]:
                    other.send(address)
            elif kind == "here":
                here.add(rank)
                if here == meets:
                    here.clear()
                    for member in meets:
                        pipes[member].send(None)
    return [results[rank] for rank in range(len(pipes))]
