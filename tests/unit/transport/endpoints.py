"""Endpoints in one process: what the link tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p2pavg.credentials import Credentials
from p2pavg.identity import Identity
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.link import Link
from tests.unit.transport.engine_swarm import ENGINES

DEADLINE_S = 20.0


class Host:
    """One peer: an endpoint, its engine, and what it was told."""

    def __init__(self, identity: Identity | None = None, *, kind: str = "python", **hello: Any) -> None:
        """kind: of engine."""
        self.kind = kind
        self.identity = identity or Identity.generate()
        self.hello = hello
        self.up: list[Link] = []
        self.down: list[tuple[Link, str]] = []
        self.messages: list[tuple[Link, dict[str, Any]]] = []
        self.on_message: Callable[[Link, dict[str, Any]], None] | None = None
        self.done: list[int] = []
        self._news = asyncio.Event()

    async def start(
        self,
        *,
        run_id: str = "run",
        port: int = 0,
        port_is_default: bool = False,
        streams: int = 2,
        listen_host: str = "127.0.0.1",
        credentials: Credentials | None = None,
        **options: Any,
    ) -> Host:
        self.engine = ENGINES[self.kind](self)
        self.endpoint = await Endpoint.start(
            self.identity,
            run_id=run_id,
            listen_host=listen_host,
            listen_port=port,
            port_is_default=port_is_default,
            engine=self.engine,
            hello=self.hello,
            streams=streams,
            events=self,
            credentials=credentials,
            **options,
        )
        return self

    @property
    def id(self) -> bytes:
        return self.identity.peer_id

    def link_to(self, other: Host) -> Link:
        return self.endpoint.links[other.id]

    async def connect(self, other: Host, **options: Any) -> Link:
        return await self.endpoint.connect(
            "127.0.0.1", other.endpoint.port, **{"timeout": DEADLINE_S, **options}
        )

    async def until(self, happened: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not happened():
                self._news.clear()
                await self._news.wait()

    async def close(self) -> None:
        await self.endpoint.close()
        self.engine.close()

    # EndpointEvents and EngineEvents

    def link_up(self, link: Link) -> None:
        self.up.append(link)
        self._news.set()

    def link_down(self, link: Link, reason: str) -> None:
        self.down.append((link, reason))
        self._news.set()

    def message(self, link: Link, message: dict[str, Any]) -> None:
        self.messages.append((link, message))
        self._news.set()
        if self.on_message is not None:
            self.on_message(link, message)

    def stream_closed(self, link: int, stream: int, reason: str) -> None:
        self.endpoint.stream_closed(link, stream, reason)
        self._news.set()

    def job_done(self, transfer: int, digests: tuple[bytes, ...]) -> None:
        self.done.append(transfer)
        self._news.set()

    def job_refused(self, transfer: int, rank: int, why: str) -> None:
        raise AssertionError(why)

    def blob_chunk(self, transfer: int, chunk: int) -> None: ...

    def blob_sent(self, link: int, transfer: int, chunk: int) -> None: ...
