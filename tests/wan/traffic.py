"""Traffic for the lab's tests, run on its hosts: `traffic.py VERB ARGS` prints one line of JSON at its end.

Servers print "ready" first. Nothing here uses p2pavg: it is what the lab is measured with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import socket
import struct
import sys
import threading
import time

HEADER = struct.Struct("!QQ")
IDLE_S = 2.0


def ready() -> None:
    print("ready", flush=True)


def echo(port: int) -> None:
    """Send every datagram back, until killed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", port))
        ready()
        while True:
            data, sender = sock.recvfrom(65536)
            sock.sendto(data, sender)


def ping(host: str, port: int, count: int, timeout_ms: int, sport: int = 0) -> dict:
    """Round trips in ms, one after the other; those without an answer are counted as lost."""
    rtts, lost = [], 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", sport))
        for i in range(count):
            begin = time.perf_counter()
            sock.sendto(HEADER.pack(i, 0), (host, port))
            deadline = begin + timeout_ms / 1e3
            while True:
                sock.settimeout(max(1e-3, deadline - time.perf_counter()))
                try:
                    data = sock.recv(64)
                except TimeoutError:
                    lost += 1
                    break
                if HEADER.unpack(data)[0] == i:
                    rtts.append((time.perf_counter() - begin) * 1e3)
                    break
    return {"rtts": rtts, "lost": lost}


def udp_sink(port: int) -> dict:
    """Count what arrives until it is quiet: numbers out of order, and the rate between first and last."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sock.bind(("", port))
        ready()
        packets = size = reordered = 0
        first = last = 0.0
        highest = -1
        sock.settimeout(30)
        while True:
            try:
                data = sock.recv(65536)
            except TimeoutError:
                break
            sock.settimeout(IDLE_S)
            last = time.perf_counter()
            first = first or last
            number = HEADER.unpack_from(data)[0]
            reordered += number < highest
            highest = max(highest, number)
            packets += 1
            size += len(data) + 28
    return {"packets": packets, "bytes": size, "seconds": last - first, "reordered": reordered}


def udp_send(host: str, port: int, mbps: float, seconds: float, payload: int) -> dict:
    """Send numbered datagrams evenly at a rate counted in IP bytes."""
    interval = (payload + 28) * 8e-6 / mbps
    body = bytes(payload - HEADER.size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        begin = time.perf_counter()
        sent = 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            due = int(elapsed / interval) + 1
            while sent < due:
                sock.sendto(HEADER.pack(sent, 0) + body, (host, port))
                sent += 1
            time.sleep(min(interval, 2e-4))
    return {"packets": sent}


def tcp_sink(port: int, streams: int, skip_s: float, seconds: float) -> dict:
    """Read streams and hash them; the rate is that of `seconds` after `skip_s`. seconds 0: to the end."""
    listener = socket.create_server(("", port), backlog=64)
    ready()
    counts = [0] * streams
    digests = [""] * streams

    def read(i: int, sock: socket.socket) -> None:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(1 << 18))
        while n := sock.recv_into(buffer):
            counts[i] += n
            if not seconds:
                digest.update(buffer[:n])
        digests[i] = digest.hexdigest()

    threads = [
        threading.Thread(target=read, args=(i, listener.accept()[0]), daemon=True) for i in range(streams)
    ]
    for thread in threads:
        thread.start()
    if not seconds:
        for thread in threads:
            thread.join()
        return {"bytes": sum(counts), "digests": sorted(digests)}
    time.sleep(skip_s)
    before, begin = list(counts), time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - begin
    per_stream = [(after - was) * 8e-6 / elapsed for was, after in zip(before, list(counts), strict=True)]
    return {"mbps": sum(per_stream), "per_stream": per_stream}


def tcp_send(host: str, port: int, streams: int, megabytes: float) -> dict:
    """Send random bytes over each stream. megabytes 0: until the other side is gone."""
    digests = []

    def write(seed: int) -> None:
        block = random.Random(seed).randbytes(1 << 18)
        digest = hashlib.sha256()
        left = int(megabytes * 1e6)
        with socket.create_connection((host, port)) as sock:
            with contextlib.suppress(OSError):  # not every machine has it; others overshoot for longer
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
            try:
                while not megabytes or left > 0:
                    piece = block[:left] if megabytes and left < len(block) else block
                    sock.sendall(piece)
                    if megabytes:
                        digest.update(piece)
                        left -= len(piece)
            except ConnectionError:
                return
            digests.append(digest.hexdigest())

    threads = [threading.Thread(target=write, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"digests": sorted(digests)}


def number(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


if __name__ == "__main__":
    verbs = {
        "echo": echo,
        "ping": ping,
        "udp-sink": udp_sink,
        "udp-send": udp_send,
        "tcp-sink": tcp_sink,
        "tcp-send": tcp_send,
    }
    print(json.dumps(verbs[sys.argv[1]](*[number(word) for word in sys.argv[2:]])))
