"""What is built on the codecs: stochastic rounding, many runs, means, codecs of others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg import codecs, native
from p2pavg.codecs import twin
from p2pavg.errors import ConfigurationError
from tests.unit.codecs.codec_cases import (
    IMPLEMENTATIONS,
    NAMES,
    briefly,
    decoded,
    encoded,
    implementation,
    runs,
)

needs_native = pytest.mark.skipif(not native.available(), reason="needs the native module")


class TestStochastic:
    def test_expected_error_is_zero(self) -> None:
        """Over many epochs the mean of what is decoded approaches x, where rounding to nearest stays off."""
        x = np.linspace(-1, 1, 1024, dtype=np.float32)
        total = np.zeros(1024)
        epochs = 4000
        for epoch in range(epochs):
            codec = codecs.StochasticInt8(seed=7, epoch=epoch)
            total += decoded(codec, encoded(codec, x)[0], 1024)
        nearest = codecs.get("int8")
        bias = np.abs(total / epochs - x)
        step = 1 / 127
        assert bias.max() < 5 * step / 2 / np.sqrt(epochs)
        assert np.abs(decoded(nearest, encoded(nearest, x)[0], 1024) - x).max() > 0.4 * step

    def test_draws_belong_to_elements(self) -> None:
        """A run cut at blocks encodes like the whole: a draw depends on (seed, epoch, element) only."""
        x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
        whole = encoded(codecs.StochasticInt8(1, 2, first=10), x)[0][64:]
        parts = [
            encoded(codecs.StochasticInt8(1, 2, first=10 + at), x[at : at + 2048])[0][64:]
            for at in (0, 2048, 4096)
        ]
        assert (np.concatenate(parts) == whole).all()
        for other in (codecs.StochasticInt8(2, 2, 10), codecs.StochasticInt8(1, 3, 10)):
            assert (encoded(other, x)[0][64:] != whole).mean() > 0.2

    @needs_native
    @pytest.mark.parametrize("which", IMPLEMENTATIONS[:-1])
    @briefly
    @given(
        x=st.one_of(runs(), runs(finite=False)),
        seed=st.integers(0, 2**64 - 1),
        epoch=st.integers(0, 2**64 - 1),
        first=st.sampled_from([0, 1, 2**32 - 5000, 2**32 - 3, 2**40 + 17]),
    )
    def test_twins_draw_alike(self, which: str, x: codecs.F32, seed: int, epoch: int, first: int) -> None:
        """Every instruction set rounds every element as the Python twin does."""
        expected = np.zeros(codecs.get("int8").encoded_size(len(x)), np.uint8)
        told = twin.encode(twin.INT8, x, expected, 0.3, (seed, epoch, first))
        with implementation(which, "int8"):
            data, finite = encoded(codecs.StochasticInt8(seed, epoch, first), x, 0.3)
        assert data.tobytes() == expected.tobytes()
        assert finite == told


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
class TestManyRuns:
    def test_equals_one_by_one(self, which: str, name: str) -> None:
        """Decoding a whole result in one call gives what decoding its chunks does, wherever they go."""
        rng = np.random.default_rng(3)
        counts = [5000, 0, 4096, 1]
        with implementation(which, name) as codec:
            chunks = [encoded(codec, rng.standard_normal(n).astype(np.float32))[0] for n in counts]
            src = np.concatenate(chunks)
            starts = np.cumsum([0, *map(len, chunks)])[:-1].astype(np.int64)
            targets = np.array([4097, 0, 1, 0], np.int64)
            dst = np.zeros(9200, np.float32)
            codecs.decode_runs(codec, src, starts, dst, targets, np.array(counts, np.int64), 0.5)
            expected = np.zeros(9200, np.float32)
            for chunk, to, n in zip(chunks, targets.tolist(), counts, strict=True):
                expected[to : to + n] = decoded(codec, chunk, n, 0.5)
        assert (dst == expected).all()

    @pytest.mark.parametrize(
        ("start", "to", "n"), [(-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 1, 100), (1, 0, 100)]
    )
    def test_a_run_outside_is_refused(self, which: str, name: str, start: int, to: int, n: int) -> None:
        """Offsets outside the buffers raise and write nothing."""
        with implementation(which, name) as codec:
            src, dst = np.zeros(codec.encoded_size(100), np.uint8), np.ones(100, np.float32)
            with pytest.raises(ValueError, match=r"outside|elements take"):
                codecs.decode_runs(
                    codec,
                    src,
                    *(np.array([v]) if i != 1 else v for i, v in ((0, start), (1, dst), (2, to), (3, n))),
                )  # type: ignore[arg-type]
        assert (dst == 1).all()


@dataclass(frozen=True)
class SignCodec:
    """A codec of somebody else: one byte per element that keeps the sign."""

    name: str = "sign"
    wire_id: int = 64

    def encoded_size(self, n: int) -> int:
        return n

    def encode(self, src: codecs.F32, dst: codecs.Buffer, scale: float) -> bool:
        np.frombuffer(dst, np.int8)[:] = np.sign(src * np.float32(scale))
        return bool(np.isfinite(src).all())

    def decode(self, src: codecs.Buffer, dst: codecs.F32, scale: float = 1.0) -> None:
        dst[:] = np.frombuffer(src, np.int8) * np.float32(scale)

    def decode_add(self, src: codecs.Buffer, acc: codecs.F32, weight: float) -> bool:
        acc += np.frombuffer(src, np.int8) * np.float32(weight)
        return True


class TestGet:
    def test_a_codec_of_somebody_else_is_taken(self) -> None:
        """Any object with the members of Codec works, also where native code has a faster way."""
        codec = codecs.get(SignCodec())
        dst = np.zeros(3, np.float32)
        at = np.array([0], np.int64)
        codecs.decode_runs(codec, np.array([1, 255, 0], np.uint8), at, dst, at, np.array([3]), 2.0)
        assert dst.tolist() == [2, -2, 0]
        assert not codecs.is_built_in(codec)
        assert codecs.label(codec) == "sign (wire id 64)"
        assert codecs.for_results(codec) is codec

    def test_averages_of_coarse_codecs_are_finer(self) -> None:
        """Nobody keeps what rounding takes from a result, or from what a departing peer hands over."""
        assert codecs.for_results(codecs.get("int4")).name == "int8"
        assert codecs.for_handing_over(codecs.get("int4")).name == "fp16"
        assert codecs.has_feedback(codecs.get("int4"))
        for coarse in ("int8", codecs.StochasticInt8(1)):
            assert codecs.for_results(codecs.get(coarse)).name == "fp16"
            assert codecs.label(codecs.get(coarse)) == "int8"
        assert codecs.for_results(codecs.get("bf16")).name == "bf16"
        assert codecs.has_feedback(codecs.get("int8"))
        assert not codecs.has_feedback(codecs.StochasticInt8(1))

    def test_what_is_no_codec_is_refused(self) -> None:
        """Unknown names, incomplete objects and impossible wire ids each get an error that names the fix."""
        with pytest.raises(ConfigurationError, match="choose one of none, fp16, bf16, int8, int4"):
            codecs.get("fp8")
        with pytest.raises(ConfigurationError, match="not a Codec"):
            codecs.get(object())  # type: ignore[arg-type]
        for wire_id in (3, 300, "64", 64.5):
            with pytest.raises(ConfigurationError, match="choose a whole number from 64 to 255"):
                codecs.get(SignCodec(wire_id=wire_id))  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"give an object of it: SignCodec\("):
            codecs.get(SignCodec)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="name is a str"):
            codecs.get(SignCodec(name=5))  # type: ignore[arg-type]
        for seed in (-1, 2**64, "1", 0.5):
            with pytest.raises(ConfigurationError, match="whole number from 0"):
                codecs.StochasticInt8(seed)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="cannot be called 'fp16'; give it another name"):
            codecs.get(SignCodec(name="fp16"))
