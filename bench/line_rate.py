"""Averaging against the links' true rates, in the lab: `python bench/line_rate.py --help`.

long      two-300ms, 100M values in fp16: automatic streams, one stream, and 16 raw TCP streams that move the
          same bytes both ways
quarter   two-300ms, 25M values
idle      two-300ms, 100M values, with a minute without traffic before every round
flowcap   two-300ms-flowcap: bytes over the time from the first to the last gradient byte
streams   every topology, or those of --topologies: automatic against fixed numbers of streams
shares    mixed, 10M values: against the shortest time that any part sizes allow (a linear program)
clouds    clouds-4, 8 peers, 25M values: the same, after three rounds that find the streams
stall     two-300ms, 8 streams, 100M values: one stream is black-holed in mid-round
capped    lan-4, max_upload_mbps: what the lab counts
encrypted two-300ms: a closed run beside an open one

--scale 0.1 multiplies all rates of `clouds`, of clouds-4 and six-100ms in `streams` and of `encrypted`, and
the number of values, so that seconds stay comparable: peers and router need more than two cores at the full
rates. Needs root or unprivileged user namespaces, and scipy for `shares` and `clouds`. Every figure is a
median of rounds after a first one; it is void when the lab's router was late (`void_reason`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from contestant import Contestant  # noqa: E402

from p2pavg.bench.allreduce.worker import Averaging  # noqa: E402
from p2pavg.bench.common import environment  # noqa: E402
from p2pavg.bench.workers import Workers, serve  # noqa: E402
from p2pavg.lab.topology import Topology, load, shipped  # noqa: E402

PAYLOAD = 1448 / 1500  # of the IP bytes of a full segment
RAW_PORT = 7070
WARM_UP = {"clouds-4": 3}  # rounds that find the streams and the parts; elsewhere one
SCALED = ("clouds-4", "six-100ms")  # in `streams`: so many links keep the router busy
SIZES = {"home-4": 400_000, "mixed": 4_000_000, "clouds-4": 5_000_000}  # values; elsewhere 10M


# ----------------------------------------------------------------------------------------------- raw streams


class RawStreams:
    """The worker of `long`: k plain TCP connections between two hosts that stay open."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """The first worker listens; the second connects."""
        self.size = config["bytes"] // config["streams"]
        self.acceptor = threading.Thread()
        own, peer = os.environ.get("P2PAVG_LAB_ADDRESS", "127.0.0.1"), config["initial_peers"]
        if peer:
            self.sockets = [socket.create_connection((peer[0], RAW_PORT)) for _ in range(config["streams"])]
            return {"address": own}
        listener = socket.create_server((own, RAW_PORT), backlog=64)

        def accept() -> None:
            self.sockets = [listener.accept()[0] for _ in range(config["streams"])]

        self.acceptor = threading.Thread(target=accept, daemon=True)
        self.acceptor.start()
        return {"address": own}

    def round(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send and receive `bytes` in all."""
        if self.acceptor.ident is not None:
            self.acceptor.join()
        start = time.monotonic()
        threads = [
            threading.Thread(target=work, args=(s,))
            for s in self.sockets
            for work in (self._send, self._take)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"seconds": time.monotonic() - start}

    def _send(self, sock: socket.socket) -> None:
        sock.sendall(bytes(self.size))

    def _take(self, sock: socket.socket) -> None:
        buffer, left = bytearray(1 << 20), self.size
        while left:
            left -= sock.recv_into(buffer, min(left, len(buffer)))


# ------------------------------------------------------------------------------------------------ contestants


