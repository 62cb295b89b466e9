"""A peer of `bench.world.others`: a plain loop under p2pavg, Hivemind or torchft, on the same model and data.

Its one argument is a JSON object, made by `others`. It imports nothing of p2pavg where another trains.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from bench.world import model as world

# The optimizer; its address; the epoch where it stands; how many peers its last average had, or that it sees.
Built = tuple[Any, str, Callable[[], int], Callable[[], int]]
TIMEOUT_S = 30.0  # of an average of others


def _hivemind(model: torch.nn.Module, config: dict[str, Any]) -> Built:
    import hivemind

    dht = hivemind.DHT(
        initial_peers=config["initial_peers"],
        host_maddrs=[f"/ip4/0.0.0.0/tcp/{config['port']}"],
        client_mode=not config["public"],  # as its documentation says of peers that nobody can dial
        startup_timeout=120.0,
        start=True,
    )
    opt = hivemind.Optimizer(
        dht=dht,
        run_id="world",
        batch_size_per_step=world.BATCH,
        target_batch_size=config["target"],
        params=model.parameters(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=world.LEARNING_RATE),
        use_local_updates=True,  # each peer steps, and parameters are averaged: its nearest to outer steps
        matchmaking_time=5.0,
        averaging_timeout=TIMEOUT_S,
        state_averaging_compression=hivemind.compression.Float16Compression(),
        client_mode=not config["public"],
        verbose=True,
    )
    address = next((str(a) for a in dht.get_visible_maddrs() if config["host"] in str(a)), "")
    return opt, address, lambda: opt.local_epoch, lambda: opt.tracker.global_progress.num_peers


def _p2pavg(model: torch.nn.Module, config: dict[str, Any]) -> Built:
    from p2pavg import CollaborativeOptimizer, Outer

    opt = CollaborativeOptimizer(
        torch.optim.AdamW(model.parameters(), lr=world.LEARNING_RATE),
        "world",
        config["target"],
        world.BATCH,
        initial_peers=config["initial_peers"],
        listen=f"0.0.0.0:{config['port']}",
        compression="int4",
        outer=Outer(lr=0.7, momentum=0.9, overlap=config["overlap"]),
    )

    def members() -> int:
        return len(opt.last_report.members) if opt.last_report else 0

    return opt, opt.peer.address, lambda: opt.epoch, members


def _torchft(model: torch.nn.Module, config: dict[str, Any]) -> Built:
    """Its DiLoCo. It counts each peer's own steps, so slow ones are told fewer, to be there together."""
    from torchft.local_sgd import DiLoCo

    from bench.outer_beside.workers.managed import managed

    host = config["host"]
    socket.gethostname = lambda: str(host)  # under this name others fetch a state from it
    os.environ["GLOO_SOCKET_IFNAME"] = config["interface"]
    inner = torch.optim.AdamW(model.parameters(), lr=world.LEARNING_RATE)
    manager, store = managed(model, inner, host, config["initial_peers"][0], config["rank"], TIMEOUT_S)
    manager.store = store  # whose server ends with the object
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    DiLoCo(manager, [model], inner, outer, sync_every=config["every"]).__enter__()
    return inner, f"{host}:{store.port}", manager.current_step, manager.num_participants


BUILD = {"hivemind": _hivemind, "p2pavg": _p2pavg, "torchft": _torchft}


def _bootstrap(config: dict[str, Any]) -> tuple[str, Any]:
    """What trains nothing, and its address: a Hivemind node, or torchft's lighthouse."""
    if config["system"] == "torchft":
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind=f"0.0.0.0:{config['port']}", min_replicas=1, join_timeout_ms=1000)
        return f"http://{config['host']}:{config['port']}", server
    import hivemind

    dht = hivemind.DHT(host_maddrs=[f"/ip4/0.0.0.0/tcp/{config['port']}"], startup_timeout=120.0, start=True)
    return next(str(a) for a in dht.get_visible_maddrs() if config["host"] in str(a)), dht


def main() -> None:
    """Join, train until standard input ends, and write down every step."""
    config = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print

    def reached(address: str) -> None:
        print(json.dumps({"address": address}), file=out, flush=True)

    torch.set_num_threads(1)
    if config["bootstrap"]:
        address, kept = _bootstrap(config)
        reached(address)
        sys.stdin.read()
        kept.shutdown()
        return
    model, text = world.build(), world.training()
    opt, address, epoch, peers = BUILD[config["system"]](model, config)
    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    generator = torch.Generator().manual_seed(config["rank"])
    with Path(config["log"]).open("w", buffering=1) as log:

        def say(kind: str, **fields: Any) -> None:
            log.write(json.dumps({"t": kind, "at": time.monotonic(), **fields}) + "\n")

        def averaged() -> AbstractContextManager[Any]:
            return opt.averaged() if config["system"] == "p2pavg" else nullcontext()

        say("up", address=address)
        reached(address)
        due, stood = time.monotonic(), epoch()
        while not ends.is_set():
            due = max(due + config["pace_s"], time.monotonic() - config["pace_s"])
            time.sleep(max(0.0, due - time.monotonic()))
            part = text[torch.randint(0, world.SAMPLES, (world.BATCH,), generator=generator)]
            model(input_ids=part, labels=part).loss.backward()
            begun = time.monotonic()
            try:
                opt.step()
            except Exception as error:  # what its loop would have to live with
                say("failed", why=f"{type(error).__name__}: {error}".splitlines()[0][:200])
            took = time.monotonic() - begun
            opt.zero_grad()
            say("step", seconds=round(took, 4), epoch=epoch())
            if epoch() != stood:
                stood = epoch()
                with averaged():
                    say(
                        "theta",
                        epoch=stood,
                        sha256=world.sha256(model),
                        peers=peers(),
                        loss=world.loss(model),
                    )
        say("end", epoch=epoch(), loss=world.loss(model))


if __name__ == "__main__":
    main()
