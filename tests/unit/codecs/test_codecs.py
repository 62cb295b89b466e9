"""The built-in codecs against float64, and every implementation against every other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg import codecs
from tests.unit.codecs.codec_cases import (
    F32,
    IMPLEMENTATIONS,
    NAMES,
    briefly,
    decoded,
    encoded,
    implementation,
    reference_decode,
    runs,
    scales,
    tolerance,
)

each_implementation = pytest.mark.parametrize("which", IMPLEMENTATIONS)
each_codec = pytest.mark.parametrize("name", NAMES)


def scaled(x: F32, scale: float) -> F32:
    with np.errstate(all="ignore"):
        return x * np.float32(scale)


@each_codec
@each_implementation
class TestAgainstFloat64:
    @briefly
    @given(x=runs(), scale=scales)
    def test_encoding_error_is_as_documented(self, which: str, name: str, x: F32, scale: float) -> None:
        """What the bytes mean in float64 differs from x·scale by no more than the documentation says."""
        y = scaled(x, scale)
        with implementation(which, name) as codec:
            data, finite = encoded(codec, x, scale)
        assert finite == bool(np.isfinite(y).all())
        if finite and len(x):
            wanted = x.astype(np.float64) * float(np.float32(scale))
            rounding = np.abs(wanted) * 2.0**-24 + 2.0**-150  # of the multiplication by scale
            vanished = abs(scale) * 2.0**-112 if name in ("int8", "int4") else 0.0  # before x was scaled
            error = np.abs(reference_decode(name, data, len(x)) - wanted)
            assert (error <= tolerance(name, wanted) + vanished + rounding * (1 + 2.0**-7)).all()

    @briefly
    @given(x=runs(), weight=scales)
    def test_decoding_equals_float64(self, which: str, name: str, x: F32, weight: float) -> None:
        """Decoding gives the float64 meaning of the bytes to float32 rounding; decode_add adds just that."""
        with implementation(which, name) as codec:
            data, finite = encoded(codec, x)
            plain, weighted = decoded(codec, data, len(x)), decoded(codec, data, len(x), weight)
            start = np.linspace(-3, 3, len(x), dtype=np.float32)
            acc = start.copy()
            told = codec.decode_add(data, acc, weight)
        assert finite
        meaning = reference_decode(name, data, len(x))
        np.testing.assert_allclose(plain, meaning, rtol=2.0**-23, atol=2.0**-149)
        with np.errstate(over="ignore"):
            expected = (meaning * float(np.float32(weight))).astype(np.float32)
        assert told == bool(np.isfinite(weighted).all()) == bool(np.isfinite(expected).all())
        if told:
            np.testing.assert_allclose(weighted, expected, rtol=2.0**-22, atol=2.0**-142)
            assert (acc == start + weighted).all()

    @briefly
    @given(x=runs(finite=False), scale=scales)
    def test_non_finite_values_are_told_and_kept(self, which: str, name: str, x: F32, scale: float) -> None:
        """A run with NaN or infinity is told by encode and by decode_add, and decodes to non-finite there."""
        with implementation(which, name) as codec:
            data, finite = encoded(codec, x, scale)
            y = decoded(codec, data, len(x))
            told = codec.decode_add(data, np.zeros(len(x), np.float32), 1.0)
        bad = ~np.isfinite(scaled(x, scale))
        assert finite == told == (not bad.any())
        assert not np.isfinite(y[bad]).any()
        if name not in ("int8", "int4"):
            assert np.isfinite(y[~bad]).all()
            assert (np.isnan(y) == np.isnan(x)).all()


@pytest.mark.parametrize(("one", "other"), list(itertools.pairwise(IMPLEMENTATIONS)))
@each_codec
class TestTwins:
    @briefly
    @given(x=st.one_of(runs(), runs(finite=False)), scale=scales)
    def test_bytes_and_sums_are_equal_to_the_bit(
        self, one: str, other: str, name: str, x: F32, scale: float
    ) -> None:
        """Two implementations encode the same bytes and decode, scale and add to the same bits."""
        results = []
        for which in (one, other):
            with implementation(which, name) as codec:
                data, finite = encoded(codec, x, scale)
                acc = np.linspace(-1, 1, len(x), dtype=np.float32)
                told = codec.decode_add(data, acc, scale)
                results.append((data, finite, told, decoded(codec, data, len(x), scale), acc))
        (data, *flags, y, acc), (data2, *flags2, y2, acc2) = results
        assert data.tobytes() == data2.tobytes()
        assert flags == flags2
        for a, b in ((y, y2), (acc, acc2)):
            assert (np.isnan(a) == np.isnan(b)).all()
            assert (a.view(np.uint32) == b.view(np.uint32))[~np.isnan(a)].all()

    @briefly
    @given(data=st.binary(min_size=64, max_size=64), n=st.integers(1, 5000), seed=st.integers(0, 1000))
    def test_hostile_bytes_decode_alike(
        self, one: str, other: str, name: str, data: bytes, n: int, seed: int
    ) -> None:
        """Bytes that no encoder makes decode to the same bits everywhere, and are told when not finite."""
        results = []
        for which in (one, other):
            with implementation(which, name) as codec:
                rng = np.random.default_rng(seed)
                body = rng.integers(0, 256, codec.encoded_size(n), dtype=np.uint8)
                body[:64] = np.frombuffer(data, np.uint8)[: len(body)]
                acc = np.zeros(n, np.float32)
                results.append((codec.decode_add(body, acc, 0.7), acc, decoded(codec, body, n, 0.7)))
        (told, acc, y), (told2, acc2, y2) = results
        assert told == told2 == bool(np.isfinite(y).all())
        np.testing.assert_array_equal(acc, acc2)
        np.testing.assert_array_equal(y, y2)


@each_codec
@pytest.mark.parametrize("which", IMPLEMENTATIONS[:-1])  # the Python twin computes in the mode of its thread
def test_flushed_denormals_change_nothing(which: str, name: str) -> None:
    """A training thread that flushes denormals gets the same bytes as one that does not."""
    x = np.full(5000, 2.0**-140, np.float32)
    with implementation(which, name) as codec:
        expected, _ = encoded(codec, x, 0.75)
        values = decoded(codec, expected, len(x))
        torch.set_flush_denormal(True)
        try:
            data, _ = encoded(codec, x, 0.75)
            flushed = decoded(codec, expected, len(x))
        finally:
            torch.set_flush_denormal(False)
    assert data.tobytes() == expected.tobytes()
    assert flushed.tobytes() == values.tobytes()


@each_codec
@each_implementation
def test_a_short_buffer_is_refused(which: str, name: str) -> None:
    """A buffer one byte too short raises before anything is read or written."""
    with implementation(which, name) as codec:
        short = np.zeros(codec.encoded_size(100) - 1, np.uint8)
        x = np.ones(100, np.float32)
        with pytest.raises(ValueError, match="100 elements take"):
            codec.encode(x, short, 1.0)
        with pytest.raises(ValueError, match="100 elements take"):
            codec.decode(short, x)
        with pytest.raises(ValueError, match="100 elements take"):
            codec.decode_add(short, x, 1.0)
    assert not short.any()
    assert (x == 1).all()


@each_codec
@each_implementation
def test_read_only_bytes_can_be_decoded(which: str, name: str) -> None:
    """Received bytes may be bytes, memoryviews or read-only arrays."""
    with implementation(which, name) as codec:
        data, _ = encoded(codec, np.linspace(-1, 1, 300, dtype=np.float32))
        expected = decoded(codec, data, 300)
        frozen = data.copy()
        frozen.setflags(write=False)
        for form in (data.tobytes(), memoryview(data), frozen):
            dst = np.empty(300, np.float32)
            codec.decode(form, dst)
            assert (dst == expected).all()


@each_codec
def test_encoded_size_is_exact(name: str) -> None:
    """Sizes are those of the documented layout."""
    per, header = {
        "none": (4, lambda n: 0),
        "fp16": (2, lambda n: 64 * -(-n // (4096 * 64))),
        "bf16": (2, lambda n: 0),
        "int8": (1, lambda n: 64 * -(-n // (1024 * 16))),
        "int4": (1 / 2, lambda n: 64 * -(-n // (1024 * 16))),
    }[name]
    for n in (0, 1, 1024, 4096 * 64, 4096 * 64 + 1, 10**6):
        assert codecs.get(name).encoded_size(n) == math.ceil(per * n) + header(n)


@each_implementation
def test_fp16_keeps_any_magnitude(which: str) -> None:
    """Blocks of tiny and of huge values keep 11 bits each: nothing overflows or vanishes."""
    for magnitude in (2.0**-110, 1e-12, 1.0, 1e6, 1e38):
        x = np.linspace(0.5, 1, 4096, dtype=np.float32) * np.float32(magnitude)
        with implementation(which, "fp16") as codec:
            data, finite = encoded(codec, x)
            y = decoded(codec, data, len(x))
        assert finite
        assert (np.abs(y - x) <= np.abs(x) * 2.0**-11).all()


@each_codec
@each_implementation
def test_the_largest_floats_stay_finite(which: str, name: str) -> None:
    """A finite value never becomes infinite, even where rounding up would leave float32."""
    top = np.float32(3.4028235e38)
    x = np.array([top, -top, np.nextafter(top, np.float32(0)), top / 2] * 20, np.float32)
    with implementation(which, name) as codec:
        data, finite = encoded(codec, x)
        y = decoded(codec, data, len(x))
    assert finite
    assert np.isfinite(y).all()
    assert (np.abs(y - x) <= np.abs(x) * (1 / 7 if name == "int4" else 2.0**-6)).all()
