"""A virtual clock, and a network of ordered links that can be slow, cut in one direction, reset, or die."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Job = Callable[[], None]


class World:
    """Runs callbacks in the order of virtual time."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.events = 0
        self._queue: list[tuple[float, int, Job]] = []
        self._count = 0

    def at(self, time: float, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, job))

    def after(self, delay: float, job: Job) -> None:
        self.at(self.now + delay, job)

    def run(self, until: float, stop: Callable[[], bool], look_every: int = 1) -> None:
        """Until then, or until `stop` says so, which is asked after so many events."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            if self.events % look_every == 0 and stop():
                return
            time, _, job = pop(queue)
            if time > self.now:
                self.now = time
            self.events += 1
            job()


@dataclass(slots=True)
class Way:
    """One direction of a link."""

    latency: float
    free_at: float = 0.0  # deliveries are ordered
    cut_at: float | None = None
    held: list[Job] = field(default_factory=list)  # sent while cut: TCP sends them again when the cut ends
    chunk_seconds: float = 0.0  # bandwidth: how long a chunk of gradient takes
    data_free_at: float = 0.0
    session: int = 0  # counts connections: a reset loses what is under way


class Ways(dict[tuple[Any, Any], Way]):
    """By (from, to). In a mesh they are made when they are first used."""

    mesh: Callable[[], Way] | None = None

    def __missing__(self, pair: tuple[Any, Any]) -> Way:
        if self.mesh is None:
            raise KeyError(pair)
        way = self[pair] = self.mesh()
        return way


def _arrive(way: Way, session: int, deliver: Job) -> None:
    if way.session != session:
        return
    if way.cut_at is not None:
        way.held.append(partial(_arrive, way, session, deliver))
    else:
        deliver()


class Network:
    """All links. A link is up or down for both sides; each way can be cut without either side being told."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ways = Ways()
        self.cuts: dict[tuple[Any, Any], None] = {}  # ways that are cut, in the order of the cuts
        self.cut_at: dict[Any, dict[tuple[Any, Any], None]] = defaultdict(dict)  # the same, by either end

    def connect(self, a: Any, b: Any, latency: float, chunk_seconds: float) -> None:
        for x, y in ((a, b), (b, a)):
            old, way = self.ways.get((x, y)), Way(latency, chunk_seconds=chunk_seconds)
            if old is not None:
                way.cut_at = old.cut_at
                old.session += 1
            self.ways[x, y] = way

    def disconnect(self, a: Any, b: Any) -> None:
        for pair in ((a, b), (b, a)):
            if pair in self.ways:
                self.ways[pair].session += 1
                self.ways[pair].held.clear()

    def send(self, a: Any, b: Any, deliver: Job, *, data: bool = False) -> None:
        """In order within each way and kind; lost when the connection is reset before it arrives."""
        self._send(self.ways[a, b], deliver, data)

    def _send(self, way: Way, deliver: Job, data: bool) -> None:
        world = self.world
        now, noise = world.now, world.random.random()
        if data:
            way.data_free_at = max(way.data_free_at, now) + way.chunk_seconds
            at = way.data_free_at + way.latency * (1 + 0.2 * noise)
        else:
            at = way.free_at = max(way.free_at, now + way.latency * (1 + 0.3 * noise))
        world.at(at, partial(_arrive, way, way.session, deliver))

    def cut(self, a: Any, b: Any) -> None:
        if self.ways[a, b].cut_at is None:
            self.ways[a, b].cut_at = self.world.now
            self.cuts[a, b] = self.cut_at[a][a, b] = self.cut_at[b][a, b] = None

    def mend(self, a: Any, b: Any) -> None:
        way = self.ways[a, b]
        way.cut_at = None
        for cuts in (self.cuts, self.cut_at[a], self.cut_at[b]):
            cuts.pop((a, b), None)
        held, way.held = way.held, []
        for deliver in held:
            self.send(a, b, deliver)
