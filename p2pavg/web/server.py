"""The server of the page, on aiohttp: files, server-sent events, history, metrics. It takes nothing in."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

from p2pavg.errors import AddressInUseError, ConfigurationError
from p2pavg.extras import check_installed
from p2pavg.web.access import COOKIE, Place, is_allowed, is_meant
from p2pavg.web.broadcast import Broadcast, encode
from p2pavg.web.timeline import Timeline

TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_LISTENERS = 32
CLOSE_S = 1.0
BEAT_S = 15.0  # after which a stream without news sends a comment, so that a dead listener is noticed

NEEDS_TOKEN = (
    "This page needs its token: open the address that 'p2pavg monitor' printed when it started, or send "
    "the header 'Authorization: Bearer TOKEN'.\n"
)
NOT_MEANT = "This page is served to its own address alone; open the one that 'p2pavg monitor' printed.\n"


class Server:
    """Serves the page, and tells it what it is told. Runs on the current event loop."""

    def __init__(self, place: Place, timeline: Timeline, metrics: Callable[[], bytes]) -> None:
        """metrics: makes what /metrics answers, in Prometheus' text format."""
        self.place = place
        self.timeline = timeline
        self._metrics = metrics
        self._broadcast = Broadcast()
        self._state = b"{}"
        self._listeners: set[asyncio.Task[Any]] = set()
        self._files = _page()

    async def start(self) -> None:
        """Listen. Raises ConfigurationError without aiohttp, AddressInUseError when the port is taken."""
        check_installed("The page needs", "aiohttp")
        from aiohttp import web

        self._web: Any = web

        async def guard(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
            return await self._guard(request, handler)

        app = web.Application(middlewares=[web.middleware(guard)])
        app.router.add_get("/", self._file)
        app.router.add_get("/page/{name}", self._file)
        app.router.add_get("/live", self._live)
        app.router.add_get("/state", self._now)
        app.router.add_get("/history", self._history)
        app.router.add_get("/round/{epoch}", self._round)
        app.router.add_get("/metrics", self._exposed)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        place = self.place
        try:
            await web.TCPSite(self._runner, place.host, place.port).start()
        except OSError as error:
            await self._runner.cleanup()
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(
                    f"port {place.port} of {place.host} is taken; name another port in --web"
                ) from None
            raise ConfigurationError(
                f"the page cannot be served at {place.host}:{place.port} ({error.strerror or error}); "
                "name an address of this machine"
            ) from None
        self.place = replace(place, port=self._runner.addresses[0][1])

    def tell(self, frame: Mapping[str, Any], topics: Mapping[str, Any]) -> None:
        """Tell all who look. frame: the whole state, for /state; topics: what changes the page, by name."""
        self._state = encode(frame)
        self._broadcast.tell(topics)

    async def close(self) -> None:
        """Stop serving."""
        for task in list(self._listeners):
            task.cancel()
        await self._runner.cleanup()

    # ---------------------------------------------------------------------------------------- requests

    async def _guard(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        web = self._web
        given = request.query.get("token")
        if not is_meant(self.place, request.host):
            return web.Response(status=421, text=NOT_MEANT, headers=HEADERS)
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not is_allowed(self.place, given or bearer or request.cookies.get(COOKIE)):
            return web.Response(status=401, text=NEEDS_TOKEN, headers=HEADERS)
        if given and self.place.token and request.path == "/":
            # Out of the address bar, into a cookie that scripts cannot read.
            answer = web.Response(status=303, headers={**HEADERS, "Location": "/"})
            answer.set_cookie(COOKIE, given, httponly=True, samesite="Strict", path="/")
            return answer
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    async def _file(self, request: Any) -> Any:
        name = request.match_info.get("name", "index.html")
        if name not in self._files:
            raise self._web.HTTPNotFound
        kind = TYPES[name.rpartition(".")[2]]
        return self._web.Response(body=self._files[name], content_type=kind, charset="utf-8")

    async def _live(self, request: Any) -> Any:
        if len(self._listeners) >= MOST_LISTENERS:
            return self._web.Response(status=503, text=f"{MOST_LISTENERS} pages are open; close one.\n")
        answer = self._web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        task = asyncio.current_task()
        assert task is not None
        self._listeners.add(task)
        try:
            await answer.prepare(request)
            await answer.write(b"retry: 1000\n\n")
            async for events in self._broadcast.listen(BEAT_S):
                await answer.write(events)
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._listeners.discard(task)
        return answer

    async def _now(self, request: Any) -> Any:
        return self._web.Response(body=self._state, content_type="application/json")

    async def _history(self, request: Any) -> Any:
        begin = _time(request.query.get("from"), -math.inf)
        end = _time(request.query.get("to"), math.inf)
        timeline = self.timeline
        first = timeline.begin if timeline.begin is not None else timeline.end
        begin, end = max(begin, first), min(end, timeline.end)
        found = {
            "begin": timeline.begin,
            "end": timeline.end,
            "figures": timeline.figures(begin, end, request.query.get("peer", "")),
            "rounds": timeline.rounds(begin, end),
            "events": timeline.events(begin, end),
        }
        return self._web.Response(body=encode(found), content_type="application/json")

    async def _round(self, request: Any) -> Any:
        epoch = request.match_info["epoch"]
        found = (
            self.timeline.round(int(epoch))
            if epoch.isascii() and epoch.isdigit() and len(epoch) < 16
            else None
        )
        if found is None:
            raise self._web.HTTPNotFound
        return self._web.Response(body=encode(found), content_type="application/json")

    async def _exposed(self, request: Any) -> Any:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return self._web.Response(body=self._metrics(), headers={"Content-Type": kind})


def _time(text: str | None, other: float) -> float:
    with contextlib.suppress(ValueError):
        value = other if text is None else float(text)
        return other if math.isnan(value) else value
    return other


def _page() -> dict[str, bytes]:
    """The files of the page by name."""
    folder = files("p2pavg.web").joinpath("page")
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in TYPES}
