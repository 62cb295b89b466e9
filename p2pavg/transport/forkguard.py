"""Forked children (DataLoader workers) must not keep a peer's sockets open: they are closed there, at once.

In the child the event loop and its epoll set are still shared with the parent, so nothing but the descriptors
themselves is touched.
"""

from __future__ import annotations

import os
import socket
import weakref

_sockets: dict[int, weakref.ref[socket.socket]] = {}
_engines: dict[int, weakref.ref[Closes]] = {}


class Closes:
    """Anything whose `close()` knows that it runs in a forked child."""

    def close(self) -> None: ...


def guard(sock: socket.socket) -> socket.socket:
    """Close this socket in forked children."""
    key = id(sock)
    _sockets[key] = weakref.ref(sock, lambda _: _sockets.pop(key, None))
    return sock


def guard_engine(engine: object) -> None:
    """Call its `close()` in forked children."""
    key = id(engine)
    _engines[key] = weakref.ref(engine, lambda _: _engines.pop(key, None))  # type: ignore[arg-type]


def _in_child() -> None:
    for reference in list(_sockets.values()):
        sock = reference()
        if sock is not None and sock.fileno() >= 0:
            os.close(sock.detach())
    _sockets.clear()
    for engine_reference in list(_engines.values()):
        engine = engine_reference()
        if engine is not None:
            engine.close()
    _engines.clear()


os.register_at_fork(after_in_child=_in_child)
