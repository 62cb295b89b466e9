"""What a round reports as sent is what the network carried."""

from __future__ import annotations

import pytest

from p2pavg.bench.workers import Workers

HEADER_BYTES = 52  # IP, TCP and its timestamps
DEADLINE_S = 60.0


def test_bytes_sent_are_those_that_the_lab_counted() -> None:
    """The payload that the lab brought from either host is what its report says, within 2%."""
    with Workers(2, "p2pavg.bench.allreduce.worker", topology="join-4") as workers:
        workers.join(numel=4_000_000, peers=2, compression="fp16", streams=4, beside="none", credentials=None)
        for index in range(2):  # the first opens streams and finds its rates
            workers.all(deadline_s=DEADLINE_S, do="fill")
            before = workers.lab.stats()
            answers = workers.all(deadline_s=DEADLINE_S, do="round", index=index)
            paths = workers.lab.stats().since(before).paths
        hosts = list(workers.lab.hosts)[:2]
        for answer, pair in zip(answers, (tuple(hosts), tuple(reversed(hosts))), strict=True):
            counted = paths[pair].delivered_bytes - HEADER_BYTES * paths[pair].delivered_packets
            assert answer["bytes_sent"] == pytest.approx(counted, rel=0.02)
            assert answer["bytes_sent"] > 8_000_000  # 2·(N-1)/N·P·b
