"""Forked children (DataLoader workers) must not keep a peer's sockets open: they are closed there, at once.

In the child the event loop and its epoll set are still shared with the parent, so nothing but the descriptors
themselves is touched.
"""

from __future__ import annotations

import os
import socket
import weakref

_sockets: dict[int, weakref.ref[socket.socket]] = {}


def guard(sock: socket.socket) -> socket.socket:
    """Close this socket in forked children."""
    key = id(sock)
    _sockets[key] = weakref.ref(sock, lambda _: _sockets.pop(key, None))
    return sock


def _in_child() -> None:
    for reference in list(_sockets.values()):
        sock = reference()
        if sock is not None and sock.fileno() >= 0:
            os.close(sock.detach())
    _sockets.clear()


os.register_at_fork(after_in_child=_in_child)
