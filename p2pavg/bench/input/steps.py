"""The user's steps: functions that turn a sample's bytes, one after the other, into the trainer's input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import torch

from p2pavg.bench.input.source import RawSample
from p2pavg.errors import ConfigurationError

Step = Callable[[Any], Any]
_ARRAY, _TENSOR = 1, 2  # MessagePack's extension types of a shard


@dataclass(frozen=True)
class Pipeline:
    """The steps in order. From the first that has an attribute `online = True` on, all stay online."""

    steps: Sequence[Step]

    @classmethod
    def of(cls, steps: object, text: str) -> Pipeline:
        """text: how the user names the list of functions. Raises ConfigurationError."""
        if not isinstance(steps, list | tuple) or not steps or not all(map(callable, steps)):
            raise ConfigurationError(f"{text} is no list of functions, each from a sample to a sample")
        return cls(tuple(steps))

    @property
    def names(self) -> list[str]:
        """The names of the steps."""
        return [getattr(step, "__name__", type(step).__name__) for step in self.steps]

    @property
    def offline(self) -> int:
        """The number of first steps that may be done once, beforehand."""
        return next(
            (k for k, step in enumerate(self.steps) if getattr(step, "online", False)), len(self.steps)
        )

    def run(self, value: Any, first: int, end: int, name: str = "") -> Any:
        """The value after the steps first .. end - 1. Raises ConfigurationError that names step and
        sample.
        """
        for number in range(first, end):
            try:
                value = self.steps[number](value)
            except Exception as error:
                raise ConfigurationError(
                    f"step {number + 1} ({self.names[number]}) raised {type(error).__name__} "
                    f"on {name}: {error}"
                ) from None
        return value

    def check_repeatable(self, samples: Sequence[RawSample]) -> None:
        """Raises ConfigurationError when an offline step gives two results for one of the samples."""
        for sample in samples:
            value: Any = sample.data
            for number in range(self.offline):
                one, other = (packed(self.run(value, number, number + 1, sample.name)) for _ in range(2))
                if one != other:
                    raise ConfigurationError(
                        f"step {number + 1} ({self.names[number]}) gives two results for one sample: it is "
                        f"random, so set {self.names[number]}.online = True, and all that follow stay online"
                    )
                value = unpacked(one)


def packed(value: Any) -> bytes:
    """The MessagePack form of a value: of bytes, texts, numbers, NumPy arrays, tensors, lists and dicts of
    them.

    Raises ConfigurationError for anything else.
    """
    data: bytes = msgpack.packb(value, default=_ext)
    return data


def unpacked(data: bytes) -> Any:
    """The value of a MessagePack form; arrays are read-only views."""
    return msgpack.unpackb(data, ext_hook=_value, strict_map_key=False)


def _ext(value: Any) -> msgpack.ExtType:
    """NumPy scalars and arrays, and tensors on the CPU."""
    kind = _TENSOR if isinstance(value, torch.Tensor) else _ARRAY
    array = value.numpy() if isinstance(value, torch.Tensor) else value
    if not isinstance(array, np.ndarray | np.generic) or array.dtype.hasobject:
        raise ConfigurationError(
            f"a step gives a {type(value).__name__}, which cannot stand in a shard: let it give bytes, "
            "numbers, texts, NumPy arrays, tensors, or lists and dicts of them"
        )
    array = np.ascontiguousarray(array)
    head = msgpack.packb([array.dtype.str, array.shape])
    return msgpack.ExtType(kind, head + array.tobytes())


def _value(kind: int, data: bytes) -> Any:
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    dtype, shape = unpacker.unpack()
    array = np.frombuffer(data, np.dtype(dtype), offset=unpacker.tell()).reshape(shape)
    return torch.from_numpy(array.copy()) if kind == _TENSOR else array
