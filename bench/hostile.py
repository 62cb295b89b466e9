"""How much hostile connections slow a swarm: `python -m bench.hostile [--connections 1000] [--json PATH]`.

Peers of a closed run train; after some quiet epochs, that many connections are kept open to one of them, and
each is replaced when it is cut: a third sends garbage, a third nothing, a third one byte a second of a right
beginning. With --requests, strangers ask that peer instead: so many times a second for a tunnel, as it
relays, and as often something of the table over TCP, which it looks up and signs.
Prints the median seconds of an epoch without and with them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import resource
import selectors
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from p2pavg.bench.machine import environment
from p2pavg.bench.toy import Epoch, ToyTrainer
from p2pavg.bench.workers import Workers, serve, start_peer
from p2pavg.credentials import new_secret
from p2pavg.membership.table.address import pack_address
from p2pavg.membership.table.carrying import streams
from p2pavg.membership.table.wire import NO_TOKEN, TRANSACTION_BYTES, Flag, RequestKind, encode
from p2pavg.transport.links import handshake
from p2pavg.transport.ways.relay import TOKEN_BYTES

RUN = "hostile"
NUMEL = 100_000
DEADLINE_S = 300.0


class Trainer:
    """The worker's commands."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Join the swarm."""
        self.epochs: list[Epoch] = []
        self.peer = start_peer(RUN, config, credentials=config["credentials"])
        self.trainer = ToyTrainer.of(self.peer, config, numel=NUMEL, on_epoch=self.epochs.append)
        return {"address": self.peer.address}

    def train(self, command: dict[str, Any]) -> dict[str, Any]:
        """Train until an epoch; when each of its epochs was stepped, and how much memory this process has."""
        seen = len(self.epochs)
        while self.trainer.session.epoch < command["until"]:
            self.trainer.step()
        times = [epoch.counted_at[-1] for epoch in self.epochs[seen:] if epoch.counted_at]
        wrong = [epoch.wrong for epoch in self.epochs[seen:] if epoch.wrong]
        return {
            "seconds": [b - a for a, b in itertools.pairwise(times)],
            "wrong": wrong,
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


class Hostile(threading.Thread):
    """Keeps `count` connections to an address, of three kinds, in its own thread."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        super().__init__(daemon=True)
        self.address, self.count = address, count
        self.opened = self.cut = self.most = 0
        self.stopping = False
        self._random = random.Random(1)
        self._selector = selectors.DefaultSelector()
        self._slow: dict[socket.socket, bytes] = {}

    def run(self) -> None:
        """Open, feed and replace connections until told to stop."""
        fed_at = time.monotonic()
        while not self.stopping:
            missing = self.count - len(self._selector.get_map())
            for _ in range(min(missing, 50)):
                self._open()
            self.most = max(self.most, len(self._selector.get_map()))
            for key, _ in self._selector.select(0.05):
                self._look(key.fileobj)  # type: ignore[arg-type]
            if time.monotonic() - fed_at > 1.0:
                fed_at = time.monotonic()
                for sock in list(self._slow):
                    self._feed(sock)
        for key in list(self._selector.get_map().values()):
            self._drop(key.fileobj)  # type: ignore[arg-type]

    def _open(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self.address)
        self.opened += 1
        self._selector.register(sock, selectors.EVENT_READ)
        kind = self.opened % 3
        if kind == 0:
            self._slow[sock] = self._random.randbytes(600)
        elif kind == 1:
            party = handshake.Party.of(RUN, closed=True)
            self._slow[sock] = handshake.preamble(handshake.CONTROL, party) + bytes([22, 3, 1]) * 100

    def _feed(self, sock: socket.socket) -> None:
        data = self._slow[sock]
        step = len(data) if data[:6] != b"P2PAVG" and len(data) == 600 else 1
        try:
            sock.send(data[:step])
        except OSError:
            self._drop(sock)
            return
        self._slow[sock] = data[step:]
        if not self._slow[sock]:
            del self._slow[sock]

    def _look(self, sock: socket.socket) -> None:
        try:
            if sock.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        self.cut += 1
        self._selector.unregister(sock)
        self._slow.pop(sock, None)
        sock.close()


class Askers(threading.Thread):
    """Asks for an end of a tunnel with made-up tokens, over a new connection each, so many times a second."""

    def __init__(self, address: tuple[str, int], per_second: int) -> None:
        super().__init__(daemon=True)
        self.address, self.per_second = address, per_second
        self.stopping = False
        self.opened = self.cut = self.most = 0
        preamble = handshake.preamble(handshake.TUNNEL, handshake.Party.of(RUN, closed=True))
        self._asked = preamble + handshake.pack({"token": os.urandom(TOKEN_BYTES)})

    def run(self) -> None:
        """Until told to stop; what is left open is cut off after a second."""
        began = time.monotonic()
        open_: collections.deque[tuple[float, socket.socket]] = collections.deque()
        asked: collections.deque[tuple[float, socket.socket]] = collections.deque()
        while not self.stopping:
            now = time.monotonic()
            while self.opened < (now - began) * self.per_second:
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(self.address)
                open_.append((now, sock))
                asked.append((now, sock))
                self.opened += 1
            while asked and now - asked[0][0] > 0.02:
                with contextlib.suppress(OSError):
                    asked.popleft()[1].send(self._asked)
            while open_ and now - open_[0][0] > 1.0:
                open_.popleft()[1].close()
                self.cut += 1
            self.most = max(self.most, len(open_))
            time.sleep(0.01)
        for _, sock in open_:
            sock.close()


class TableAskers(threading.Thread):
    """Asks the table over TCP, over a few connections that are opened anew when they are cut."""

    CONNECTIONS = 8

    def __init__(self, address: tuple[str, int], per_second: int) -> None:
        super().__init__(daemon=True)
        self.address, self.per_second = address, per_second
        self.stopping = False
        self.sent = self.opened = self.answered_bytes = 0
        self._socks: list[socket.socket] = []

    def run(self) -> None:
        """Until told to stop."""
        began = time.monotonic()
        while not self.stopping:
            while len(self._socks) < self.CONNECTIONS:
                self._open()
            due = int((time.monotonic() - began) * self.per_second) - self.sent
            for _ in range(max(0, due)):
                self._ask(self._socks[self.sent % len(self._socks)])
                self.sent += 1
            for sock in list(self._socks):
                self._drain(sock)
            time.sleep(0.01)
        for sock in self._socks:
            sock.close()

    def _open(self) -> None:
        sock = socket.create_connection(self.address)
        sock.setblocking(False)
        sock.send(streams.head(0))
        self._socks.append(sock)
        self.opened += 1

    def _ask(self, sock: socket.socket) -> None:
        """Who is near to some id, with a proof of who answers: the dearest that a stranger may ask for."""
        target, me, transaction = os.urandom(20), os.urandom(20), os.urandom(TRANSACTION_BYTES)
        asked = pack_address(self.address)
        datagram = encode(RequestKind.FIND, Flag.PROVE, transaction, me, NO_TOKEN, [target], asked=asked)
        with contextlib.suppress(OSError):  # it reads more slowly than this writes
            sock.send(streams.pack_frame(datagram))

    def _drain(self, sock: socket.socket) -> None:
        try:
            while data := sock.recv(1 << 16):
                self.answered_bytes += len(data)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._socks.remove(sock)
        sock.close()


class Attack:
    """What befalls one peer, from now until its end."""

    def __init__(self, address: tuple[str, int], args: argparse.Namespace) -> None:
        self._connections: Hostile | Askers
        self._table: TableAskers | None = None
        if args.requests:
            self._connections = Askers(address, args.requests)
            self._table = TableAskers(address, args.requests)
            self._table.start()
        else:
            self._connections = Hostile(address, args.connections)
        self._connections.start()

    def end(self) -> dict[str, Any]:
        """Stop it. What it did."""
        made, table = self._connections, self._table
        made.stopping = True
        made.join()
        told: dict[str, Any] = {"opened": made.opened, "cut": made.cut, "at_once": made.most}
        if table is not None:
            table.stopping = True
            table.join()
            asked = {"sent": table.sent, "connections": table.opened, "answered_bytes": table.answered_bytes}
            told["table"] = asked
        return told


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Epochs before, under and after the attack."""
    argv = [sys.executable, "-m", "bench.hostile", "--worker"]
    with Workers(args.peers, "", argv=argv) as workers:
        answers = workers.join(
            target=args.peers * args.steps, step_seconds=args.step_seconds, credentials=new_secret(RUN)
        )
        host, _, port = answers[0]["address"].rpartition(":")
        phases: dict[str, list[dict[str, Any]]] = {}
        until = 3
        workers.all(deadline_s=DEADLINE_S, do="train", until=until)
        for phase in ("before", "under", "after"):
            attack = Attack((host, int(port)), args) if phase == "under" else None
            until += args.epochs
            phases[phase] = workers.all(deadline_s=DEADLINE_S, do="train", until=until)
            if attack is not None:
                told = attack.end()
    medians = {
        phase: statistics.median(s for answer in answers for s in answer["seconds"])
        for phase, answers in phases.items()
    }
    longest = max(s for answer in phases["under"] for s in answer["seconds"])
    return {
        "connections": 0 if args.requests else args.connections,
        "requests_per_second": args.requests,
        **told,
        "peers": args.peers,
        "epoch_seconds": medians,
        "ratio": medians["under"] / medians["before"],
        "longest_ratio": longest / medians["before"],
        "memory_bytes": {phase: max(a["memory_bytes"] for a in answers) for phase, answers in phases.items()},
        "wrong": [why for answers in phases.values() for answer in answers for why in answer["wrong"]],
        "environment": environment(),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument(
        "--requests", type=int, default=0, metavar="PER_SECOND", help="of the relay and of the table"
    )
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12, help="measured, in each of the three phases")
    parser.add_argument("--steps", type=int, default=10, help="of each peer in an epoch")
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker = Trainer()
        return serve(worker.start, worker.train)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, args.connections + 200)), hard))
    result = measure(args)
    print(json.dumps({key: value for key, value in result.items() if key != "environment"}, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + os.linesep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
