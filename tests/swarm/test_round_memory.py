"""What averaging needs beside the gradient."""

from __future__ import annotations

from p2pavg.bench.workers import Workers

DEADLINE_S = 60.0
MB = 1 << 20


def test_memory_beyond_the_gradient() -> None:
    """The first round of three peers takes the encoded result, sums of the own part and chunks under way; the
    second takes that memory again.
    """
    numel, peers, streams = 6_000_000, 3, 2
    with Workers(peers, "p2pavg.bench.allreduce_worker") as workers:
        workers.join(
            numel=numel, peers=peers, compression="fp16", streams=streams, beside="none", credentials=None
        )
        taken = []
        for index in range(2):
            workers.all(deadline_s=DEADLINE_S, do="fill")
            answers = workers.all(deadline_s=DEADLINE_S, do="round", index=index)
            taken.append([answer["extra_memory_bytes"] for answer in answers])
    result, sums = 2 * numel, 4 * numel // peers
    assert result <= min(taken[0])
    assert max(taken[0]) <= result + sums + 2 * (peers - 1) * streams * MB
    assert max(taken[1]) < result / 2
