"""What averaging needs beside the gradient."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer, native
from p2pavg.bench.allreduce.worker import peak, peak_reset, resident
from p2pavg.bench.workers import Workers
from p2pavg.transport import pump_engine
from tests.swarm.trainers import Trainers

DEADLINE_S = 60.0
MB = 1 << 20
STREAMS = 2
PARAMETERS = 36


@pytest.mark.parametrize(
    ("engine", "codec", "width", "numel"), [("pump", "fp16", 2, 6_000_000), ("python", "none", 4, 3_000_000)]
)
def test_memory_beyond_the_gradient(engine: str, codec: str, width: int, numel: int) -> None:
    """The first round of three peers takes the encoded result, sums of the own part and chunks under way; the
    second no more, and the pump, which keeps its buffers, takes that memory again.
    """
    if engine == "pump" and not native.available():
        pytest.skip("needs the native module")
    peers = 3
    environment = {"P2PAVG_NATIVE": "0"} if engine == "python" else {}
    with Workers(peers, "p2pavg.bench.allreduce.worker", environment=environment) as workers:
        workers.join(
            numel=numel, peers=peers, compression=codec, streams=STREAMS, beside="none", credentials=None
        )
        taken = []
        for index in range(2):
            workers.all(deadline_s=DEADLINE_S, do="fill")
            answers = workers.all(deadline_s=DEADLINE_S, do="round", index=index)
            assert {answer["engine"] for answer in answers} == {engine}
            taken.append([answer["extra_memory_bytes"] for answer in answers])
    result, sums = width * numel, 4 * numel // peers
    assert result <= min(taken[0])
    assert max(taken[0] + taken[1]) <= result + sums + 2 * (peers - 1) * STREAMS * MB
    if engine == "pump":
        assert max(taken[1]) < result / 2


@dataclass
class Job:
    """One peer of the round with a straggler."""

    engine: str
    codec: str
    numel: int
    initial_peers: tuple[str, ...] = ()


def train(job: Job, pipe: Connection) -> None:
    """Counts a sample, then brings the round about, or is between backward() and step() all the while."""
    if job.engine == "python":
        pump_engine.available = lambda: False
    params = [nn.Parameter(torch.zeros(job.numel // PARAMETERS)) for _ in range(PARAMETERS)]
    opt = CollaborativeOptimizer(
        torch.optim.SGD(params, lr=0.1),
        "straggler",
        5,
        1,
        initial_peers=job.initial_peers,
        compression=job.codec,
        streams=STREAMS,
        listen="127.0.0.1:0",
    )

    noise = [torch.randn(job.numel // PARAMETERS) for _ in params]  # gradients that do not compress

    def backward() -> None:
        torch.autograd.backward([param.view_as(param) for param in params], noise)

    pipe.send(opt.peer.address)
    pipe.recv()  # the others are there
    backward()
    opt.step()
    backward()
    before = peak_reset()
    pipe.send(opt.peer.engine_name)
    if pipe.recv() == "straggle":
        assert opt._training.wait_until_wanted(DEADLINE_S)
        opt.step()
        taken, kept = peak() - before, resident() - before
    else:
        taken = kept = 0
        deadline = time.monotonic() + DEADLINE_S
        while opt.epoch == 0 and time.monotonic() < deadline:
            opt.step()
            if opt.epoch == 0:
                backward()
    report = opt.last_report
    assert report is not None
    weights = {member.peer: member.weight for member in report.members}
    sent = sum(link.bytes_sent for link in report.links)
    pipe.send((opt.epoch, weights[report.peer], opt._training.samples(), sent, taken, kept))
    pipe.recv()
    opt.close(0.0)


@pytest.mark.parametrize(("engine", "codec", "width"), [("pump", "fp16", 2), ("python", "none", 4)])
def test_memory_of_a_straggler(engine: str, codec: str, width: int) -> None:
    """A peer that computes while the others average serves its part as they do. Beyond that, it holds the
    average in a second gradient while it applies it, and no longer.
    """
    if engine == "pump" and not native.available():
        pytest.skip("needs the native module")
    peers, numel = 3, 9_000_000  # vectors beyond what an allocator keeps when it is freed
    with Trainers() as trainers:
        for _ in range(peers):
            trainers.launch(train, Job(engine, codec, numel, tuple(trainers.addresses[:1])))
        for pipe in trainers.pipes:
            pipe.send("begin")
        assert {trainers.receive(rank, DEADLINE_S) for rank in range(peers)} == {engine}
        *punctual, straggler = trainers.pipes
        for pipe in punctual:
            pipe.send("average")
        ended = [trainers.receive(rank, DEADLINE_S) for rank in range(peers - 1)]
        straggler.send("straggle")
        ended.append(trainers.receive(peers - 1, DEADLINE_S))
        for pipe in trainers.pipes:
            pipe.send("end")
    assert [answer[0] for answer in ended] == [1] * peers
    weight, samples, sent, taken, kept = ended[-1][1:]
    result, sums, second = width * numel, 4 * numel // peers, 4 * numel
    chunks = 2 * (peers - 1) * STREAMS * MB
    assert (weight, samples) == (0.0, 2), "it was in the average, or lost its own sums"
    assert sent >= result * (peers - 1) // peers, "it did not serve its part"
    assert result + second <= taken <= result + sums + second + chunks
    assert kept <= result + sums + chunks, "the second gradient stays when it was applied"
