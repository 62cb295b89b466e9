"""A peer's own port for Prometheus, beside its training."""

from __future__ import annotations

import re
import urllib.request
from urllib.error import URLError

import numpy as np
import pytest

from p2pavg.errors import AddressInUseError
from p2pavg.peer.peer import Peer
from tests.ports import free_port

pytest.importorskip("prometheus_client")


def scraped(port: int) -> dict[str, float]:
    """The values of the metrics that have one series."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(p2pavg_\w+)\{[^}]*\} (\S+)$", text, re.M)}


async def test_a_peer_exports_what_it_does_and_frees_the_port() -> None:
    """Each round counts; a second peer on the port is refused; a closed peer has left it."""
    port = free_port()
    options = {"initial_peers": [], "listen": "127.0.0.1:0", "metrics": f"127.0.0.1:{port}"}
    async with Peer("run", **options) as peer:
        assert scraped(port)["p2pavg_epochs_total"] == 0
        for _ in range(2):
            await peer.all_reduce([np.ones(64, np.float32)], weight=3.0)
        found = scraped(port)
        assert found["p2pavg_epochs_total"] == 2
        assert found["p2pavg_peers"] == 1
        assert found["p2pavg_peer_memory_bytes"] > 1e7
        with pytest.raises(AddressInUseError, match="metrics="):
            Peer("other", **options).start()
    with pytest.raises(URLError):
        scraped(port)
