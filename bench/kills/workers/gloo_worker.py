"""One gloo process of `bench.kills`: when the group breaks, the survivors form another."""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

NUMEL = 8192


def main() -> int:
    config = json.loads(sys.stdin.buffer.readline())
    folder = Path(tempfile.gettempdir()) / f"p2pavg-kills-{config['run']}"
    folder.mkdir(exist_ok=True)
    index, members = config["index"], list(range(config["peers"]))
    timeout = datetime.timedelta(seconds=config["timeout"])
    generation, vector = 0, torch.ones(NUMEL)
    _form(folder, generation, members, index, timeout)
    last = time.monotonic()
    while True:
        time.sleep(config["step_seconds"])
        try:
            dist.all_reduce(vector.fill_(1.0))
        except RuntimeError:
            generation += 1
            members = _survivors(folder, generation, index, len(members) - 1)
            dist.destroy_process_group()
            _form(folder, generation, members, index, timeout)
            dist.all_reduce(vector.fill_(1.0))
        now = time.monotonic()
        print(json.dumps({"members": round(vector[0].item()), "seconds": now - last}), flush=True)
        last = now


def _form(folder: Path, generation: int, members: list[int], index: int, timeout: datetime.timedelta) -> None:
    store = dist.FileStore(str(folder / f"store{generation}"), len(members))
    dist.init_process_group(
        "gloo", store=store, rank=members.index(index), world_size=len(members), timeout=timeout
    )


def _survivors(folder: Path, generation: int, index: int, expected: int) -> list[int]:
    """Whoever lives says so with a file; all wait until as many as could be are there."""
    (folder / f"alive{generation}.{index}").touch()
    end = time.monotonic() + 60.0
    while True:
        there = sorted(int(path.suffix[1:]) for path in folder.glob(f"alive{generation}.*"))
        if len(there) >= expected or time.monotonic() > end:
            return there
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
