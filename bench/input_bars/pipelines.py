"""Six made datasets, as tar shards, and the steps of their pipelines."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from p2pavg.bench.input.steps import Step

SAMPLES = 256  # of each dataset
WORDS = ["the", "model", "data", "peer", "round", "average", "gradient", "epoch", "swarm", "trains"]


@dataclass(frozen=True)
class Made:
    """A dataset and its pipeline. data(dice): the bytes of one sample."""

    name: str
    steps: Sequence[Step]
    data: Callable[[np.random.Generator], bytes]
    suffix: str


def write(made: Made, folder: Path, samples: int = SAMPLES) -> str:
    """Tar shards of the dataset. Returns the glob that names them."""
    dice = np.random.default_rng(0)
    with tarfile.open(folder / f"{made.name}-0.tar", "w") as archive:
        for number in range(samples):
            data = made.data(dice)
            info = tarfile.TarInfo(f"{number:06}.{made.suffix}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(folder / f"{made.name}-*.tar")


def available() -> Iterator[Made]:
    """Those whose libraries are installed; a line tells of the others."""
    try:
        from PIL import Image
    except ImportError:
        print(
            "without Pillow, the pipelines of JPEG, PNG and resized images are left out: pip install pillow"
        )
    else:
        yield from _pictures(Image)
    yield Made("text", [words, tokens, padded], _text, "txt")
    yield Made("tokens", [window, shifted], _tokens, "u16")
    yield Made("fft", [signal, spectrum, decibels], _signal, "f32")


def _pictures(image: Any) -> Iterator[Made]:
    def decode(data: bytes) -> np.ndarray[Any, Any]:
        return np.asarray(image.open(io.BytesIO(data)).convert("RGB"))

    def resize(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.asarray(image.fromarray(pixels).resize((224, 224)))

    def normalise(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return (pixels.astype(np.float32) / 255 - 0.45) / 0.225

    def flip(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(pixels[:, :: np.random.choice((-1, 1))])

    flip.online = True  # type: ignore[attr-defined]

    def picture(width: int, height: int, kind: str) -> Callable[[np.random.Generator], bytes]:
        def data(dice: np.random.Generator) -> bytes:
            coarse = dice.integers(0, 256, (height // 32 + 1, width // 32 + 1, 3), np.uint8)
            smooth = image.fromarray(coarse).resize((width, height))
            noise = dice.integers(0, 12, (height, width, 3), np.uint8)
            file = io.BytesIO()
            image.fromarray(np.asarray(smooth) // 2 + noise).save(file, kind)
            return file.getvalue()

        return data

    yield Made("jpeg", [decode, resize, normalise, flip], picture(500, 375, "jpeg"), "jpg")
    yield Made("png", [decode, resize, normalise, flip], picture(320, 240, "png"), "png")
    yield Made("resized", [decode, normalise], picture(64, 64, "jpeg"), "jpg")


def _text(dice: np.random.Generator) -> bytes:
    return " ".join(dice.choice(WORDS, 2000)).encode()


def words(data: bytes) -> list[str]:
    return data.decode().lower().split()


def tokens(text: list[str]) -> np.ndarray[Any, Any]:
    return np.array([zlib.crc32(word.encode()) & 0xFFFF for word in text], np.uint16)


def padded(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.pad(ids.astype(np.int64), (0, 2048 - len(ids)))


def _tokens(dice: np.random.Generator) -> bytes:
    return bytes(dice.zipf(1.3, 4097).astype(np.uint16).tobytes())


def window(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint16).astype(np.int64)


def shifted(ids: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return [ids[:-1].copy(), ids[1:].copy()]


def _signal(dice: np.random.Generator) -> bytes:
    return bytes(np.cumsum(dice.normal(size=32_000)).astype(np.float32).tobytes())


def signal(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.float32)


def spectrum(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    frames = np.lib.stride_tricks.sliding_window_view(samples, 400)[::160] * np.hanning(400)
    return np.abs(np.fft.rfft(frames, 512)).astype(np.float32)


def decibels(power: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.log10(power + 1e-6).astype(np.float32)
