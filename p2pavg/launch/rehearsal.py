"""`p2pavg launch --dry-run`: what a launch would do, without doing it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from p2pavg.launch import wheel
from p2pavg.launch.emit import inside
from p2pavg.launch.fleet import Fleet
from p2pavg.launch.ssh import MachineError
from p2pavg.launch.swarm_file import MachineEntry
from p2pavg.printable import size

TORCH_BYTES = 3e9  # that a virtual environment with a build of torch for CUDA takes, and more


class Rehearsal:
    """Looks at each machine, changes nothing there."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._swarm = fleet.swarm
        self._wheels = None
        if self._swarm.install and self._swarm.wheel is not None:
            self._wheels = wheel.given(self._swarm.wheel)

    def run(self, script: Path, arguments: Sequence[str]) -> int:
        """Print a line per machine. Returns 0 when a peer could be started on each."""
        swarm, fleet = self._swarm, self._fleet
        place = inside(swarm, script)
        told = fleet.each(swarm.machines, self._look)
        for machine in swarm.machines:
            if machine.name in told:
                fleet.say(told[machine.name])
                command = " ".join(["python", place, *arguments, *machine.arguments])
                fleet.say(f"{machine.name}: would run '{command}'")
        if told:
            node = swarm.bootstrap or f"on {next(iter(told))}, port {swarm.bootstrap_port}"
            fleet.say(f"bootstrap node: {node}")
        fleet.say("nothing was started or installed")
        return int(len(told) < len(swarm.machines))

    def _look(self, machine: MachineEntry) -> str:
        swarm, remote = self._swarm, self._fleet.remotes[machine.name]
        if remote.state()["alive"]:
            raise MachineError(f"{machine.name}: a peer of the run is there already")
        told, free = remote.look(machine.python)
        if not swarm.install:
            does = f"would use what {machine.python} has"
        else:
            fitting = None if self._wheels is None else remote.fitting(self._wheels, machine.python, told)
            made = "a wheel made here" if fitting is None else fitting.name
            does = f"would install {', '.join([made, *swarm.packages])}"
            does += " (little room for that)" if 0 < free < TORCH_BYTES else ""
        version, system, processor = told.split()
        return f"{machine.name}: Python {version} on {system}, {processor}, {size(free)} free; {does}"