def summary(contestant: Contestant) -> dict[str, Any]:
    """Medians."""
    rounds, seconds = contestant.measured, contestant.seconds()
    found: dict[str, Any] = {"seconds": statistics.median(seconds), "all_seconds": contestant.all_seconds()}
    found["first_seconds"], found["warm_up_rounds"] = found["all_seconds"][0], contestant.warm_up
    verdict = contestant.workers.lab_verdict().get("lab", {})
    found["void_reason"] = verdict.get("void_reason")
    if "streams" in rounds[0][0]:
        found["streams"] = max(answer["streams"] for answer in rounds[-1])
        found["bit_identical"] = all(len({a["digest"] for a in answers}) == 1 for answers in rounds)
        found["goodput_gbps"] = statistics.median(
            8e-9
            * statistics.median(a["bytes_sent"] for a in answers)
            / (max(a["last_byte_at"] for a in answers) - min(a["first_byte_at"] for a in answers))
            for answers in rounds
        )
        found["phases"] = {
            name: statistics.median(a[name] for answers in rounds for a in answers)
            for name in ("waiting", "matchmaking", "transfer", "commit", "update")
        }
    return found


def averaging(
    topology: str | Topology | None,
    peers: int,
    numel: int,
    streams: str = "auto",
    encrypted: bool = False,
    **config: Any,
) -> Contestant:
    """p2pavg in fp16. topology: of the lab; None: over loopback."""
    from p2pavg.credentials import new_secret

    workers = Workers(peers, "", topology=topology, argv=[sys.executable, __file__, "--peer"])
    workers.join(
        numel=numel,
        peers=peers,
        compression="fp16",
        streams=streams if streams == "auto" else int(streams),
        beside="none",
        credentials=new_secret("bench-allreduce") if encrypted else None,
        **config,
    )
    return Contestant("p2pavg", workers)


def raw(topology: str, total: int, streams: int) -> Contestant:
    """Plain TCP connections."""
    workers = Workers(2, "", topology=topology, argv=[sys.executable, __file__, "--raw"])
    workers.join(bytes=total, streams=streams)
    return Contestant("raw", workers)


def in_turn(makers: Mapping[str, Callable[[], Contestant]], rounds: int, warm_up: int = 1) -> dict[str, Any]:
    """Each contestant lives alone while it plays: two labs at once would share the machine's cores."""
    found: dict[str, Any] = {}
    for name, make in makers.items():
        contestant = make()
        contestant.warm_up = warm_up
        with contestant.workers:
            for _ in range(warm_up + rounds):
                contestant.play(fill=contestant.name != "raw")
            found[name] = summary(contestant)
        print(f"  {name}: {found[name]['seconds']:.3f} s", flush=True)
    return found


# --------------------------------------------------------------------------------------------------- sections


