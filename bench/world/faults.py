"""What befalls the peers: drawn by a seed, injected, undone."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.world import clock, who
from bench.world.run import Life, World

KINDS = (
    *("kill", "stop", "cut", "cut-one-way", "loss", "corrupt"),
    *("spot", "sleep", "clock", "disk", "flood", "lie"),
)
NEEDS_OTHERS = 3  # a fault that takes a peer away leaves so many unharmed, or waits for a better moment
TAKES_AWAY = frozenset({"kill", "stop", "cut", "cut-one-way", "spot", "sleep"})
FULL_MINUTES = 15.0  # in shorter runs the long absences are shorter in proportion
CLOCK_S = 5 * 3600.0
DISK_BYTES = 4 << 20  # a checkpoint is larger, what a life of an hour writes down smaller
QUIET_S = 95.0  # before the first fault: what the prediction goes by
RESTART_S = 10.0  # from a kill to the same peer's next life
LINKS = {
    "cut": {"down": 1},
    "cut-one-way": {"down": 1},
    "loss": {"loss": 0.01},
    "corrupt": {"corrupt": 0.002},
}


@dataclass(frozen=True)
class Planned:
    """One fault of the schedule."""

    at_s: float  # after the beginning
    kind: str
    draw: float  # 0..1: which of those that it can strike
    seconds: float


def schedule(seed: int, seconds: float, every: float) -> list[Planned]:
    """The faults of a run: each kind comes before one comes again. A pure function."""
    if every <= 0:
        return []
    rng, planned, bag = random.Random(seed), [], list[str]()
    share = min(1.0, seconds / 60 / FULL_MINUTES)
    at = max(every, QUIET_S)
    while at < seconds - every / 2:
        if not bag:
            bag = rng.sample(KINDS, len(KINDS))
        kind = bag.pop()
        lasts = {
            "kill": RESTART_S,
            "stop": rng.uniform(5.0, 5.0 + 55.0 * share),
            "sleep": max(20.0, 120.0 * share),
            "spot": max(20.0, 180.0 * share),
            "clock": max(20.0, 120.0 * share),
            "disk": max(45.0, 120.0 * share),
        }.get(kind, rng.uniform(5.0, 20.0))
        planned.append(Planned(at, kind, rng.random(), lasts))
        at += every * rng.uniform(0.7, 1.3)
    return planned


class Faults:
    """Injects the schedule's faults into a world, and ends them."""

    def __init__(self, world: World, *, seed: int, seconds: float, every: float) -> None:
        self._world = world
        self._began = time.monotonic()
        self._planned = schedule(seed, seconds, every)
        self._seed = seed
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._moved: dict[str, int] = {}
        self._number = 0
        movers = [place for place in world.places if place.moves and not place.spot]
        self._moves = [(self._began + seconds / 2, place) for place in movers] if every > 0 else []

    def tick(self, now: float) -> None:
        """Do what is due."""
        due = [entry for entry in self._undo if entry[0] <= now]
        self._undo = [entry for entry in self._undo if entry[0] > now]
        for _, undo in due:
            undo()
        for at, place in list(self._moves):
            life = self._world.lives.get(place.name)
            if now >= at and life is not None and life.well:
                self._moves.remove((at, place))
                self._note("address", life, 0.0)
                self._move(place)
        if self._planned and now >= self._began + self._planned[0].at_s:
            self._inject(self._planned[0], now)

    def end(self) -> None:
        """End all that lasts; whoever is away comes back."""
        undo, self._undo = self._undo, []
        for _, each in sorted(undo, key=lambda entry: entry[0]):
            each()
        world = self._world
        limit = time.monotonic() + 60.0
        while time.monotonic() < limit and not all(life.address for life in world.lives.values()):
            world.hear(0.1)
            world.retry()

    def _inject(self, fault: Planned, now: float) -> None:
        able = [life for life in self._world.well() if self._can(fault.kind, life)]
        spared = NEEDS_OTHERS if len(self._world.places) > NEEDS_OTHERS else 1
        if not able or (fault.kind in TAKES_AWAY and len(self._world.well()) <= spared):
            if now > self._began + fault.at_s + 30.0:  # its moment never came
                self._planned.pop(0)
                self._world.note("spared", fault=fault.kind)
            return
        self._planned.pop(0)
        victim = able[int(fault.draw * len(able))]
        self._number += 1
        getattr(self, "_" + fault.kind.replace("-", "_"))(victim, fault)

    def _can(self, kind: str, life: Life) -> bool:
        place = life.place
        if kind == "spot":
            return place.spot
        if kind == "sleep":
            return place.laptop or len(self._world.places) == 2
        return kind != "flood" or place.public

    def _note(self, kind: str, life: Life, seconds: float, **more: Any) -> None:
        at = time.monotonic()
        self._world.note(
            "fault", fault=kind, who=life.name, until=at + seconds, since_s=at - self._began, **more
        )

    def _after(self, seconds: float, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + seconds, undo))

    # ------------------------------------------------------------------------------ processes

    def _kill(self, life: Life, fault: Planned) -> None:
        self._note("kill", life, fault.seconds)
        life.process.kill()
        self._after(fault.seconds, lambda: self._again(life))

    def _again(self, life: Life) -> None:
        self._world.born(life.place)

    def _stop(self, life: Life, fault: Planned) -> None:
        self._note("stop", life, fault.seconds)
        self._freeze(life)
        self._after(fault.seconds, lambda: self._thaw(life))

    def _freeze(self, life: Life) -> None:
        life.frozen = True
        life.process.send_signal(signal.SIGSTOP)

    def _thaw(self, life: Life) -> None:
        life.process.send_signal(signal.SIGCONT)
        life.frozen = False

    def _spot(self, life: Life, fault: Planned) -> None:
        """A notice; the replacement is another machine, of the same owner, at another address."""
        self._note("spot", life, fault.seconds)
        life.frozen = True
        life.process.send_signal(signal.SIGTERM)

        def replace() -> None:
            if life.process.poll() is None:
                self._world.note("overstayed", who=life.name)
                life.process.kill()
                life.process.wait()
            self._move(life.place)
            self._again(life)

        self._after(fault.seconds, replace)

    def _sleep(self, life: Life, fault: Planned) -> None:
        """As a lid that closes: neither a program nor the network goes on."""
        self._note("sleep", life, fault.seconds)
        mend = self._break(life, {"down": 1})
        self._freeze(life)

        def wake() -> None:
            mend()
            self._thaw(life)

        self._after(fault.seconds, wake)

    # ------------------------------------------------------------------------------ the network

    def _cut(self, life: Life, fault: Planned) -> None:
        self._note(fault.kind, life, fault.seconds)
        life.frozen = True
        mend = self._break(life, LINKS[fault.kind], one_way=fault.kind == "cut-one-way", draw=fault.draw)

        def undo() -> None:
            mend()
            life.frozen = False

        self._after(fault.seconds, undo)

    _cut_one_way = _cut

    def _loss(self, life: Life, fault: Planned) -> None:
        self._note(fault.kind, life, fault.seconds)
        self._after(fault.seconds, self._break(life, LINKS[fault.kind]))

    _corrupt = _loss

    def _break(
        self, life: Life, settings: dict[str, float], *, one_way: bool = False, draw: float = 0.0
    ) -> Callable[[], None]:
        """Change all paths of a machine, or those of one direction; what undoes that."""
        lab, host = self._world.lab, life.place.name
        pairs = [pair for pair in lab.topology.paths if host in pair]
        if one_way:
            side = int(draw * 1000) % 2
            pairs = [pair for pair in pairs if pair[side] == host]
        for pair in pairs:
            lab.set(*pair, **settings)

        def mend() -> None:
            for pair in pairs:
                usual = lab.topology.paths[pair]
                lab.set(*pair, **{name: getattr(usual, name, 0) for name in settings})

        return mend

    def _move(self, place: who.Place) -> None:
        number = self._moved[place.name] = self._moved.get(place.name, -1) + 1
        self._world.lab.set_address(place.name, place.moves[number % len(place.moves)])

    # ------------------------------------------------------------------------------ what is wrong inside

    def _clock(self, life: Life, fault: Planned) -> None:
        self._note("clock", life, fault.seconds)
        clock.jump(life.folder / "clock", CLOCK_S)
        self._after(fault.seconds, lambda: clock.jump(life.folder / "clock", 0.0))

    def _disk(self, life: Life, fault: Planned) -> None:
        self._note("disk", life, fault.seconds)
        self._world.tell(life, disk=DISK_BYTES)
        self._after(fault.seconds, lambda: self._world.tell(life, disk=None))

    def _lie(self, life: Life, fault: Planned) -> None:
        self._note("lie", life, fault.seconds)
        self._world.tell(life, lie=fault.seconds, seed=self._seed * 1000 + self._number)

    def _flood(self, life: Life, fault: Planned) -> None:
        world = self._world
        addresses = [world.way_in, life.address]
        self._note("flood", life, fault.seconds, addresses=addresses)
        config = {
            "addresses": addresses, "seconds": fault.seconds, "seed": self._seed + self._number,
            "way_in": world.way_in, "run_id": who.RUN,
        }  # fmt: skip
        with (world.folder / "stranger.err").open("ab") as errors:
            process = world.lab.spawn(
                who.STRANGER, [sys.executable, "-m", "bench.world.stranger", json.dumps(config)],
                env=world.environment(who.STRANGER), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

        def report() -> None:
            done, _ = process.communicate()
            if done:
                world.note("flooded", **json.loads(done.splitlines()[-1]))

        threading.Thread(target=report, daemon=True).start()
