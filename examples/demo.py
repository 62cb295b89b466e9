"""What p2pavg does, in two minutes: `make demo`.

Three processes that know nothing but the address of a DHT node find each other and train a language model
together. Half-way one of them is killed with SIGKILL; later a new one joins, downloads the state and
contributes. Then one process trains the same model alone, on the same batches, for comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo_story import FIRST, NEWCOMER, VICTIM, Failure, Follower, Story
from demo_view import View, best_view, draw

from p2pavg.printable import ending

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "examples" / "train_lm.py"
SPREAD = ROOT / "bench" / "results" / "seeds.json"
KILL_AT, JOIN_AT = 0.45, 0.55  # of the epochs


class Processes:
    """The demo's own processes; all that still run are killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "P2PAVG_REPORTS": str(self.folder / f"{name}.reports.jsonl"),
        }
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        with open(self.folder / f"{name}.stderr.txt", "w") as errors:
            process = subprocess.Popen(
                [sys.executable, *command], env=env, stderr=errors, text=True, cwd=ROOT, **options
            )
        self.running[name] = process
        return process

    def train(self, name: str, *words: str) -> Follower:
        log = self.folder / f"{name}.jsonl"
        with open(self.folder / f"{name}.txt", "w") as out:
            self.start(name, [str(TRAIN), "--log", str(log), *words], stdin=subprocess.PIPE, stdout=out)
        return Follower(name, log)

    def press_enter(self, name: str) -> None:
        stdin = self.running[name].stdin
        assert stdin is not None
        print(file=stdin, flush=True)

    def check(self, name: str) -> bool:
        """Whether the process still runs; raises Failure when it ended badly."""
        code = self.running[name].poll()
        if code:
            errors = (self.folder / f"{name}.stderr.txt").read_text().strip().splitlines()
            raise Failure(f"{name} {ending(code)}: {errors[-1] if errors else 'no message'}")
        return code is None

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for name in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                self.kill(name)


def bootstrap(processes: Processes) -> str:
    """Start a node that only keeps the DHT; returns its address."""
    command = ["-m", "p2pavg", "bootstrap", "--listen", "127.0.0.1:0"]
    command += ["--identity", str(processes.folder / "bootstrap.key")]
    process = processes.start("bootstrap", command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        process.wait()
        processes.check("bootstrap")
    return address


def ticks(seconds: float) -> Iterator[None]:
    """Ten times a second, until it has taken too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.1)
    raise Failure(f"the demo did not end within {seconds:.0f} seconds")


def train_swarm(processes: Processes, story: Story, view: View, words: list[str], limit: float) -> None:
    """Three peers, one killed half-way, one that joins later, until the last epoch."""
    address = bootstrap(processes)
    words = [*words, "--run-id", story.run_id, "--initial-peers", address, "--listen", "127.0.0.1:0"]
    story.say(f"three processes start; all they know is the DHT node {address}")
    for number, name in enumerate((FIRST, "bob", VICTIM)):
        every = [] if name == FIRST else ["--validate-every", "0"]
        story.follow(processes.train(name, *words, "--seed", str(number), *every))
    newcomer = processes.train(NEWCOMER, *words, "--seed", "3", "--validate-every", "0", "--on-enter")
    for _ in ticks(limit):
        story.read()
        epoch = story.epoch
        if VICTIM in story.alive and epoch >= KILL_AT * story.epochs:
            processes.kill(VICTIM)
            story.killed(VICTIM)
        if NEWCOMER not in story.followers and epoch >= JOIN_AT * story.epochs:
            processes.press_enter(NEWCOMER)
            story.follow(newcomer)
            story.say(f"{NEWCOMER} joins; all she knows is the same DHT node")
        view.refresh(story)
        running = [name for name in story.alive if processes.check(name)]
        if not running:
            break
    story.read()


def train_alone(processes: Processes, story: Story, view: View, words: list[str], limit: float) -> None:
    """The reference: one process, with the same samples in each epoch's batch."""
    story.say("one process now trains the same model alone, on the same batches")
    plan = processes.folder / "plan.json"
    plan.write_text(json.dumps(story.plan(processes.folder / f"{FIRST}.reports.jsonl")))
    story.alone = processes.train("alone", "--alone", *words, "--seed", "0", "--plan", str(plan))
    for _ in ticks(limit):
        story.read()
        view.refresh(story)
        if not processes.check("alone"):
            break
    story.read()


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--target-batch-size", type=int, default=256)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="give up after")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)

    words = ["--epochs", str(args.epochs), "--target-batch-size", str(args.target_batch_size)]
    story = Story(f"demo-{os.getpid()}", args.epochs)
    processes = Processes(args.out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are ended then, too
    started = time.monotonic()
    try:
        with best_view() as view:
            train_swarm(processes, story, view, words, args.limit)
            train_alone(processes, story, view, words, args.limit)
        spread = json.loads(SPREAD.read_text())["spread"] if SPREAD.exists() else None
        summary = story.summary(spread) | {"seconds": time.monotonic() - started}
    except Failure as failure:
        print(f"demo: {failure}; see {args.out}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        processes.close()
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(story, args.out / "demo.png")
    print("\n".join(story.closing(summary)))
    print(f"Picture: {args.out / 'demo.png'}")
    return 1 if summary["doubts"] else 0


if __name__ == "__main__":
    sys.exit(main())