def long(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """100M values over 300 ms."""
    numel = 100_000_000
    found = in_turn(
        {
            "auto": partial(averaging, "two-300ms", 2, numel),
            "raw 16 streams": partial(raw, "two-300ms", 2 * numel, 16),
            "1 stream": partial(averaging, "two-300ms", 2, numel, "1"),
        },
        rounds,
    )
    auto = found["auto"]["seconds"]
    found["over_one_stream"] = found["1 stream"]["seconds"] / auto
    found["over_raw"] = (auto - 3 * 0.3) / found["raw 16 streams"]["seconds"]
    return found


def quarter(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """25M values over 300 ms."""
    return in_turn({"auto": partial(averaging, "two-300ms", 2, 25_000_000)}, rounds)


def idle(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """A minute of silence before every round. Both contestants live, and play one after the other."""
    contestants = {
        name: averaging("two-300ms", 2, 100_000_000, streams)
        for name, streams in (("auto", "auto"), ("1 stream", "1"))
    }
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        for contestant in contestants.values():
            stack.enter_context(contestant.workers)
            contestant.play()
        for _ in range(min(rounds, 3)):
            time.sleep(60.0)
            for contestant in contestants.values():
                contestant.play()
        for name, contestant in contestants.items():
            found[name] = summary(contestant)
    found["over_one_stream"] = found["1 stream"]["seconds"] / found["auto"]["seconds"]
    return found


def flowcap(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """A cap on each flow; also four times as much, where the latency at both ends of a round weighs less."""
    name = "two-300ms-flowcap"
    sizes = {"auto": 100_000_000, "400M": 400_000_000}
    makers = {size: partial(averaging, name, 2, numel) for size, numel in sizes.items()}
    found = in_turn(makers, min(rounds, 3))
    rate_gbps = load(name).rate_mbps("a", "b") * 1e-3
    found["goodput_over_rate"] = found["auto"]["goodput_gbps"] / rate_gbps
    found["goodput_over_rate_400M"] = found["400M"]["goodput_gbps"] / rate_gbps
    return found


def streams(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Automatic against fixed."""
    found: dict[str, Any] = {}
    for name in options.topologies or shipped():
        print(name, flush=True)
        shape, numel = load(name), SIZES.get(name, 10_000_000)
        if name in SCALED:
            shape, numel = shape.scaled(options.scale), int(options.scale * numel)
        peers = min(4, len(shape.hosts))
        makers = {k: partial(averaging, shape, peers, numel, k) for k in ("auto", "1", "4", "8", "16")}
        rows = in_turn(makers, min(rounds, 5), WARM_UP.get(name, 1))
        best = min(row["seconds"] for k, row in rows.items() if k != "auto")
        found[name] = {
            **rows,
            "auto_over_best": rows["auto"]["seconds"] / best,
            "numel": numel,
            "peers": peers,
        }
    return found


def optimum(shape: Topology, peers: int, numel: int) -> float:
    """Seconds that the transfer takes at least: the best part sizes for the true rates,
    by linear programming.

    Peer i owns p_i values: it sends p_j to every owner j, and p_i to everybody; so does everybody else.
    """
    from scipy.optimize import linprog

    hosts = shape.hosts[:peers]
    n, bits = len(hosts), 16 / PAYLOAD
    rows, limits = [], []

    def bound(coefficients: list[float], mbps: float) -> None:
        if mbps:
            rows.append([bits * c for c in coefficients] + [-mbps * 1e6])
            limits.append(0.0)

    for i, host in enumerate(hosts):
        node = shape.nodes.get(host)
        out = [float(n - 1) if j == i else 1.0 for j in range(n)]
        if node is not None:
            bound(out, node.egress_mbps)
            bound(out, node.ingress_mbps)
        for j, other in enumerate(hosts):
            if i != j:
                bound([1.0 if k in (i, j) else 0.0 for k in range(n)], shape.paths[host, other].rate_mbps)
    solved = linprog(
        [0.0] * n + [1.0],
        A_ub=rows,
        b_ub=limits,
        A_eq=[[1.0] * n + [0.0]],
        b_eq=[float(numel)],
        bounds=[(0, None)] * (n + 1),
    )
    return float(solved.x[-1])


def against_optimum(shape: Topology, peers: int, numel: int, rounds: int) -> dict[str, Any]:
    """Parts by bandwidth, where bandwidths differ."""
    warm_up = WARM_UP.get(shape.name, 1)
    row = in_turn({shape.name: partial(averaging, shape, peers, numel)}, rounds, warm_up)[shape.name]
    row["optimum"] = optimum(shape, peers, numel)
    row["over_optimum"] = row["seconds"] / row["optimum"]
    row["first_over_optimum"] = row["first_seconds"] / row["optimum"]
    row["transfer_over_optimum"] = row["phases"]["transfer"] / row["optimum"]
    return row


def shares(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Three fast hosts and a slow home."""
    return against_optimum(load("mixed"), 4, 10_000_000, rounds)


def clouds(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Every pair has its own rate."""
    shape, scale = load("clouds-4").scaled(options.scale), options.scale
    return {"scale": scale, **against_optimum(shape, 8, int(scale * 25_000_000), rounds)}


class Peer(Averaging):
    """The worker of all other sections."""

    def flows(self, command: dict[str, Any]) -> dict[str, Any]:
        """The data streams of this process: TCP connections that have sent much, as the kernel knows them."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                    ports = sock.getsockname()[1], sock.getpeername()[1]
            except OSError:
                continue
            timeout_us, _, segment = struct.unpack_from("=III", info, 8)
            window, acked = struct.unpack_from("=I", info, 80)[0], struct.unpack_from("=Q", info, 120)[0]
            if acked > 1_000_000:
                found.append([*ports, timeout_us / 1e6, window * segment])
        return {"flows": sorted(found)}


def stall(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """One stream of eight is black-holed when half of an undisturbed transfer has passed."""
    contestant = averaging("two-300ms", 2, 100_000_000, "8")
    workers, rate = contestant.workers, load("two-300ms").rate_mbps("a", "b") * 1e6 * PAYLOAD
    found: dict[str, Any] = {}
    with workers:
        for _ in range(rounds + 1):
            contestant.play()
        found["undisturbed"] = summary(contestant)
        usual, allowed = found["undisturbed"]["seconds"], []
        for _ in range(rounds):
            sport, dport, timeout_s, window = workers.all(deadline_s=30.0, do="flows")[0]["flows"][0]
            workers.all(deadline_s=30.0, do="fill")
            cut = threading.Timer(
                usual / 2, partial(workers.lab.cut_flow, "a", "b", sport=sport, dport=dport, both=True)
            )
            cut.start()
            contestant.play(fill=False)
            cut.join()
            allowed.append(usual + timeout_s + 8 * window / rate)
        contestant.warm_up += rounds
        found["stalled"] = summary(contestant)
    found["allowed"] = statistics.median(allowed)
    found["over_allowed"] = found["stalled"]["seconds"] / found["allowed"]
    return found


def capped(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """What each of two hosts sends with a cap, headers included, while gradients flow."""
    cap = 200.0
    contestant = averaging("lan-4", 2, 25_000_000, max_upload_mbps=cap)
    rates = []
    with contestant.workers as workers:
        contestant.play()
        for _ in range(rounds):
            workers.all(deadline_s=30.0, do="fill")
            before = workers.lab.stats()
            contestant.play(fill=False)
            moved = workers.lab.stats().since(before).paths
            answers = contestant.measured[-1]
            seconds = max(a["last_byte_at"] for a in answers) - min(a["first_byte_at"] for a in answers)
            rates += [8e-6 * moved[pair].sent_bytes / seconds for pair in (("a", "b"), ("b", "a"))]
        found = summary(contestant)
    measured = statistics.median(rates)
    return {**found, "cap_mbps": cap, "mbps": measured, "most_mbps": max(rates), "over_cap": measured / cap}


def encrypted(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Open beside closed."""
    shape, numel = load("two-300ms").scaled(options.scale), int(options.scale * 100_000_000)
    found = in_turn(
        {
            "plain": partial(averaging, shape, 2, numel),
            "encrypted": partial(averaging, shape, 2, numel, encrypted=True),
        },
        rounds,
    )
    found["scale"] = options.scale
    found["rate_over_plain"] = found["plain"]["phases"]["transfer"] / found["encrypted"]["phases"]["transfer"]
    return found


SECTIONS = {
    f.__name__: f for f in (long, quarter, idle, flowcap, streams, shares, clouds, stall, capped, encrypted)
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; none: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of rates and values")
    parser.add_argument("--topologies", nargs="*", help="of `streams`; what the file holds of others stays")
    parser.add_argument("--json", type=Path, help="sections are added to what the file holds")
    args = parser.parse_args()
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    found = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in args.sections or SECTIONS:
        print(name, flush=True)
        section = SECTIONS[name](args.rounds, args)
        found[name] = {**found.get(name, {}), **section} if args.topologies else section
        print(json.dumps({k: v for k, v in found[name].items() if not isinstance(v, dict)}), flush=True)
        found["environment"] = environment()
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--raw"]:
        worker = RawStreams()
        sys.exit(serve({"start": worker.start, "round": worker.round}))
    if sys.argv[1:] == ["--peer"]:
        peer = Peer()
        sys.exit(serve({"start": peer.start, "fill": peer.fill, "round": peer.round, "flows": peer.flows}))
    try:
        sys.exit(main())
    except (subprocess.SubprocessError, OSError) as error:
        sys.exit(f"line_rate: {error}")
