"""The machines of a swarm file that ssh reaches, and work on all of them at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from p2pavg.errors import ConfigurationError
from p2pavg.launch.remote import Remote
from p2pavg.launch.ssh import MachineError, Ssh
from p2pavg.launch.swarm_file import MachineEntry, SwarmFile

Result = TypeVar("Result")


class Fleet:
    """One `Remote` a machine, and what all of them say as one stream."""

    def __init__(self, swarm: SwarmFile) -> None:
        """Raises ConfigurationError where a machine has no `ssh`, or checkpoints no folder."""
        self.swarm = swarm
        self._printing = threading.Lock()
        without = [machine.name for machine in swarm.machines if machine.ssh is None]
        if without:
            raise ConfigurationError(f"{swarm.path}: 'ssh' is missing for {', '.join(without)}")
        self.checkpoints = swarm.folder_of_checkpoints()
        self.remotes = {machine.name: self.remote(machine) for machine in swarm.machines}

    def remote(self, machine: MachineEntry, name: str | None = None) -> Remote:
        """A machine's folder of this name; default: that of its peer."""
        ssh = Ssh(machine.name, machine.ssh or "", self.swarm.ssh_config)
        return Remote(ssh, self.swarm.run, name or machine.name)

    def say(self, text: str) -> None:
        """Print, whole lines at a time."""
        with self._printing:
            print(text, flush=True)

    def states(self, without: Collection[str] = ()) -> dict[str, Mapping[str, Any]]:
        """What the keepers wrote last, by machine that can be reached. without: machines left alone."""
        asked = [machine for machine in self.swarm.machines if machine.name not in without]
        return self.each(asked, lambda machine: self.remotes[machine.name].state())

    def each(
        self, machines: Sequence[MachineEntry], work: Callable[[MachineEntry], Result]
    ) -> dict[str, Result]:
        """What came of it, by machine; one that fails is told, and is not there."""
        found: dict[str, Result] = {}

        def one(machine: MachineEntry) -> None:
            try:
                found[machine.name] = work(machine)
            except MachineError as error:
                self.say(str(error))

        with ThreadPoolExecutor(max(1, len(machines)), "p2pavg-launch") as pool:
            list(pool.map(one, machines))
        return {machine.name: found[machine.name] for machine in machines if machine.name in found}
