"""How the members of a closed run learn who is none any more: each tells all in view what is new to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p2pavg.membership.closed import PAGE_BYTES, ClosedRun
from p2pavg.membership.table.node import Node
from p2pavg.membership.table.wire import Contact, RequestKind, matches


class Revoking:
    """Spreads what the run's authority says of former members."""

    def __init__(
        self,
        node: Node,
        key: bytes,
        closed_run: ClosedRun,
        everybody: Callable[[], list[Contact]],
        on_revoked: Callable[[list[bytes]], None],
    ) -> None:
        """everybody: whom to tell. on_revoked: called with the ids of peers that were members till now."""
        self.closed_run = closed_run
        self._node = node
        self._key = key
        self._everybody = everybody
        self._on_revoked = on_revoked
        self._tasks: set[asyncio.Task[bool]] = set()
        node.on_revoked[key] = self._answer

    def close(self) -> None:
        """Tell nobody any more."""
        self._node.on_revoked.pop(self._key, None)
        for task in self._tasks:
            task.cancel()

    async def revoke(self, statements: bytes) -> int:
        """Tell everybody in view; how many have confirmed it."""
        everybody = self._everybody()
        self._on_revoked(self.closed_run.revoked.add(statements))
        told = await asyncio.gather(*(self._tell(contact, statements) for contact in everybody))
        return sum(told)

    async def _tell(self, contact: Contact, statements: bytes) -> bool:
        for at in range(0, len(statements), PAGE_BYTES):
            body = [self._key, b"", statements[at : at + PAGE_BYTES]]
            answer = await self._node.rpc.ask(contact.address, RequestKind.REVOKED, body, expected=contact.id)
            if answer is None:
                return False
        return True

    def _answer(self, cursor: bytes, statements: bytes) -> list[Any]:
        """Answer who tells, or asks, which members were revoked."""
        if len(statements) <= PAGE_BYTES:
            self._learn_revoked(self.closed_run.revoked.add(statements))
        return list(self.closed_run.revoked.page(cursor))

    async def ask(self, contact: Contact) -> None:
        """Learn what one member knows."""
        cursor = b""
        while True:
            answer = await self._node.rpc.ask(
                contact.address, RequestKind.REVOKED, [self._key, cursor, b""], expected=contact.id, tries=2
            )
            if answer is None or not matches(answer.body, bytes, bytes) or len(answer.body[0]) > PAGE_BYTES:
                return
            self._learn_revoked(self.closed_run.revoked.add(answer.body[0]))
            if answer.body[1] <= cursor:
                return
            cursor = answer.body[1]

    def _learn_revoked(self, peer_ids: list[bytes]) -> None:
        """Pass on what is new, to those that it is about as well."""
        if peer_ids:
            statements = self.closed_run.revoked.of(peer_ids)
            for contact in self._everybody():
                task = asyncio.ensure_future(self._tell(contact, statements))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._on_revoked(peer_ids)
