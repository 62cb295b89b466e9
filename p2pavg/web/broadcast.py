"""Broadcast: the newest message of each topic, for any number of listeners of any pace.

A listener that is slow skips messages and gets the newest; nothing is queued for it. On the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any


class Broadcast:
    """Topics and their newest messages."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, bytes]] = {}  # by topic: (number, event)
        self._number = 0
        self._news = asyncio.Event()

    def tell(self, topics: Mapping[str, Any]) -> None:
        """Take JSON data by topic; what is as before is not sent again."""
        for topic, data in topics.items():
            event = b"event: %s\ndata: %s\n\n" % (topic.encode(), encode(data))
            if topic in self._newest and self._newest[topic][1] == event:
                continue
            self._number += 1
            self._newest[topic] = self._number, event
        self._news.set()
        self._news = asyncio.Event()

    async def listen(self, beat_s: float) -> AsyncIterator[bytes]:
        """Server-sent events: first the newest of every topic, then each as it comes, and a comment after
        `beat_s` seconds without news, so that a dead listener is noticed. Endless.
        """
        seen = 0
        while True:
            news, until = self._news, self._number
            fresh = sorted(row for row in self._newest.values() if row[0] > seen)
            seen = until
            yield b"".join(event for _, event in fresh) or b":\n\n"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), beat_s)


def encode(data: Any) -> bytes:
    """JSON on one line, without what ends a script or starts an entity should it ever stand in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026").encode()
