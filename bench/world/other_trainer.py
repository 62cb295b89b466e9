"""A peer of `bench.world.others`: a plain loop under p2pavg or under Hivemind, on the same model and data.

Its one argument is a JSON object, made by `others`. It imports nothing of p2pavg where Hivemind trains.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.world import model as world

# The optimizer; its address; the epoch where it stands; how many peers it sees.
Built = tuple[Any, str, Callable[[], int], Callable[[], int]]


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
        averaging_timeout=30.0,
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
    return opt, opt.peer.address, lambda: opt.epoch, lambda: len(opt.peers)


def _bootstrap(config: dict[str, Any]) -> None:
    """A Hivemind node that trains nothing."""
    import hivemind

    dht = hivemind.DHT(host_maddrs=[f"/ip4/0.0.0.0/tcp/{config['port']}"], startup_timeout=120.0, start=True)
    address = next(str(a) for a in dht.get_visible_maddrs() if config["host"] in str(a))
    print(json.dumps({"address": address}), flush=True)
    sys.stdin.read()
    dht.shutdown()


def _sha256(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Join, train until standard input ends, and write down every step."""
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if config["system"] == "hivemind" and config["bootstrap"]:
        _bootstrap(config)
        return
    model, text = world.build(), world.training()
    opt, address, epoch, peers = (_hivemind if config["system"] == "hivemind" else _p2pavg)(model, config)
    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    generator = torch.Generator().manual_seed(config["rank"])
    with Path(config["log"]).open("w", buffering=1) as log:

        def say(kind: str, **fields: Any) -> None:
            log.write(json.dumps({"t": kind, "at": time.monotonic(), **fields}) + "\n")

        say("up", address=address)
        print(json.dumps({"address": address}), flush=True)
        due, stood = time.monotonic(), epoch()
        while not ends.is_set():
            due = max(due + config["pace_s"], time.monotonic() - config["pace_s"])
            time.sleep(max(0.0, due - time.monotonic()))
            part = text[torch.randint(0, world.SAMPLES, (world.BATCH,), generator=generator)]
            model(input_ids=part, labels=part).loss.backward()
            begun = time.monotonic()
            opt.step()
            took = time.monotonic() - begun
            opt.zero_grad()
            say("step", seconds=round(took, 4), epoch=epoch())
            if epoch() != stood:
                stood = epoch()
                with opt.averaged() if config["system"] == "p2pavg" else torch.no_grad():
                    say("theta", epoch=stood, sha256=_sha256(model), peers=peers(), loss=world.loss(model))
        say("end", epoch=epoch(), loss=world.loss(model))


if __name__ == "__main__":
    main()
