"""What reports tell is what the network carried: all of it, and nothing is opened again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pavg.bench.workers import Workers
from p2pavg.credentials import new_secret

HEADER_BYTES = 52  # IP, TCP and its timestamps
DEADLINE_S = 60.0
ROUNDS = 12
ESTABLISHED = "01"  # in /proc/net/tcp


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


def connections(pid: int) -> set[str]:
    """The TCP connections of a process's network namespace: addresses and ports at both ends."""
    rows = (line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
    return {f"{row[1]} {row[2]}" for row in rows if row[3] == ESTABLISHED}


@pytest.mark.parametrize(
    ("topology", "peers", "numel", "closed"),
    [
        ("six-100ms", 2, 500_000, False),
        ("clouds-4", 4, 300_000, True),
        pytest.param("two-300ms", 2, 500_000, False, marks=pytest.mark.long),
    ],
)
def test_a_small_model_costs_what_reports_tell(topology: str, peers: int, numel: int, closed: bool) -> None:
    """From the first packet on, and whatever for: with small vectors a host sends what its reports tell,
    within 5%, and the streams that a link has after four rounds are those that it has in the end.
    """
    with Workers(peers, "p2pavg.bench.allreduce.worker", topology=topology) as workers:
        workers.join(
            numel=numel,
            peers=peers,
            compression="fp16",
            streams="auto",
            beside="none",
            credentials=new_secret("bench-allreduce") if closed else None,
        )
        told = [0] * peers
        early: list[set[str]] = []
        for index in range(ROUNDS):
            workers.all(deadline_s=DEADLINE_S, do="fill")
            answers = workers.all(deadline_s=DEADLINE_S, do="round", index=index)
            told = [sum(both) for both in zip(told, (a["wire_bytes_sent"] for a in answers), strict=True)]
            if index == 3:
                early = [connections(worker.process.pid) for worker in workers.workers]
        paths = workers.lab.stats().paths
        for host, wire in zip(workers.lab.hosts, told, strict=False):
            counted = sum(counters.sent_bytes for (source, _), counters in paths.items() if source == host)
            assert wire == pytest.approx(counted, rel=0.05)
        for before, worker in zip(early, workers.workers, strict=True):
            assert len(connections(worker.process.pid) - before) <= peers - 1
