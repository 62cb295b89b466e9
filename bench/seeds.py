"""How much the validation loss of the demo's model varies between seeds, in one process.

    python -m bench.seeds --json bench/results/seeds.json

Each seed draws other initial parameters and other samples; everything else is as in `make demo`, which
compares the swarm with one process, and calls them equal when they differ by no more than max - min of these.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from p2pavg.bench.options import positive_int
from p2pavg.bench.progress import progress
from p2pavg.bench.result import add_output_options, emit

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_lm.py"


def train(seed: int, words: list[str], log: Path) -> float:
    """Validation loss after training with this seed."""
    command = [sys.executable, str(EXAMPLE), "--alone", "--validate-every", "0", "--log", str(log), *words]
    command += ["--seed", str(1000 + seed), "--init-seed", str(seed)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(log.read_text().splitlines()[-1])["loss"]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=positive_int, default=5, help="how many")
    add_output_options(parser)
    args, words = parser.parse_known_args()  # the rest goes to train_lm.py

    losses = []
    with tempfile.TemporaryDirectory() as folder, progress("training", total=args.seeds) as advance:
        for seed in range(args.seeds):
            losses.append(train(seed, words, Path(folder, "log.jsonl")))
            advance(1)
    spread = max(losses) - min(losses)

    def draw(figure) -> None:
        axes = figure.subplots()
        axes.plot(range(args.seeds), losses, "o")
        axes.set(xlabel="seed", ylabel="validation loss, nats per byte", title=f"max - min = {spread:.4f}")

    lines = [f"seed {seed}: validation loss {loss:.4f}" for seed, loss in enumerate(losses)]
    emit(args, {"losses": losses, "spread": spread}, [*lines, f"max - min: {spread:.4f}"], draw)


if __name__ == "__main__":
    main()
