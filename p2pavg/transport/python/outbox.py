"""The frames that wait to be sent to one peer, in the order in which they go out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from p2pavg.transport.engine import U8
from p2pavg.transport.frames import Kind
from p2pavg.transport.python.reducer import Reducer


class Priority(IntEnum):
    """The order of frames, lowest first. Contributions precede results, so that others reduce early."""

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
    turn: float = 0.0  # contributions of one job leave by it, lowest first
    repeat: bool = False
    not_over: int | None = None  # the number of a stream: other ones send it
    stale: bool = False  # its transfer is over: nobody is told when it is gone
    scratch: U8 | None = None  # a pooled buffer that holds the body while it is sent

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.transfer, self.kind, self.number)


class Outbox:
    """One queue per priority. A job's contributions leave by their turns, its results as they were put."""

    def __init__(self) -> None:
        self._queues: tuple[deque[Item], ...] = tuple(deque() for _ in Priority)
        self._waiting: set[tuple[int, int, int]] = set()  # chunks of jobs

    def __bool__(self) -> bool:
        return any(self._queues)

    def __iter__(self) -> Iterator[Item]:
        for queue in self._queues:
            yield from queue

    def put(self, item: Item) -> None:
        """Add an item. A chunk that waits already is not put twice; a newer heartbeat replaces one of its
        kind.
        """
        queue = self._queues[item.priority]
        if item.priority is Priority.HEARTBEAT:
            for old in [old for old in queue if old.kind is item.kind]:
                queue.remove(old)
        elif item.priority is not Priority.BLOB:
            if item.key in self._waiting:
                return
            self._waiting.add(item.key)
        at = len(queue)
        if item.priority is Priority.CONTRIBUTION:
            while at and queue[at - 1].transfer == item.transfer and queue[at - 1].turn > item.turn:
                at -= 1
        queue.insert(at, item)

    def heartbeat(self, kind: Kind) -> Item | None:
        """The heartbeat of this kind that waits."""
        return next((item for item in self._queues[Priority.HEARTBEAT] if item.kind is kind), None)

    def put_back(self, item: Item) -> None:
        """Add first an item whose stream closed before the kernel had all of it."""
        if item.key not in self._waiting:
            self._queues[item.priority].appendleft(item)
            if Priority.HEARTBEAT < item.priority < Priority.BLOB:
                self._waiting.add(item.key)

    def take(self, stream: int, chunks: bool) -> Item | None:
        """The next item for this stream. chunks=False: heartbeats alone, as the upload limit is reached."""
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
