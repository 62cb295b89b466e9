"""Who looks on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2pavg.rounds.measure.status import MOST_WATCHERS, Watching


async def test_watchers_are_few() -> None:
    """Beyond the sixteenth nobody is told anything, until one of them is gone."""
    watching = Watching(lambda: SimpleNamespace(to_message=dict))  # type: ignore[arg-type, return-value]
    links: list[Any] = []
    for _ in range(MOST_WATCHERS + 2):
        told: list[Any] = []
        links.append(SimpleNamespace(send=told.append, told=told))
        watching.watch(links[-1])
    assert MOST_WATCHERS == 16
    assert [bool(link.told) for link in links] == [True] * MOST_WATCHERS + [False] * 2
    watching.link_down(links[0])
    watching.watch(links[-1])
    assert links[-1].told
    watching.close()
