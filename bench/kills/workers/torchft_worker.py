"""One torchft replica of `bench.kills`: a manager for each process, and a lighthouse beside the first.

Needs `pip install torchft numpy`; give that Python with --torchft. The lighthouse lives in the process
that is not broken: nothing in torchft goes on without it. A step that fails is dropped, the next one tried.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

NUMEL = 8192


def main() -> int:
    config = json.loads(sys.stdin.buffer.readline())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs every step
    rendezvous = Path(tempfile.gettempdir()) / f"p2pavg-kills-{config['run']}"
    timeout = datetime.timedelta(seconds=config["timeout"])
    lighthouse = None
    if config["index"] == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
        partial = rendezvous.with_suffix(".partial")
        partial.write_text(lighthouse.address())
        partial.rename(rendezvous)
    while not rendezvous.exists():
        time.sleep(0.05)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=1,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=rendezvous.read_text(),
        replica_id=f"replica{config['index']}",
        hostname="localhost",
    )
    vector = torch.ones(NUMEL)
    last = time.monotonic()
    while True:
        time.sleep(config["step_seconds"])
        manager.start_quorum()
        manager.allreduce(vector.fill_(1.0)).wait()
        if not manager.should_commit():
            continue
        now = time.monotonic()
        print(json.dumps({"members": manager.num_participants(), "seconds": now - last}), flush=True)
        last = now


if __name__ == "__main__":
    sys.exit(main())
