"""One PCCL process of `bench.versus`: its all-reduce of float32; the first process runs the master."""

from __future__ import annotations

import subprocess
import sys

import pccl
import torch
from lines import free_port, own_host, serve, timed

MASTER = "import sys, pccl; m = pccl.MasterNode(listen_address=sys.argv[1]); m.run()"


class Pccl:
    def start(self, config):
        torch.set_num_threads(1)
        self.index, self.peers = config["index"], config["peers"]
        address = config["address"]
        if not address:
            address = f"{own_host()}:{free_port()}"
            self.master = subprocess.Popen([sys.executable, "-c", MASTER, address])
        self.address = address
        generator = torch.Generator().manual_seed(7)
        self.base = torch.randn(config["numel"], generator=generator)
        self.vector = torch.empty_like(self.base)
        return {"address": address}

    def meet(self, command):
        self.communicator = pccl.Communicator(self.address, 0)
        self.communicator.connect(n_attempts=30)
        while self.communicator.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < self.peers:
            self.communicator.update_topology()

    def fill(self, command):
        torch.mul(self.base, self.index + 1, out=self.vector)

    def round(self, command):
        seconds, cpu = timed(self._average)
        error = (self.vector - (self.peers + 1) / 2 * self.base).abs().max().item()
        return {"seconds": seconds, "cpu_seconds": cpu, "max_abs_error": error}

    def _average(self):
        self.communicator.all_reduce(self.vector, self.vector, op=pccl.ReduceOp.AVG)


if __name__ == "__main__":
    worker = Pccl()
    serve({"start": worker.start, "meet": worker.meet, "fill": worker.fill, "round": worker.round})
