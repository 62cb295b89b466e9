"""A member that lies: once a second, one field of one control message that it sends is not what it was."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from p2pavg.transport.links.link import Link

EVERY_S = 1.0
OWN = frozenset({"samples", "weight", "note"})  # of what it contributes: there a member is believed
KEPT = frozenset({"t", "_id", "_re"})  # which message it is; without them it is none


class Liar:
    """Changes what this process sends over its links, for some seconds."""

    def __init__(self, seconds: float, seed: int, tell: Callable[[str], None]) -> None:
        """tell: called with the kind of message and the field of each lie."""
        self._random = random.Random(seed)
        self._until = time.monotonic() + seconds
        self._due = 0.0
        self._tell = tell
        self._truly = Link.send
        liar = self

        def send(link: Link, message: Mapping[str, Any]) -> None:
            liar._truly(link, liar._message(message))

        Link.send = send  # type: ignore[method-assign]

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        now = time.monotonic()
        if now >= self._until:
            Link.send = self._truly  # type: ignore[method-assign]
            return message
        fields = [name for name in message if name not in KEPT | OWN]
        if now < self._due or not fields:
            return message
        self._due = now + EVERY_S
        field = self._random.choice(fields)
        self._tell(f"{message.get('t')}.{field}")
        return {**message, field: self._other(message[field])}

    def _other(self, value: Any) -> Any:
        """A value of the same type that is another one."""
        draw = self._random
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return max(0, value + draw.choice([-3, -1, 1, 3, 1000]))
        if isinstance(value, float):
            return value * draw.choice([0.0, 0.5, 2.0, 1000.0])
        if isinstance(value, bytes):
            return draw.randbytes(len(value))
        if isinstance(value, list | tuple) and value:
            at = draw.randrange(len(value))
            return [self._other(item) if n == at else item for n, item in enumerate(value)]
        return value
