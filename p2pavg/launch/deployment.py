"""A swarm on machines that ssh reaches: started, looked at, enlarged and stopped from here."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from p2pavg.credentials import Authority
from p2pavg.errors import ConfigurationError, P2PAvgError
from p2pavg.launch import wheel
from p2pavg.launch.code import packed
from p2pavg.launch.emit import inside
from p2pavg.launch.fleet import Fleet
from p2pavg.launch.record import Record
from p2pavg.launch.remote import INSTALL_S, LIVED, Job
from p2pavg.launch.ssh import MachineError
from p2pavg.launch.swarm_file import MachineEntry
from p2pavg.launch.wheel import Wheels
from p2pavg.membership.table.address import format_host_port
from p2pavg.printable import counted, ending, printable

TABLE_S = 120.0  # for the peers that were started to be in the table
LOOK_S = 1.0
CRASHES = 2  # after which a peer is not waited for
LINES = 100  # of a log
WEB = "127.0.0.1:8033"  # where `watch` serves its page


class Deployment:
    """The machines of one swarm file."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._swarm = fleet.swarm
        self._say = fleet.say
        self._saving = threading.Lock()

    # ------------------------------------------------------------------------------------ starting

    def launch(self, script: Path, arguments: Sequence[str]) -> int:
        """Start one peer per machine, and wait until each is in the table. Returns 0 when all are."""
        with Record.locked(self._swarm.run), self._told_when_interrupted():
            return self._launch(script, arguments)

    def _launch(self, script: Path, arguments: Sequence[str]) -> int:
        swarm = self._swarm
        states = self._fleet.states()
        running = [name for name, state in states.items() if state["alive"]]
        if running:
            raise ConfigurationError(
                f"run {swarm.run!r} has a peer on {', '.join(running)} already: 'p2pavg launch add' starts "
                "more, 'p2pavg launch stop' lets all leave"
            )
        machines = [machine for machine in swarm.machines if machine.name in states]
        if not machines:
            raise P2PAvgError("no machine of the file can be reached; nothing was started")
        authority = Authority.new(swarm.run) if swarm.closed else None
        secrets: tuple[str | None, str | None] = (None, None)
        if authority is not None:
            secrets = authority.to_text(), authority.member().to_text()
        script = script.resolve()
        inside(swarm, script)
        record = Record(swarm.run, str(script), list(arguments), "", *secrets)
        with tempfile.TemporaryDirectory(prefix="p2pavg-launch-") as folder:
            machines = self._prepare(machines, script, self._wheels(Path(folder)))
        record.save()  # before anything runs that needs it to be stopped
        self._end_bootstraps(machines)
        record.bootstrap = swarm.bootstrap or self._bootstrap(machines, authority, record.watcher)
        record.save()
        return self._start(machines, len(swarm.machines), record, len(machines))

    def add(self, names: Sequence[str]) -> int:
        """Start the peers of machines that the file names now, in the run that lives."""
        with Record.locked(self._swarm.run), self._told_when_interrupted():
            return self._add(Record.load(self._swarm.run), names)

    def _add(self, record: Record, names: Sequence[str]) -> int:
        machines = [self._swarm.machine(name) for name in names]
        if not machines:
            states = self._fleet.states()
            machines = [m for m in self._swarm.machines if m.name in states and not states[m.name]["alive"]]
        if not machines:
            raise ConfigurationError("a peer runs on every machine of the file; put another machine into it")
        with tempfile.TemporaryDirectory(prefix="p2pavg-launch-") as folder:
            wanted = len(machines)
            machines = self._prepare(machines, Path(record.script), self._wheels(Path(folder)))
        self._revive_bootstrap(record)
        return self._start(machines, wanted, record, 1)

    @contextmanager
    def _told_when_interrupted(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self._say(
                "interrupted: peers may have been started; "
                f"'p2pavg launch stop --swarm {self._swarm.path}' lets them leave"
            )
            raise

    def _wheels(self, folder: Path) -> Wheels | None:
        if not self._swarm.install:
            return None
        if self._swarm.wheel is not None:
            return wheel.given(self._swarm.wheel)
        self._say("making the wheel")
        return wheel.made(folder)

    def _prepare(
        self, machines: Sequence[MachineEntry], script: Path, wheels: Wheels | None
    ) -> list[MachineEntry]:
        """Install everything on all machines at once; those on which that came about."""
        code = packed(self._swarm.directory, script)
        ready = self._fleet.each(machines, lambda machine: self._prepare_one(machine, code, wheels))
        return [machine for machine in machines if machine.name in ready]

    def _prepare_one(self, machine: MachineEntry, code: bytes, wheels: Wheels | None) -> bool:
        swarm, remote = self._swarm, self._fleet.remotes[machine.name]
        if (state := remote.state()).get("alive"):
            raise MachineError(
                f"{machine.name}: its peer runs already; 'p2pavg launch stop' lets that peer leave"
            )
        if state.get("state") in LIVED:
            remote.stop()  # a peer whose keeper was killed may live on
        remote.install(machine.python, wheels, swarm)
        remote.copy(code)
        remote.set_up(swarm.setup, INSTALL_S)
        return True

    def _bootstrap(
        self, machines: Sequence[MachineEntry], authority: Authority | None, watcher: str | None
    ) -> str:
        """Start a bootstrap node on the first machine that takes one; its address."""
        failed = "none can be reached"
        for machine in machines:
            try:
                return self._start_bootstrap(machine, authority, watcher)
            except MachineError as error:
                failed = str(error)
                self._say(failed)
        raise P2PAvgError(f"no machine runs the bootstrap node ({failed})")

    def _start_bootstrap(
        self, machine: MachineEntry, authority: Authority | None, watcher: str | None
    ) -> str:
        swarm, remote = self._swarm, self._fleet.remote(machine, "bootstrap")
        address = format_host_port(machine.address or remote.ssh.host(), swarm.bootstrap_port)
        every = "[::]" if address.startswith("[") else "0.0.0.0"
        remote.share(self._fleet.remotes[machine.name])
        command = ["-m", "p2pavg", "bootstrap", "--run", swarm.run]
        command += ["--listen", f"{every}:{swarm.bootstrap_port}", "--announce", address]
        credentials = None if authority is None else authority.member().to_text()
        remote.start(Job(command, machine.environment, credentials, watcher))
        self._say(f"{machine.name}: bootstrap node at {address}")
        return address

    def _revive_bootstrap(self, record: Record) -> None:
        """Start the run's bootstrap node again, where it has ended: newcomers begin there."""
        if self._swarm.bootstrap is not None:
            return
        authority = record.owner()
        for machine in self._swarm.machines:
            try:
                state = self._fleet.remote(machine, "bootstrap").state()
                if "state" in state and not state["alive"]:
                    record.bootstrap = self._start_bootstrap(machine, authority, record.watcher)
                    record.save()
                if "state" in state:
                    return
            except MachineError as error:
                self._say(str(error))

    def _start(self, machines: Sequence[MachineEntry], wanted: int, record: Record, together: int) -> int:
        authority = record.owner()
        before = len(self._table(record)) if authority is None else 0
        started = self._fleet.each(
            machines, lambda machine: self._start_one(machine, record, authority, together)
        )
        running = [machine for machine in machines if machine.name in started]
        there = self._await_table(running, record, before)
        for machine in running:
            self._say(f"{machine.name}: {there.get(machine.name) or self._why_missing(machine)}")
        missing = [machine.name for machine in machines if not there.get(machine.name)]
        told = f"{counted(len(machines) - len(missing), 'peer')} of {wanted} in the table"
        self._say(
            f"{told}; the swarm lives without this command. "
            f"'p2pavg launch watch --swarm {self._swarm.path}' shows it at http://{WEB}/"
        )
        return int(len(machines) - len(missing) < wanted)

    def _start_one(
        self, machine: MachineEntry, record: Record, authority: Authority | None, together: int
    ) -> bool:
        remote, script = self._fleet.remotes[machine.name], Path(record.script)
        member = None if authority is None else authority.member()
        environment = self._swarm.environment(machine, record.bootstrap, self._fleet.checkpoints)
        environment = {"P2PAVG_PEERS": str(together), **environment}
        command = [inside(self._swarm, script), *record.arguments, *machine.arguments]
        line = None if member is None else member.to_text()
        remote.start(Job(command, environment, line, record.watcher))
        if member is not None:
            with self._saving:
                record.peers[machine.name] = member.identity.peer_id.hex()
                record.save()
        self._say(f"{machine.name}: started")
        return True

    # ------------------------------------------------------------------------------------ looking

    def _await_table(self, machines: Sequence[MachineEntry], record: Record, before: int) -> dict[str, str]:
        """Per machine whose peer is in the table: a line about it. Peers that end are not waited for. before:
        peers that were there already, in an open run, where nobody knows whose peer is whose.
        """
        names = [machine.name for machine in machines]
        deadline = time.monotonic() + TABLE_S
        found: dict[str, str] = {}
        while time.monotonic() < deadline:
            found = self._in_table(names, record, self._table(record, machines)[before:])
            missing = [machine for machine in machines if machine.name not in found]
            if all(self._fleet.each(missing, self._has_ended).values()):
                break
            time.sleep(LOOK_S)
        return found

    def _has_ended(self, machine: MachineEntry) -> bool:
        """Whether nothing more is to come of a peer; of one that cannot be seen just now, something may."""
        try:
            return _ends(self._fleet.remotes[machine.name].state())
        except MachineError:
            return False

    def _why_missing(self, machine: MachineEntry) -> str:
        """What became of a peer that was started and is not in the table."""
        remote = self._fleet.remotes[machine.name]
        try:
            state = remote.state()
            last = remote.tail(1).strip()
        except MachineError as error:
            return f"started, and not seen since ({error})"
        if state["alive"] and not _ends(state):
            return "started, and not in the table yet; see its log"
        return f"{_state(state)}{last and f'; its last words: {printable(last)}'}"

    def _table(
        self, record: Record, machines: Sequence[MachineEntry] | None = None
    ) -> list[Mapping[str, Any]]:
        """The peers of the run, as a machine that can see them tells. machines: that are asked; default: all
        of the file, one after the other.
        """
        for machine in self._swarm.machines if machines is None else machines:
            for remote in (self._fleet.remote(machine, "bootstrap"), self._fleet.remotes[machine.name]):
                try:
                    told = json.loads(remote.peers(record.run, record.bootstrap))
                    peers: list[Mapping[str, Any]] = [p for p in told["peers"] if p["role"] != "watcher"]
                except (MachineError, ValueError, KeyError):
                    continue
                return peers
        return []

    def _in_table(
        self, names: Sequence[str], record: Record, table: Sequence[Mapping[str, Any]]
    ) -> dict[str, str]:
        if record.authority is None:  # nobody knows whose peer is whose
            return dict.fromkeys(names[: len(table)], "in the table")
        rows = {row["peer_id"]: row for row in table}
        return {
            name: _described(rows[record.peers[name]]) for name in names if record.peers.get(name) in rows
        }

    def watch(self, web: str, jsonl: str | None) -> NoReturn:
        """Become the monitor of the run, with a page, until Ctrl-C."""
        record = Record.load(self._swarm.run)
        command = [sys.executable, "-m", "p2pavg", "monitor", record.run, "--web", web]
        command += [] if jsonl is None else ["--jsonl", jsonl]
        found = [address for row in self._table(record) for address in row["addresses"]]
        command += ["--initial-peers", *filter(None, [record.bootstrap]), *found]
        secret = {} if record.watcher is None else {"P2PAVG_CREDENTIALS": record.watcher}
        os.execve(sys.executable, command, {**os.environ, **secret})

    def status(self) -> int:
        """Print a line per machine. Returns 0 when a peer runs on each."""
        record = Record.load(self._swarm.run)
        table = self._table(record)
        names = [machine.name for machine in self._swarm.machines]
        there = {} if record.authority is None else self._in_table(names, record, table)
        states = self._fleet.states()
        width = max(map(len, names))
        missing = "" if record.authority is None else "not in the table"
        for name in names:
            if name in states:
                self._say(f"{name:{width}}  {_state(states[name]):24}  {there.get(name, missing)}")
        self._say(
            f"run {record.run}: {counted(len(table), 'peer')} in the table; others join at {record.bootstrap}"
        )
        return int(not all(state.get("alive") for state in states.values()) or len(states) < len(names))

    def logs(self, names: Sequence[str], *, follow: bool) -> int:
        """Print the end of logs, or follow one."""
        machines = [self._swarm.machine(name) for name in names] or list(self._swarm.machines)
        if follow:
            if len(machines) != 1:
                raise ConfigurationError("--follow takes one peer: name that peer")
            return self._fleet.remotes[machines[0].name].follow(LINES)
        told = self._fleet.each(machines, lambda machine: self._fleet.remotes[machine.name].tail(LINES))
        for machine in machines:
            for line in told.get(machine.name, "").splitlines():
                self._say(f"[{machine.name}] {line}" if len(machines) > 1 else line)
        return int(len(told) < len(machines))

    # ------------------------------------------------------------------------------------ stopping

    def stop(self, names: Sequence[str]) -> int:
        """Let peers leave, which hand over what they have; when all do, the bootstrap node ends, too."""
        machines = [self._swarm.machine(name) for name in names] or list(self._swarm.machines)
        told = self._fleet.each(machines, lambda machine: self._fleet.remotes[machine.name].stop())
        for machine in machines:
            if machine.name in told:
                self._say(f"{machine.name}: {told[machine.name]}")
        gone = {machine.name for machine in machines} - set(told)  # which was said
        states = self._fleet.states(without=gone)
        if not any(state["alive"] for state in states.values()):
            self._end_bootstraps([machine for machine in self._swarm.machines if machine.name in states])
        return int(bool(gone) or any(states[name]["alive"] for name in told if name in states))

    def _end_bootstraps(self, machines: Sequence[MachineEntry]) -> None:
        """End the run's bootstrap node, on whichever of the machines that is."""

        def end(machine: MachineEntry) -> None:
            remote = self._fleet.remote(machine, "bootstrap")
            state = remote.state()
            if state["alive"] or state.get("state") in LIVED:
                remote.stop()

        self._fleet.each(machines, end)


def _described(row: Mapping[str, Any]) -> str:
    """One row of the table."""
    address = row["addresses"][0] if row["addresses"] else "no address"
    reach = "out only" if row["client_only"] else address
    return f"peer {row['peer_id'][:8]} at {reach}, epoch {row['epoch']}, {row['role']}"


def _state(state: Mapping[str, Any]) -> str:
    """Of a keeper."""
    told = str(state.get("state", "not started"))
    if told in LIVED and not state["alive"]:
        told = "gone: its keeper was killed"
    code, restarts = state.get("exit_code"), state.get("restarts") or 0
    if code:
        told += f" ({ending(code)})"
    return told + (f", restarted {counted(restarts, 'time')}" if restarts else "")


def _ends(state: Mapping[str, Any]) -> bool:
    """Whether a peer has ended, or does so each time that it is started."""
    return not state["alive"] or (state.get("restarts") or 0) >= CRASHES
