"""One gloo process of `bench.versus`: all_reduce of float32, or DDP's fp16 compression around it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from lines import interface_of, own_host, serve, timed


class Gloo:
    def start(self, config):
        self.config = config
        torch.set_num_threads(1)
        self.index, self.peers, self.half = config["index"], config["peers"], config["half"]
        first = not config["address"]
        host, port = (own_host(), 0) if first else config["address"].rsplit(":", 1)
        self.store = dist.TCPStore(host, int(port), self.peers, is_master=first, wait_for_workers=False)
        address = f"{host}:{self.store.port}"
        generator = torch.Generator().manual_seed(7)
        self.base = torch.randn(config["numel"], generator=generator)
        self.vector = torch.empty_like(self.base)
        return {"address": address}

    def meet(self, command):
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(own_host())
        dist.init_process_group("gloo", store=self.store, rank=self.index, world_size=self.peers)

    def fill(self, command):
        torch.mul(self.base, self.index + 1, out=self.vector)

    def round(self, command):
        seconds, cpu = timed(self._average)
        expected = (self.peers + 1) / 2
        error = (self.vector - expected * self.base).abs().max().item()
        return {"seconds": seconds, "cpu_seconds": cpu, "max_abs_error": error}

    def _average(self):
        if self.half:
            small = self.vector.to(torch.float16).div_(self.peers)
            dist.all_reduce(small)
            self.vector.copy_(small)
        else:
            dist.all_reduce(self.vector)
            self.vector.div_(self.peers)


if __name__ == "__main__":
    worker = Gloo()
    serve({"start": worker.start, "meet": worker.meet, "fill": worker.fill, "round": worker.round})
