"""Peers as processes of their own: each framework keeps state that only one peer of a process could have."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

F32 = npt.NDArray[np.float32]
DEADLINE_S = 100.0
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
        opt.peer.wait_for_peers(others, timeout=DEADLINE_S)

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
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    for rank in range(peers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_body, args=(work, rank, peers, theirs, extra), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        started.append(process)
    try:
        return _conduct(pipes, lost, set(range(peers)) if meets is None else set(meets))
    finally:
        for process in started:
            process.join(5.0)
            if process.is_alive():
                process.kill()


def _conduct(pipes: Sequence[Connection], lost: Collection[int], meets: set[int]) -> list[Any]:
    results: dict[int, Any] = {}
    here: set[int] = set()
    address = None
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, DEADLINE_S)
        assert ready, "a peer hangs"
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
