"""The worker of `long`: k plain TCP connections between two hosts that stay open."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

from p2pavg.bench.workers import own_host, serve

RAW_PORT = 7070


class RawStreams:
    """The worker's commands."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """The first worker listens; the second connects."""
        self.size = config["bytes"] // config["streams"]
        self.acceptor = threading.Thread()
        own, peer = own_host(), config["initial_peers"]
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


if __name__ == "__main__":
    worker = RawStreams()
    sys.exit(serve(worker.start, worker.round))
