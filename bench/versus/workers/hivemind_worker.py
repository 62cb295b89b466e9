"""One Hivemind process of `bench.versus`: its DecentralizedAverager with float16 compression."""

from __future__ import annotations

import time

import hivemind
import torch
from lines import children_cpu_seconds, own_host, serve, timed


class Hivemind:
    def start(self, config):
        torch.set_num_threads(1)
        self.index, self.peers = config["index"], config["peers"]
        self.dht = hivemind.DHT(
            initial_peers=[config["address"]] if config["address"] else [],
            host_maddrs=[f"/ip4/{own_host()}/tcp/0"],
            start=True,
        )
        generator = torch.Generator().manual_seed(7)
        self.base = torch.randn(config["numel"], generator=generator)
        self.averager = hivemind.averaging.DecentralizedAverager(
            [torch.empty_like(self.base)],
            self.dht,
            prefix="versus",
            target_group_size=self.peers,
            min_group_size=self.peers,
            compression=hivemind.compression.Float16Compression(),
            start=True,
        )
        return {"address": str(self.dht.get_visible_maddrs()[0])}

    def meet(self, command):
        time.sleep(1.0)  # its table settles

    def fill(self, command):
        with self.averager.get_tensors() as tensors:
            torch.mul(self.base, self.index + 1, out=tensors[0])

    def round(self, command):
        before = children_cpu_seconds()
        seconds, cpu = timed(lambda: self.averager.step(timeout=300))
        cpu += children_cpu_seconds() - before
        with self.averager.get_tensors() as tensors:
            error = (tensors[0] - (self.peers + 1) / 2 * self.base).abs().max().item()
        return {"seconds": seconds, "cpu_seconds": cpu, "max_abs_error": error}


if __name__ == "__main__":
    worker = Hivemind()
    serve({"start": worker.start, "meet": worker.meet, "fill": worker.fill, "round": worker.round})
