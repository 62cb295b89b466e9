"""One p2pavg peer of `bench.kills`."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from p2pavg.bench.toy import Epoch, ToyTrainer
from p2pavg.peer.peer import Peer

STEPS = 5  # of each peer in an epoch


def main() -> int:
    config = json.loads(sys.stdin.buffer.readline())
    rendezvous = Path(tempfile.gettempdir()) / f"p2pavg-kills-{config['run']}"
    first = config["index"] == 0
    while not first and not rendezvous.exists():
        time.sleep(0.05)
    peer = Peer(
        "kills",
        initial_peers=[] if first else [rendezvous.read_text()],
        listen="127.0.0.1:0",
        compression="none",
    ).start()
    if first:
        partial = rendezvous.with_suffix(".partial")
        partial.write_text(peer.address)
        partial.rename(rendezvous)
    last = time.monotonic()

    def finished(epoch: Epoch) -> None:
        nonlocal last
        now = time.monotonic()
        members = sum(member.weight > 0 for member in epoch.report.members) if epoch.report else 0
        print(json.dumps({"members": members, "seconds": now - last}), flush=True)
        last = now

    trainer = ToyTrainer(
        peer,
        target=STEPS * config["peers"],
        step_seconds=config["step_seconds"] / STEPS,
        numel=8192,
        on_epoch=finished,
    )
    while True:
        trainer.step()


if __name__ == "__main__":
    sys.exit(main())
