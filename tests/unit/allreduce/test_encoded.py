"""Encoded results decode to the same floats everywhere, and state snapshots survive the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult, Layout, shares_of
from p2pavg.errors import StateError
from p2pavg.plan.part import Part
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.training import Section
from tests.unit.rounds.state.packed import packed


@pytest.mark.parametrize("twin", [False, True], ids=["compiled", "numpy"])
def test_gathered_contributions_are_summed_in_rank_order(twin: bool) -> None:
    """The average of an all-gather is the sum of all contributions times their shares, each product and each
    sum rounded to float32, in rank order; what has no weight is not looked at.
    """
    numel, chunk, weights = 20_000, 8192, [3.0, 0.0, 1.0, 7.0]
    codec = codecs.get("sparse-64")
    parts = tuple(Part(rank, rank * numel, numel) for rank in range(4))
    layout = Layout(parts, chunk, codec, shares_of(parts, weights))
    assert layout.numel == numel
    data, at, expected = np.zeros(layout.nbytes, np.uint8), 0, np.zeros(numel, np.float32)
    for rank, weight in enumerate(weights):
        values = np.random.default_rng(rank).standard_normal(numel).astype(np.float32)
        for start in range(0, numel, chunk):
            piece = values[start : start + chunk]
            size = codec.encoded_size(len(piece))
            codec.encode(piece, data[at : at + size], 1.0)
            codec.decode(data[at : at + size], piece)
            at += size
        expected += np.float32(weight / sum(weights)) * values
    if twin:
        layout = replace(layout, codec=codecs.TwinSparse(codec.name, codec.wire_id))
    out = np.full(numel, np.nan, np.float32)
    EncodedResult(layout, data).decode_into(out)
    assert np.array_equal(out, expected)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    st.sampled_from(["none", "fp16", "bf16", "int8", "int4"]),
    st.integers(100, 3000),
)
@settings(max_examples=60, deadline=None)
def test_encoding_in_chunks_and_back(counts: list[int], name: str, chunk: int) -> None:
    """A vector encoded chunk by chunk decodes, whole, to the codec's precision; sizes add up."""
    codec = codecs.get(name)
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    parts = [Part(r, s, c) for r, (s, c) in enumerate(zip(starts, counts, strict=True))]
    layout = Layout(tuple(parts), chunk, codec)
    values = np.random.default_rng(1).standard_normal(layout.numel).astype(np.float32)
    result = EncodedResult(layout, np.zeros(layout.nbytes, np.uint8))
    at = 0
    for start, count in layout.chunks():
        size = codec.encoded_size(count)
        assert codec.encode(values[start : start + count], result.data[at : at + size], 0.5)
        at += size
    out = np.full(layout.numel, np.nan, np.float32)
    result.decode_into(out)
    tolerance = {"none": 0.0, "fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2, "int4": 3e-1}[name]
    assert np.allclose(out, values * np.float32(0.5), rtol=tolerance, atol=tolerance)


def test_state_goes_through_bytes_unchanged() -> None:
    """What is packed is unpacked: metadata, names, order and bytes."""
    data = np.arange(3_000_001, dtype=np.uint8)
    meta = {"a": [1, 2.5, "x"], "b": None}
    buffers = {"p": data, "empty": data[:0], "q": data[5:9]}
    meta_bytes, blob = packed((meta, {name: Section.of(b) for name, b in buffers.items()}))
    manifest = state.describe(7, b"l" * 32, meta_bytes, blob)
    after = state.unpack(state.Manifest.from_message(manifest.to_message()), blob)
    assert (after.epoch, after.lineage, after.meta) == (7, b"l" * 32, meta)
    assert list(after.buffers) == list(buffers)
    assert all(np.array_equal(after.buffers[name], buffers[name]) for name in buffers)


@pytest.mark.parametrize(
    "change",
    [
        {"total": -1},
        {"total": 1 << 60},
        {"meta": 1 << 29, "total": 1 << 30},
        {"hashes": b""},
        {"epoch": "7"},
        {"lineage": None},
    ],
)
def test_a_wrong_manifest_is_refused(change: dict[str, object]) -> None:
    """Sizes and types are checked before anything is allocated."""
    meta_bytes, blob = packed(({}, {"p": Section.of(np.zeros(10, np.uint8))}))
    manifest = state.describe(7, b"l" * 32, meta_bytes, blob)
    with pytest.raises(StateError):
        state.Manifest.from_message({**manifest.to_message(), **change})


@given(st.binary(max_size=200))
def test_a_wrong_inside_is_refused(head: bytes) -> None:
    """Whatever the metadata says, unpacking gives a state or StateError."""
    blob = np.frombuffer(head + b"\0" * 16, np.uint8).copy()
    manifest = state.Manifest(1, b"l" * 32, len(head), len(blob), b"")
    try:
        state.unpack(manifest, blob)
    except StateError:
        return
