"""What averaging needs beside the gradient."""

from __future__ import annotations

import pytest

from p2pavg import native
from p2pavg.bench.workers import Workers

DEADLINE_S = 60.0
MB = 1 << 20


@pytest.mark.parametrize(
    ("engine", "codec", "width", "numel"), [("pump", "fp16", 2, 6_000_000), ("python", "none", 4, 3_000_000)]
)
def test_memory_beyond_the_gradient(engine: str, codec: str, width: int, numel: int) -> None:
    """The first round of three peers takes the encoded result, sums of the own part and chunks under way; the
    second no more, and the pump, which keeps its buffers, takes that memory again.
    """
    if engine == "pump" and not native.available():
        pytest.skip("needs the native module")
    peers, streams = 3, 2
    environment = {"P2PAVG_NATIVE": "0"} if engine == "python" else {}
    with Workers(peers, "p2pavg.bench.allreduce_worker", environment=environment) as workers:
        workers.join(
            numel=numel, peers=peers, compression=codec, streams=streams, beside="none", credentials=None
        )
        taken = []
        for index in range(2):
            workers.all(deadline_s=DEADLINE_S, do="fill")
            answers = workers.all(deadline_s=DEADLINE_S, do="round", index=index)
            assert {answer["engine"] for answer in answers} == {engine}
            taken.append([answer["extra_memory_bytes"] for answer in answers])
    result, sums = width * numel, 4 * numel // peers
    assert result <= min(taken[0])
    assert max(taken[0] + taken[1]) <= result + sums + 2 * (peers - 1) * streams * MB
    if engine == "pump":
        assert max(taken[1]) < result / 2
