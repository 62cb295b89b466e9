"""State for joiners: one snapshot as a byte string in chunks, described by a manifest of hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from p2pavg.errors import StateError
from p2pavg.identity import verify
from p2pavg.rounds.training import Snapshot, State

U8 = npt.NDArray[np.uint8]
CHUNK_BYTES = 1 << 20  # at most
LEAST_CHUNK_BYTES = 1 << 14
CHUNKS = 512  # of a state that is not tiny or large
MAX_STATE_BYTES = 1 << 38
MAX_META_BYTES = 1 << 24
BYTES_PER_CONTAINER = 8  # of metadata, on average: an empty list takes one byte there, and sixty in memory
HASH_BYTES = 16
COURTESY_BYTES = 4 << 20  # that are worked on between two times that others may go first


def chunk_bytes(total: int) -> int:
    """Of what has `total` bytes: a power of two, so small that a result waits little behind a chunk of state,
    and all streams end together: over a long trip each of them carries some tens of KB per round trip.
    """
    return min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, 1 << (max(1, total // CHUNKS) - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a donor promises: epoch, lineage, size, and a 16-byte hash of every chunk."""

    epoch: int
    lineage: bytes
    meta_bytes: int  # the first bytes: msgpack of metadata and buffer sizes
    total_bytes: int
    hashes: bytes
    signature: bytes = b""  # of the donor, over `root`

    @property
    def root(self) -> bytes:
        """32 bytes that stand for the whole state: SHA-256 over everything that the manifest says."""
        digest = hashlib.sha256(b"p2pavg manifest" + len(self.lineage).to_bytes(4, "big") + self.lineage)
        for number in (self.epoch, self.meta_bytes, self.total_bytes):
            digest.update(number.to_bytes(8, "big"))
        digest.update(self.hashes)
        return digest.digest()

    def signed(self, sign: Callable[[bytes], bytes]) -> Manifest:
        """With a donor's signature."""
        return replace(self, signature=sign(self.root))

    def check(self, public_key: bytes) -> None:
        """Raises StateError when the signature is not of `public_key`."""
        if not verify(public_key, self.root, self.signature):
            raise StateError("a donor's signature on its state is wrong; another donor will be asked")

    def to_message(self) -> dict[str, Any]:
        """Plain data for a control message."""
        return {
            "epoch": self.epoch,
            "lineage": self.lineage,
            "meta": self.meta_bytes,
            "total": self.total_bytes,
            "hashes": self.hashes,
            "signature": self.signature,
        }

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.total_bytes // self.chunk_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return chunk_bytes(self.total_bytes)

    def span(self, chunk: int) -> slice:
        """Where a chunk lies."""
        return slice(chunk * self.chunk_bytes, (chunk + 1) * self.chunk_bytes)

    def hash_of(self, chunk: int) -> bytes:
        """What its hash has to be."""
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]

    @classmethod
    def from_message(cls, data: Mapping[str, Any]) -> Manifest:
        """Raises StateError when the fields cannot be a manifest. Sizes are checked before anything is
        allocated.
        """
        try:
            manifest = cls(
                *(data[name] for name in ("epoch", "lineage", "meta", "total", "hashes", "signature"))
            )
            sizes = (manifest.epoch, manifest.meta_bytes, manifest.total_bytes)
            sound = (
                all(type(x) is int and x >= 0 for x in sizes)
                and isinstance(manifest.lineage, bytes)
                and isinstance(manifest.hashes, bytes)
                and isinstance(manifest.signature, bytes)
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
    """SHA-256 of one chunk, its first 16 bytes. Where the processor has instructions for it, as most have,
    nothing in hashlib is faster.
    """
    return hashlib.sha256(data).digest()[:HASH_BYTES]


def give_way() -> None:
    """Whoever waits for this core goes first: training is not to wait for the end of a time slice."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


class Courtesy:
    """Gives way every few milliseconds of work, and no more often: on a busy machine whoever gives way waits
    for the time slices of all the others.
    """

    def __init__(self) -> None:
        self._left = COURTESY_BYTES

    def worked(self, nbytes: int) -> None:
        """So many bytes were hashed or packed."""
        self._left -= nbytes
        if self._left <= 0:
            self._left = COURTESY_BYTES
            give_way()


class Packing:
    """A snapshot on its way into one byte string."""

    def __init__(self, snapshot: Snapshot) -> None:
        inner, self._sections = snapshot
        sizes = [(name, section.nbytes) for name, section in self._sections.items()]
        self._meta = msgpack.packb({"meta": inner, "buffers": sizes})
        self.meta_bytes = len(self._meta)
        if self.meta_bytes > MAX_META_BYTES:
            raise StateError(
                f"the state's metadata take {self.meta_bytes >> 20} MiB, and newcomers read at most"
                f" {MAX_META_BYTES >> 20}; keep large values of a state_dict in tensors"
            )
        self.total_bytes = self.meta_bytes + sum(size for _, size in sizes)

    def copy_to(self, blob: U8) -> Iterator[None]:
        """blob: uint8[total_bytes] <- the metadata, and every section; piece by piece."""
        at = self.meta_bytes
        blob[:at] = np.frombuffer(self._meta, np.uint8)
        for section in self._sections.values():
            yield from section.copy_to(blob[at : at + section.nbytes])
            at += section.nbytes


def describe(
    epoch: int,
    lineage: bytes,
    meta_bytes: int,
    blob: U8,
    worked: Callable[[int], None] = lambda nbytes: None,
) -> Manifest:
    """The unsigned manifest of a packed state: hashes all of it. worked: told of bytes that are hashed."""
    view, total = memoryview(blob), blob.nbytes
    hashes, size, courtesy = bytearray(), chunk_bytes(total), Courtesy()
    for at in range(0, total, size):
        hashes += chunk_hash(view[at : at + size])
        courtesy.worked(size)
        worked(size)
    return Manifest(epoch, lineage, meta_bytes, total, bytes(hashes))


def _decoded(data: memoryview) -> Any:
    """What msgpack made of this. Raises ValueError when that would take many times the memory of `data`."""
    left = len(data) // BYTES_PER_CONTAINER + 64

    def counted(container: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("too many lists and maps")
        return container

    return msgpack.unpackb(data, strict_map_key=False, object_hook=counted, list_hook=counted)


def unpack(manifest: Manifest, blob: U8) -> State:
    """The state whose chunks were verified against the manifest.

    Decoding takes a fraction of a second for the largest metadata: not for an event loop. Raises StateError
    when the inside of the state is malformed.
    """
    wrong = StateError("a downloaded state is malformed; another donor will be asked")
    try:
        head = _decoded(memoryview(blob)[: manifest.meta_bytes])
        sizes = [(name, size) for name, size in head["buffers"]]
        meta = head["meta"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException):
        raise wrong from None
    if (
        any(type(name) is not str or type(size) is not int or size < 0 for name, size in sizes)
        or sum(s for _, s in sizes) != manifest.total_bytes - manifest.meta_bytes
    ):
        raise wrong
    buffers: dict[str, U8] = {}
    at = manifest.meta_bytes
    for name, size in sizes:
        buffers[name] = blob[at : at + size]
        at += size
    return State(manifest.epoch, manifest.lineage, meta, buffers)
