"""What waits to be sent to one peer, in the order in which it goes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from p2pavg.transport.engine import U8
from p2pavg.transport.frames import Kind
from p2pavg.transport.python.reducer import Reducer


class Priority(IntEnum):
    """Lower goes first. Contributions before results: the others can then reduce while results travel."""

    HEARTBEAT = 0
    CONTRIBUTION = 1
    RESULT = 2
    JOINER = 3
    BLOB = 4


@dataclass(slots=True, eq=False)
class Item:
    """One frame to come. Its bytes are made when a stream has room for it."""

    priority: Priority
    kind: Kind
    transfer: int = 0
    rank: int = 0  # of the receiver in the job
    number: int = 0  # of the chunk: in the job's vector, or in the blob
    data: bytes | memoryview = b""  # of heartbeats and blobs
    reducer: Reducer | None = None  # of contributions and results
    repeat: bool = False
    not_over: int | None = None  # the number of a stream: other ones send it
    stale: bool = False  # its transfer is over: nobody is told when it is gone
    scratch: U8 | None = None  # pooled, holds the body while it is being sent

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.transfer, self.kind, self.number)


class Outbox:
    """One queue per priority; each job's chunks leave in the order in which they were put."""

    def __init__(self) -> None:
        self._queues: tuple[deque[Item], ...] = tuple(deque() for _ in Priority)
        self._waiting: set[tuple[int, int, int]] = set()  # chunks of jobs

    def __bool__(self) -> bool:
        return any(self._queues)

    def __iter__(self) -> Iterator[Item]:
        for queue in self._queues:
            yield from queue

    def put(self, item: Item) -> None:
        """A job's chunk that waits already is not put twice; a newer heartbeat replaces one of its kind."""
        queue = self._queues[item.priority]
        if item.priority is Priority.HEARTBEAT:
            for old in [old for old in queue if old.kind is item.kind]:
                queue.remove(old)
        elif item.priority is not Priority.BLOB:
            if item.key in self._waiting:
                return
            self._waiting.add(item.key)
        queue.append(item)

    def put_back(self, item: Item) -> None:
        """Its stream closed before it was wholly handed to the kernel: it goes first."""
        if item.key not in self._waiting:
            self._queues[item.priority].appendleft(item)
            if Priority.HEARTBEAT < item.priority < Priority.BLOB:
                self._waiting.add(item.key)

    def take(self, stream: int, chunks: bool) -> Item | None:
        """The next that this stream sends; chunks False: only heartbeats, the upload limit is reached."""
        for queue in self._queues if chunks else self._queues[: Priority.CONTRIBUTION]:
            for item in queue:
                if item.not_over != stream:
                    queue.remove(item)
                    self._waiting.discard(item.key)
                    return item
        return None

    def drop(self, unwanted: Callable[[Item], bool]) -> None:
        for queue in self._queues:
            for _ in range(len(queue)):
                item = queue.popleft()
                if unwanted(item):
                    self._waiting.discard(item.key)
                else:
                    queue.append(item)
