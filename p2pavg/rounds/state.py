"""State for joiners: one snapshot as a byte string in chunks, described by a manifest of hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from p2pavg.errors import StateError
from p2pavg.rounds.training import State

U8 = npt.NDArray[np.uint8]
CHUNK_BYTES = 1 << 20
MAX_STATE_BYTES = 1 << 38
MAX_META_BYTES = 1 << 28
HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a donor promises: epoch, lineage, size, and a 16-byte BLAKE2b hash of every chunk."""

    epoch: int
    lineage: bytes
    meta_bytes: int  # the first bytes: msgpack of metadata and buffer sizes
    total_bytes: int
    hashes: bytes

    def to_message(self) -> dict[str, Any]:
        """Plain data for a control message."""
        return {
            "epoch": self.epoch,
            "lineage": self.lineage,
            "meta": self.meta_bytes,
            "total": self.total_bytes,
            "hashes": self.hashes,
        }

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.total_bytes // CHUNK_BYTES)

    @classmethod
    def from_message(cls, data: Mapping[str, Any]) -> Manifest:
        """Raises StateError when the fields cannot be a manifest. Sizes are checked before anything is
        allocated.
        """
        try:
            manifest = cls(data["epoch"], data["lineage"], data["meta"], data["total"], data["hashes"])
            sizes = (manifest.epoch, manifest.meta_bytes, manifest.total_bytes)
            sound = (
                all(type(x) is int and x >= 0 for x in sizes)
                and isinstance(manifest.lineage, bytes)
                and isinstance(manifest.hashes, bytes)
                and manifest.meta_bytes <= min(manifest.total_bytes, MAX_META_BYTES)
                and manifest.total_bytes <= MAX_STATE_BYTES
                and len(manifest.hashes) == HASH_BYTES * manifest.chunks
            )
        except (KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            raise StateError("a donor described its state wrongly; another donor will be asked")
        return manifest


def chunk_hash(data: memoryview | U8) -> bytes:
    """BLAKE2b-128 of one chunk."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def pack(state: State) -> tuple[Manifest, U8]:
    """One byte string for the whole state, and its manifest. Copies every buffer once."""
    sizes = [(name, int(buffer.nbytes)) for name, buffer in state.buffers.items()]
    meta = msgpack.packb({"meta": state.meta, "buffers": sizes})
    total = len(meta) + sum(size for _, size in sizes)
    blob = np.empty(total, np.uint8)
    blob[: len(meta)] = np.frombuffer(meta, np.uint8)
    at = len(meta)
    for buffer in state.buffers.values():
        blob[at : at + buffer.nbytes] = buffer.reshape(-1).view(np.uint8)
        at += buffer.nbytes
    view = memoryview(blob)
    hashes = b"".join(chunk_hash(view[i : i + CHUNK_BYTES]) for i in range(0, total, CHUNK_BYTES))
    return Manifest(state.epoch, state.lineage, len(meta), total, hashes), blob


def unpack(manifest: Manifest, blob: U8) -> State:
    """The state whose chunks were verified against the manifest. Raises StateError when its inside is
    malformed.
    """
    wrong = StateError("a downloaded state is malformed; another donor will be asked")
    try:
        head = msgpack.unpackb(memoryview(blob)[: manifest.meta_bytes], strict_map_key=False)
        sizes = [(str(name), int(size)) for name, size in head["buffers"]]
        meta = head["meta"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException):
        raise wrong from None
    if (
        any(size < 0 for _, size in sizes)
        or sum(s for _, s in sizes) != manifest.total_bytes - manifest.meta_bytes
    ):
        raise wrong
    buffers: dict[str, U8] = {}
    at = manifest.meta_bytes
    for name, size in sizes:
        buffers[name] = blob[at : at + size]
        at += size
    return State(manifest.epoch, manifest.lineage, meta, buffers)
