"""What reports tell is what the network carried: all of it, and nothing is opened again and again."""

from __future__ import annotations

import json
import time
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
def test_a_small_model_costs_what_reports_tell(
    topology: str, peers: int, numel: int, closed: bool, tmp_path: Path
) -> None:
    """From the first packet on, and whatever for: with small vectors a host sends what its reports tell,
    within 5%, and the streams that a link has after four rounds are those that it has in the end.
    """
    file = tmp_path / "reports"  # of all rounds: where one lacked somebody, another one was asked for
    with Workers(
        peers,
        "p2pavg.bench.allreduce.worker",
        topology=topology,
        environment={"P2PAVG_REPORTS": str(file)},
    ) as workers:
        joined = workers.join(
            numel=numel,
            peers=peers,
            compression="fp16",
            streams="auto",
            beside="none",
            credentials=new_secret("bench-allreduce") if closed else None,
        )
        early: list[set[str]] = []
        for index in range(ROUNDS):
            workers.all(deadline_s=DEADLINE_S, do="fill")
            workers.all(deadline_s=DEADLINE_S, do="round", index=index)
            if index == 3:
                early, since = [connections(worker.process.pid) for worker in workers.workers], time.time()
        paths = workers.lab.stats().paths
        reports = [json.loads(line) for line in file.read_text().splitlines()]
        for host, peer in zip(workers.lab.hosts, joined, strict=False):
            wire = sum(each["wire_bytes_sent"] for each in reports if each["peer"] == peer["peer"])
            counted = sum(counters.sent_bytes for (source, _), counters in paths.items() if source == host)
            assert wire == pytest.approx(counted, rel=0.05)
        later = [each for each in reports if each["finished_at"] > since]
        if all(each["attempts"] == 1 and len(each["members"]) == peers for each in later):
            # Else somebody's machine was busy, and its links may be new ones.
            for before, worker in zip(early, workers.workers, strict=True):
                assert len(connections(worker.process.pid) - before) <= peers - 1
