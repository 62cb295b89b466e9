"""One peer of `bench chaos`: trains without end and writes every event as a JSON line."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p2pavg.bench.toy import Epoch, ToyTrainer
from p2pavg.bench.workers import start_peer
from p2pavg.errors import P2PAvgError
from p2pavg.peer.peer import Peer
from p2pavg.transport.engine import JobProgress

COMMANDS = io.FileIO(0, closefd=False)  # unbuffered: the process may end while a thread reads
SAMPLE_S = 5.0
LOOK_S = 0.001  # between two looks at a transfer that is to be struck


class Chaos:
    """Trains until its input closes or its last epoch is applied."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._closing = False
        self._leaving = False
        self._going = threading.Event()  # where the parent says when to begin
        self._die_at = ""
        self._halt_at = ""
        self._over = threading.Event()
        self._saying = threading.Lock()
        self._own_samples = 0
        threading.Thread(target=self._watch_input, daemon=True).start()

    def run(self) -> None:
        """The whole life of the peer."""
        config = self.config
        peer = start_peer(config["run_id"], config, compression="none", **self.planned(), **config["own"])
        self.say("up", address=peer.address, peer=peer.peer_id.hex())
        trainer = ToyTrainer.of(peer, config, numel=config["numel"], on_epoch=self._epoch)
        self._watch_phases(peer)
        threading.Thread(target=self._watch_stages, args=(peer,), daemon=True).start()
        sampler = threading.Thread(target=self._sample, args=(peer,), daemon=True)
        sampler.start()
        self.say("joined", epoch=trainer.session.epoch)
        while trainer.session.epoch < config["epochs"] and not self._closing:
            start = time.monotonic()
            self._own_samples += 1
            trainer.step()
            seconds = time.monotonic() - start - config["step_seconds"]
            if seconds > 0.2:
                self.say("stall", seconds=seconds, epoch=trainer.session.epoch)
        self._halt_at = ""
        self._finished(trainer, peer)
        while not self._closing:  # other peers may still need this peer's state
            time.sleep(0.05)
        self._over.set()
        sampler.join()
        peer.close()
        self.say("closed")

    def planned(self) -> dict[str, Any]:
        """The options of a peer on which the plans of the rounds depend."""
        return {name: self.config[name] for name in ("plan", "region") if name in self.config}

    def say(self, kind: str, **fields: Any) -> None:
        """Write one event."""
        with self._saying:
            sys.stdout.write(json.dumps({"t": kind, "at": time.monotonic(), **fields}) + "\n")
            sys.stdout.flush()

    def _finished(self, trainer: ToyTrainer, peer: Peer) -> None:
        """Report the final counts. Samples that a heal discarded since the last report would be in the next
        report, but none follows; so they are read from the driver.
        """
        driver = peer._running().driver
        assert driver is not None
        _ = trainer.session.last_report  # the report is there once the loop has handled the last outcome
        lost = sum(samples for samples, _ in driver._discarded)
        self.say(
            "finished",
            counted=self._own_samples,
            pending=trainer.session.samples(),
            discarded=lost,
            history={made.epoch: made.lineage.hex() for made in driver.machine.history},
        )

    def _epoch(self, epoch: Epoch) -> None:
        report = epoch.report
        if report is None:
            return
        self.say(
            "epoch",
            epoch=epoch.epoch,
            late=epoch.late,
            seconds_in_step=epoch.seconds_in_step,
            result=epoch.result,
            parameters=epoch.parameters,
            wrong=epoch.wrong,
            lineage=report.lineage,
            members={m.peer: m.samples for m in report.members if m.weight > 0},
            samples=report.samples,
            local_samples=report.local_samples,
            counted=self._own_samples,
            pending=epoch.samples,
            discarded=report.samples_discarded,
            why=report.discarded_why,
            attempts=report.attempts,
            causes=report.causes,
            leader=report.leader,
        )

    def _watch_input(self) -> None:
        for line in COMMANDS:
            told = json.loads(line)
            self._die_at = told.get("die_at", self._die_at)
            self._halt_at = told.get("halt_at", self._halt_at)
            self._leaving |= "leave" in told
            if "go" in told:
                self._going.set()
        self._closing = True
        self._going.set()

    def _watch_phases(self, peer: Peer) -> None:
        """Kill this process while it leads, at the phase of a round that the parent has named."""
        driver = peer._running().driver
        assert driver is not None
        told = driver.recorder.on_trace

        def on_trace(kind: str, fields: Mapping[str, Any]) -> None:
            told(kind, fields)
            if kind == self._die_at and driver.machine.leader == peer.peer_id:
                self.say("dies", phase=kind)
                os.kill(os.getpid(), signal.SIGKILL)

        driver.recorder.on_trace = on_trace

    def _watch_stages(self, peer: Peer) -> None:
        """Stop this process once a transfer is at the stage that the parent has named, which then kills it,
        cuts it off, or lets it go on later.
        """
        driver = peer._running().driver
        assert driver is not None
        while not self._over.wait(LOOK_S if self._halt_at else 0.05):
            held = driver.machine.core.holding if self._halt_at else None
            if held is None or not held.begun:
                continue
            try:
                moved = driver._jobs.progress(held.transfer)
            except (KeyError, ValueError):  # it has just ended
                continue
            if self._halt_at in stages(moved, held.plan.groups, held.rank):
                self.say("halts", stage=self._halt_at)
                self._halt_at = ""
                os.kill(os.getpid(), signal.SIGSTOP)

    def _sample(self, peer: Peer) -> None:
        """Write, every few seconds, the figures that would show a leak."""
        while not self._over.wait(SAMPLE_S):
            status = Path("/proc/self/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            self.say(
                "usage",
                descriptors=len(os.listdir("/proc/self/fd")),
                threads=int(fields["Threads"]),
                rss_kib=int(fields["VmRSS"].split()[0]),
                cpu_s=peer.cpu_seconds(),
                dht_records=len(peer._running().dht.node.store),
            )


def stages(moved: JobProgress, groups: Sequence[int], rank: int) -> set[str]:
    """Which of STAGES a member's transfer has come to. groups: of the plan; empty: each is its own."""
    came = [other for other, chunks in enumerate(moved.contributions_received) if chunks]
    near = {other for other in came if groups and groups[other] == groups[rank]}
    found = {"contributions"} if near else set()
    if len(near) < len(came):
        found.add("means")
    if any(moved.results_received):
        found.add("results")
    return found


def main(kind: type[Chaos] = Chaos) -> int:
    """The configuration is the first line of the input."""
    chaos = kind(json.loads(COMMANDS.readline()))
    try:
        chaos.run()
    except P2PAvgError as error:
        chaos.say("error", raised=type(error).__name__, error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
