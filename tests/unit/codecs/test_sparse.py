"""Sparse codecs: what they keep, what they refuse, and that every implementation makes the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg import codecs, native
from p2pavg.codecs import sparse
from p2pavg.errors import ConfigurationError
from p2pavg.native import compiled
from tests.unit.codecs.codec_cases import briefly

LENGTHS = [1, 15, 16, 17, 64, 65, 1000, 4095, 4096, 4097, 12_000]
ISAS = [isa for isa in ("avx2", "neon", "portable") if native.available() and compiled.select_isa(isa)]
if ISAS:
    compiled.select_isa(ISAS[0])

NAMES = list(codecs.SPARSE_IDS)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = compiled.isa()
    compiled.select_isa(request.param)
    yield request.param
    compiled.select_isa(before)


def vector(seed: int, n: int) -> np.ndarray:
    """Values of one of several kinds: even, with ties, mostly zeros, of any magnitude, all the same."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32)
    match seed % 5:
        case 1:
            x = np.round(x)
        case 2:
            x[rng.random(n) < 0.99] = 0
        case 3:
            x = x * np.float32(2) ** rng.integers(-60, 60, n).astype(np.float32)
        case 4:
            x[:] = rng.choice([-1.5, 1.5], n)
    return np.ascontiguousarray(x, np.float32)


def encoded(codec: codecs.Codec, x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    out = np.empty(codec.encoded_size(len(x)), np.uint8)
    assert codec.encode(x, out, scale)
    return out


def decoded(codec: codecs.Codec, data: np.ndarray, n: int) -> np.ndarray:
    out = np.empty(n, np.float32)
    codec.decode(data, out)
    return out


def twins(name: str) -> tuple[codecs.Codec, codecs.Codec]:
    return codecs.TwinSparse(name, codecs.SPARSE_IDS[name]), codecs.get(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", LENGTHS)
def test_twins_agree(isa: str, name: str, n: int) -> None:
    """Every instruction set and NumPy encode, decode and add the same bits."""
    twin, native_codec = twins(name)
    assert twin.encoded_size(n) == native_codec.encoded_size(n) == compiled.encoded_size(twin.wire_id, n)
    for seed in range(5):
        x, found = vector(seed, n), []
        for codec in (twin, native_codec):
            data = encoded(codec, x, 0.5)
            acc = np.full(n, 0.25, np.float32)
            assert codec.decode_add(data, acc, 0.7)
            parts = (data, decoded(codec, data, n), acc)
            found.append([part.tobytes() for part in parts])
            assert codecs.is_sound(codec, data, n)
        assert found[0] == found[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", LENGTHS)
def test_the_largest_are_kept(name: str, n: int) -> None:
    """Of each block the largest magnitudes are kept, of equal ones the first, with their signs; the two
    magnitudes are means of theirs.
    """
    codec, kept = codecs.get(name), 1 << (codecs.SPARSE_IDS[name] - sparse.SPARSE)
    x = vector(0, n)
    y = decoded(codec, encoded(codec, x), n)
    for start in range(0, n, sparse.BLOCK):
        block, out = x[start : start + sparse.BLOCK], y[start : start + sparse.BLOCK]
        count = -(-len(block) // kept)
        best = np.argsort(-np.abs(block), kind="stable")[:count]
        assert set(np.flatnonzero(out)) == set(best)
        assert np.array_equal(np.sign(out[best]), np.sign(block[best]))
        assert len(set(np.abs(out[best]))) <= 2
        assert np.abs(out[best]).sum() == pytest.approx(np.abs(block[best]).sum(), rel=2**-7)


def test_a_64th_takes_a_40th_of_int8() -> None:
    """64 of 4096 values and where they stand take 84 bytes: 10.5 bits each."""
    assert codecs.get("sparse-64").encoded_size(4096) == 84
    assert codecs.sparse_of(1 / 64) is codecs.get("sparse-64")


def test_zeros_stay_zeros() -> None:
    """Where a block has fewer values than are kept, the others do not move; a block of zeros has no bits."""
    codec, x = codecs.get("sparse-64"), np.zeros(8192, np.float32)
    x[[5, 4000, 100]] = [1.0, -3.0, 0.25]
    data = encoded(codec, x)
    y = decoded(codec, data, len(x))
    assert np.flatnonzero(y).tolist() == [5, 100, 4000]
    assert not data[84:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**100])
def test_what_is_not_finite_is_said(value: float) -> None:
    """NaN, an infinity, and what a few of would overflow a sum are told, and are not sound for receivers."""
    for codec in twins("sparse-64"):
        x = vector(0, 5000)
        x[4500] = value
        data = np.empty(codec.encoded_size(len(x)), np.uint8)
        assert not codec.encode(x, data, 1.0)
        assert not codecs.is_sound(codec, data, len(x))
        assert not codec.decode_add(data, np.zeros(len(x), np.float32), 1.0)


@briefly
@given(seed=st.integers(0, 2**32 - 1), n=st.sampled_from(LENGTHS), flips=st.integers(1, 12))
def test_hostile_bytes(seed: int, n: int, flips: int) -> None:
    """Bytes that were changed anywhere are sound for all or for nobody, and never write outside."""
    rng = np.random.default_rng(seed)
    twin, codec = twins(NAMES[seed % len(NAMES)])
    data = encoded(codec, vector(seed % 5, n))
    for _ in range(flips):
        data[rng.integers(0, len(data))] ^= np.uint8(1 << rng.integers(0, 8))
    sound = codecs.is_sound(twin, data, n)
    assert codecs.is_sound(codec, data, n) == sound
    room = np.full(n + 64, 7.0, np.float32)
    assert codec.decode_add(data, room[32 : 32 + n], 0.5) == sound
    codec.decode(data, room[32 : 32 + n])
    assert (room[:32] == 7).all()
    assert (room[32 + n :] == 7).all()
    assert not codecs.is_sound(codec, data[:-1], n)


def test_nothing_is_kept_beside_it() -> None:
    """What a sparse codec does not send stays where it was measured from: in a peer's parameters."""
    assert not codecs.has_feedback(codecs.get("sparse-64"))


@pytest.mark.parametrize("density", [1.0, 0.3, 1 / 512, 0, "1/64"])
def test_other_densities_are_refused(density: float) -> None:
    """A share that no codec has is refused with those that there are."""
    with pytest.raises(ConfigurationError, match="A density is one of 1/16, 1/32, 1/64, 1/128, 1/256"):
        codecs.sparse_of(density)


def test_no_compression_by_itself() -> None:
    """A sparse codec's name as compression is refused: it needs outer steps."""
    with pytest.raises(ConfigurationError, match=r"outer steps have it with Outer\(density=\)"):
        codecs.prepare("sparse-64")
