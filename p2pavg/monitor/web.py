"""The page of a run: what a monitor shows, handed to a web server and its history."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import Any

from p2pavg.extras import check_installed
from p2pavg.metrics.exposition import text_of
from p2pavg.monitor import exported, lines
from p2pavg.monitor.shown import Shown
from p2pavg.web.access import Place, place_of
from p2pavg.web.server import Server
from p2pavg.web.timeline import Timeline

TOKEN = "P2PAVG_WEB_TOKEN"


def place(text: str) -> Place:
    """Where to serve the page. Raises ConfigurationError."""
    check_installed("The page needs", "aiohttp", "prometheus_client")
    return place_of(text, os.environ.get(TOKEN))


MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


class Page:
    """Serves the page of one run, from `start` to `close`. Runs on the current event loop."""

    def __init__(self, where: Place, run_id: str, jsonl: str | None) -> None:
        """jsonl: a file of frames, from whose beginning on the page knows the run."""
        self._server = Server(where, Timeline(), self._metrics)
        self._run_id = run_id
        self._jsonl = None if jsonl == "-" else jsonl
        self._shown: Shown | None = None
        self._early: list[Mapping[str, Any]] | None = None  # frames that came while the file was read
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Serve; returns the page's address. Raises ConfigurationError, AddressInUseError."""
        await self._server.start()
        if self._jsonl is not None:
            self._early = []
            self._reading = asyncio.create_task(self._read(self._jsonl))
        return self._server.place.url

    async def _read(self, path: str) -> None:
        """Read the file aside, then go on with all that it tells."""
        past = await asyncio.to_thread(recalled, path, self._run_id)
        early, self._early = self._early or [], None
        for frame in early:
            if frame["at"] > past.end:
                past.add(frame)
        self._server.timeline = past

    def show(self, shown: Shown, frame: Mapping[str, Any]) -> None:
        """Show a run as it is now. frame: as `Shown.to_dict` makes it."""
        self._shown = shown
        self._server.timeline.add(frame)
        if self._early is not None:
            self._early.append(frame)
        rounds = [{name: value for name, value in one.items() if name != "peers"} for one in frame["rounds"]]
        run = {name: value for name, value in frame.items() if name not in ("links", "rounds", "events")}
        topics = {"run": run, "links": frame["links"], "rounds": rounds, "events": frame["events"]}
        self._server.tell(frame, topics)

    def _metrics(self) -> bytes:
        return b"" if self._shown is None else text_of(exported.values(self._shown))

    async def close(self) -> None:
        """Stop serving."""
        if self._reading is not None:
            self._reading.cancel()
        await self._server.close()


def recalled(path: str, run_id: str) -> Timeline:
    """What a file of frames tells of a run; frames that are malformed count for nothing."""
    past = Timeline()
    for frame in lines.frames(path, run_id):
        with contextlib.suppress(*MALFORMED):
            past.add(frame)
    return past
