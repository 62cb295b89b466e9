"""What a state says of itself: bounded, and decoded where nobody waits for it."""

from __future__ import annotations

import ast
import inspect
import textwrap
import tracemalloc
from typing import Any

import numpy as np
import pytest

from p2pavg.errors import StateError
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.downloader import Downloader
from p2pavg.rounds.training import Section
from tests.unit.rounds.state.packed import packed

LINEAGE = b"l" * 32


def of(meta: bytes) -> tuple[state.Manifest, np.ndarray[Any, Any]]:
    blob = np.frombuffer(meta, np.uint8)
    return state.describe(1, LINEAGE, len(meta), blob), blob


def padded(container: bytes, count: int) -> bytes:
    """A head whose metadata are so many of these."""
    many = b"\xdd" + count.to_bytes(4, "big") + container * count
    return b"\x82\xa4meta" + many + b"\xa7buffers\x90"


def test_hashing_gives_way_every_few_milliseconds_and_no_more_often(monkeypatch: Any) -> None:
    """Others may go first after each 4 MiB, however small the chunks are."""
    times: list[None] = []
    monkeypatch.setattr(state, "give_way", lambda: times.append(None))
    state.describe(0, bytes(32), 0, np.zeros(20 << 20, np.uint8))
    assert len(times) == 5


@pytest.mark.parametrize("container", [b"\x80", b"\x90"], ids=["maps", "lists"])
@pytest.mark.parametrize("counted", [True, False])
def test_small_containers_cannot_take_much_memory(
    container: bytes, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MiB of empty maps or lists is refused before it takes tens of MiB."""
    if not counted:
        monkeypatch.setattr(state, "BYTES_PER_CONTAINER", 1)
    manifest, blob = of(padded(container, 1 << 20))
    tracemalloc.start()
    try:
        if counted:
            with pytest.raises(StateError, match="malformed"):
                state.unpack(manifest, blob)
        else:
            state.unpack(manifest, blob)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (peak < 24 << 20) is counted


def test_ordinary_metadata_are_read() -> None:
    """What an optimizer of two thousand parameters says comes back as it was."""
    meta = {"optimizer": [{"step": n, "shape": [4096, 4096], "name": f"layer.{n}"} for n in range(2000)]}
    meta_bytes, blob = packed((meta, {"p": Section.of(np.zeros(8, np.uint8))}))
    assert state.unpack(state.describe(1, LINEAGE, meta_bytes, blob), blob).meta == meta


def test_more_metadata_than_newcomers_read_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor is told what to do, instead of newcomers refusing its state."""
    monkeypatch.setattr(state, "MAX_META_BYTES", 1000)
    with pytest.raises(StateError, match="keep large values"):
        state.Packing(({"text": "x" * 1000}, {}))
    head = {
        "epoch": 1,
        "lineage": LINEAGE,
        "meta": 1001,
        "total": 1001,
        "hashes": b"h" * 16,
        "signature": b"",
    }
    with pytest.raises(StateError, match="wrongly"):
        state.Manifest.from_message(head)


def test_a_state_is_decoded_in_a_thread_of_its_own() -> None:
    """The event loop, whose turns others wait for, does not decode it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Downloader.fetch)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if ast.unparse(call.func) == "state.unpack"]
    handed = [call for call in calls if ast.unparse(call.func) == "loop.run_in_executor"]
    assert any("state.unpack" in map(ast.unparse, call.args) for call in handed)
