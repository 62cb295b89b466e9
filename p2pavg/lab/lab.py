"""A running lab: run programs on its hosts, change its links, read its counters."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from p2pavg.errors import ConfigurationError, P2PAvgError
from p2pavg.lab import gateways, state, topology
from p2pavg.lab.stats import GatewayStats, LabStats, MappedPort
from p2pavg.lab.topology import Topology

ROUTER = Path(__file__).parent / "_router"
_ANSWER_S = 10.0
_count = itertools.count(1)


class RunningLab:
    """A running lab, found by its name. Raises ConfigurationError when no lab of that name is up."""

    def __init__(self, name: str) -> None:
        self.name = name
        found = state.read(name)
        if found is None or not found.alive():
            up = ", ".join(n for n in state.names() if (s := state.read(n)) and s.alive()) or "none"
            raise ConfigurationError(f"No lab {name!r} is up (up now: {up}); start it with 'p2pavg lab up'.")
        self.state = found

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names, in the order of their addresses."""
        return tuple(self.state.hosts)

    def _host(self, host: str) -> state.HostState:
        if host not in self.state.hosts:
            raise ConfigurationError(
                f"Lab {self.name!r} has no host {host!r}; it has {', '.join(self.hosts)}."
            )
        return self.state.hosts[host]

    def address(self, host: str) -> str:
        """The address of a host's own interface when the lab comes up: IPv4 where the host has an IPv4
        address.

        Other hosts reach a host behind a gateway only through the gateway's outside address.
        """
        return self._host(host).address or self._host(host).address6

    def address6(self, host: str) -> str:
        """The IPv6 address of a host; "" for one that has none."""
        return self._host(host).address6

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs argv inside a host."""
        return [str(ROUTER), "enter", str(self.state.pid), str(self._host(host).fd), *argv]

    def environment(self, host: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a process on a host: `base` (default: this process's), the lab and the host.

        What is measured of the lab's paths is not kept where `base` names no file for it: other labs, and
        networks that are real, have the same addresses.
        """
        return {
            "P2PAVG_PATHS": "",
            **(os.environ if base is None else base),
            state.ENVIRONMENT_NAME: self.name,
            "P2PAVG_LAB_HOST": host,
            "P2PAVG_LAB_ADDRESS": self.address(host),
        }

    def spawn(self, host: str, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start argv inside a host; `popen` goes to subprocess.Popen. The result's pid is the program's."""
        env = self.environment(host, popen.pop("env", None))
        return subprocess.Popen(self.command(host, argv), env=env, **popen)

    def run(self, host: str, argv: Sequence[str], *, timeout: float = 60.0) -> str:
        """Run argv inside a host to its end, and return its standard output.

        Raises subprocess.CalledProcessError on failure and subprocess.TimeoutExpired.
        """
        done = subprocess.run(
            self.command(host, argv),
            env=self.environment(host),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
        )
        return done.stdout

    def set(self, src: str, dst: str, *, both: bool = False, **settings: float) -> None:
        """Change the path src -> dst from now on; "*" is every host. both: also change dst -> src.

        settings: delay_ms (one way), jitter_ms, rate_mbps, flow_rate_mbps, loss, corrupt, queue_kb, down
        (true: cut off, and packets in flight are lost). Raises ConfigurationError for an unknown or
        impossible one.
        """
        text = topology.settings_text(settings, topology.PATH_SETTINGS)
        self._path("path", src, dst, both, text)

    def set_node(self, host: str, **settings: float) -> None:
        """Change the limits of a host's traffic: egress_mbps, ingress_mbps, queue_kb; 0 is unlimited.

        behind_nat: true lets in only answers to packets that the host sends from now on. drop_udp: true lets
        no datagram out or in.
        """
        text = topology.settings_text(settings, topology.NODE_SETTINGS)
        self._tell(f"node {self._index(host)} {text}")

    def set_address(self, host: str, address: str) -> None:
        """Give a host another IPv4 address; packets to the old address are lost."""
        gateways.number(address)
        self._tell(f"readdress {self._index(host)} {address}")

    def set_outside(self, gateway: str, address: str) -> None:
        """Give a gateway another outside address, as a provider does; the gateway's mappings end."""
        self._gateway(gateway)
        self._tell(f"gateway {gateway} external={gateways.number(address)}")

    def outside(self, gateway: str) -> str:
        """The outside address of a gateway."""
        return self._gateway(gateway).external

    def mappings(self, gateway: str) -> tuple[MappedPort, ...]:
        """The ports of a gateway that are mapped to hosts now."""
        return self._gateway(gateway).mappings

    def _gateway(self, name: str) -> GatewayStats:
        found = self.stats().gateways
        if name not in found:
            known = ", ".join(found) or "none"
            raise ConfigurationError(f"Lab {self.name!r} has no gateway {name!r}; it has {known}.")
        return found[name]

    def cut_flow(self, src: str, dst: str, *, sport: int = 0, dport: int = 0, both: bool = False) -> None:
        """Drop the packets of the flows src -> dst with these ports (0: any); both: also of dst -> src."""
        for port in (sport, dport):
            if not 0 <= port <= 65535:
                raise ConfigurationError(f"There is no port {port}.")
        self._tell(f"cut {self._index(src)} {self._index(dst)} {sport} {dport}")
        if both:
            self._tell(f"cut {self._index(dst)} {self._index(src)} {dport} {sport}")

    def restore_flows(self, src: str, dst: str, *, both: bool = False) -> None:
        """Undo every cut_flow() of src -> dst."""
        self._path("restore", src, dst, both, "")

    def stats(self) -> LabStats:
        """The router's counters since the lab came up."""
        return LabStats.from_json(self._tell("stats"))

    def down(self) -> None:
        """Take the lab down: its processes are killed, its hosts vanish."""
        with state.exclusive():
            state.reclaim(self.name)

    def _path(self, verb: str, src: str, dst: str, both: bool, text: str) -> None:
        self._tell(f"{verb} {self._index(src)} {self._index(dst)} {text}")
        if both:
            self._tell(f"{verb} {self._index(dst)} {self._index(src)} {text}")

    def _index(self, host: str) -> str:
        if host == "*":
            return host
        self._host(host)
        return str(self.hosts.index(host))

    def _tell(self, line: str) -> str:
        try:
            with socket.socket(socket.AF_UNIX) as control:
                control.settimeout(_ANSWER_S)
                control.connect(str(state.directory(self.name) / "control"))
                control.sendall(line.encode() + b"\n")
                with control.makefile("r") as answers:
                    answer = answers.readline()
        except OSError:
            answer = ""
        if not answer:
            raise P2PAvgError(f"The router of lab {self.name!r} is gone; run 'p2pavg lab down {self.name}'.")
        if answer.startswith("error: "):
            raise ConfigurationError(answer.removeprefix("error: ").strip())
        return answer


def start(shape: Topology, name: str, *, detached: bool) -> subprocess.Popen[bytes]:
    """Start the router of a lab and wait until it is up.

    detached: the router runs until 'down'; otherwise it ends with this process, however the process ends.
    Raises ConfigurationError when the name is taken, P2PAvgError when the machine does not allow a lab.
    """
    if not ROUTER.exists():
        raise P2PAvgError(
            "The lab's router is not built; run 'make native' in a checkout, or reinstall p2pavg on Linux."
        )
    with state.exclusive():
        found = state.read(name)
        if found is not None and found.alive():
            raise ConfigurationError(f"A lab {name!r} is up already; run 'p2pavg lab down {name}' first.")
        state.reclaim(name)
        path = state.directory(name)
        path.mkdir(mode=0o700)
        (path / "config").write_text(shape.configuration())
        with (path / "router.log").open("wb") as log:
            process = subprocess.Popen(
                [str(ROUTER), "run", str(path), *([] if detached else ["--lifeline"])],
                stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.wait()
            reason = (path / "router.log").read_text(
                errors="replace"
            ).strip() or f"exit code {process.returncode}"
            state.reclaim(name)
            raise P2PAvgError(f"The lab cannot start: {reason}.")
        process.stdout.close()
    return process


class Lab(RunningLab):
    """A lab for the length of a `with` block; the lab also goes down when this process dies.

    shape: a topology in the package by name, the path of a .toml file, or a Topology. Several may be up at a
    time.
    """

    def __init__(self, shape: str | Topology, name: str | None = None) -> None:
        self.topology = topology.load(shape) if isinstance(shape, str) else shape
        self._wanted_name = name or f"{self.topology.name}-{os.getpid()}-{next(_count)}"
        self._router: subprocess.Popen[bytes] | None = None
        self._spawned: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Lab:
        self._router = start(self.topology, self._wanted_name, detached=False)
        super().__init__(self._wanted_name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down()

    def spawn(self, host: str, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        process = super().spawn(host, argv, **popen)
        self._spawned.append(process)
        return process

    def down(self) -> None:
        if self._router is None:
            return
        for process in self._spawned:
            process.kill()  # a process that has not entered its host yet is not found by `down`
        super().down()
        if self._router.stdin is not None:
            self._router.stdin.close()
        self._router.wait()
        for process in self._spawned:
            process.wait()
        self._router = None

    def void_reason(self, since: LabStats | None = None) -> str | None:
        """Why measurements after `since` (default: all) prove nothing; None: the router was on time."""
        now = self.stats()
        return (now.since(since) if since else now).void_reason(self.topology.smallest_rtt_ms())
