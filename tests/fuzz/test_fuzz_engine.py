"""Hostile streams against every engine: it closes them or drops what they say, and goes on averaging
right.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import zlib

import lz4.block
import numpy as np
import pytest

from p2pavg.transport import frames
from p2pavg.transport.frames import Header, Heartbeat, Kind
from tests.unit.transport.engine_swarm import KINDS, Reduction, Swarm, poll

SEEDS = 25
ATTACKS = 12
JOB, BLOB = 7, 9
NUMEL, CHUNK = 4000, 1000
BLOCKS = [lz4.block.compress(bytes(1000), store_size=False), b"", b"\x10a"]
EXTREMES = (0, 1, 2, 3, 255, 999, 1000, 1001, 4000, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


def valid(rng: random.Random) -> bytes:
    """A frame that a correct peer might send in this situation, or might have sent in another."""
    kind = rng.choice(list(Kind))
    if kind in (Kind.PING, Kind.PONG):
        body, fields = Heartbeat(rng.getrandbits(64), 0.0, 0.0).pack(), {}
    elif kind is Kind.BLOB:
        body, fields = rng.randbytes(1000), {"transfer": BLOB, "chunk": rng.randrange(3)}
        if rng.random() < 0.5:
            body, fields["flags"] = rng.choice(BLOCKS), frames.PACKED
    else:
        body = np.full(CHUNK, 3.0, np.float32).tobytes()
        part = 0 if kind is Kind.CONTRIBUTION else 1
        fields = {
            "transfer": JOB,
            "part": part,
            "chunk": rng.randrange(2),
            "count": CHUNK,
            "sender": 1,
        }
    return frames.pack(Header(kind, len(body), body_crc=zlib.crc32(body), **fields)) + body


def hostile(rng: random.Random) -> bytes:
    """A frame with something wrong in it; most have right checksums, so that they get further."""
    raw = bytearray(valid(rng))
    for _ in range(rng.randrange(1, 4)):
        match rng.randrange(6):
            case 0:
                raw[rng.randrange(4)] = rng.getrandbits(8)
            case 1:
                struct.pack_into("<I", raw, rng.choice([4, 16, 20, 24, 28]), rng.choice(EXTREMES))
            case 2:
                struct.pack_into("<Q", raw, 8, rng.choice([JOB, BLOB, 0, 2**64 - 1, rng.getrandbits(64)]))
            case 3:
                raw[40:] = rng.choice(
                    [b"", rng.randbytes(3999), bytes(4000), b"\xff" * 4000, rng.randbytes(4001)]
                )
                struct.pack_into("<I", raw, 4, len(raw) - 40)
            case 4:
                struct.pack_into("<f", raw, 40, rng.choice([float("nan"), float("inf"), 1e38])) if len(
                    raw
                ) > 44 else 0
            case 5:
                del raw[rng.randrange(len(raw)) :]
                return bytes(raw)
    if rng.random() < 0.9:
        struct.pack_into("<I", raw, 32, zlib.crc32(raw[40:]))
    if rng.random() < 0.9:
        struct.pack_into("<I", raw, 36, zlib.crc32(raw[:36]))
    return bytes(raw)


async def attack(swarm: Swarm, rng: random.Random) -> None:
    """One stream from peer 1 that carries some frames, right and wrong ones, in pieces."""
    data = b"".join(
        rng.choice([valid, hostile, hostile, lambda rng: rng.randbytes(rng.randrange(100))])(rng)
        for _ in range(rng.randrange(1, 6))
    )
    wire = swarm.wire(0, 1)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):  # it closed the stream meanwhile
        while data:
            piece = rng.choice([1, 39, 40, 41, 1000, len(data)])
            await loop.sock_sendall(wire, data[:piece])
            data = data[piece:]
        wire.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(10):
        with contextlib.suppress(OSError):
            while await loop.sock_recv(wire, 65536):
                pass
    wire.close()


@pytest.mark.parametrize("kinds", [kind for kind in KINDS if len(kind) == 1], ids="+".join)
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_hostile_streams(kinds, seed):
    """After a dozen hostile streams the engine is well, no hostile value is in a result, and a job
    succeeds.
    """
    rng = random.Random(seed)
    swarm = Swarm(kinds, 3, streams=0)
    engine = swarm.engines[0]
    try:
        target = Reduction([np.full(NUMEL, 1.0, np.float32), None, None], [1.0, 1.0, 0.0], [2000, 2000, 0])
        target.open(swarm, [0])
        target.start(swarm, [0])
        engine.open_blob(BLOB, memoryview(bytearray(2500)), 1000)
        for _ in range(ATTACKS):
            await attack(swarm, rng)
        await poll(lambda: not engine.streams(swarm.link(0, 1)))
        assert all(rank == 1 for _, rank, _ in swarm.events[0].refused)
        if not np.isfinite(target.decoded(0)[:2000]).all():
            await swarm.events[0].until(lambda: swarm.events[0].refused)  # then the job can no longer end
            assert swarm.events[0].done == {}
        engine.cancel(JOB)
        engine.cancel(BLOB)
        swarm.events[0].refused.clear()
        again = Reduction(
            [np.full(6000, float(rank), np.float32) for rank in range(3)], [1.0] * 3, [2000] * 3, transfer=8
        )
        for pair in ((0, 1), (0, 2), (1, 2)):
            swarm.connect(*pair)
        again.open(swarm)
        again.start(swarm)
        await again.finished(swarm)
        again.check(swarm)
    finally:
        swarm.close()
