"""The GPU story in one run: correctness first, then times. `python -m bench.gpu --out DIR --budget 540`.

Every section runs whatever became of the others; DIR/gpu.json is written after each. Where Hivemind is
installed, the three models train under it too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from p2pavg import native
from p2pavg.bench.machine import environment

ROOT = Path(__file__).resolve().parents[2]
MICROBATCHES = 10  # per block of local training
HIVEMIND = ("resnet152", "xlmr_large", "convnext_large")
Section = Callable[[float], Any]


class Story:
    """Runs sections within a budget, and keeps what they found."""

    def __init__(self, out: Path, end: float, resumed: bool) -> None:
        self._path = out / "gpu.json"
        self.end = end  # time.time()
        self.found: dict[str, Any] = {"environment": environment(), "sections": {}}
        if resumed:
            self.found = json.loads(self._path.read_text())

    @property
    def failed(self) -> int:
        return sum("error" in entry for entry in self.found["sections"].values())

    @property
    def left(self) -> float:
        return self.end - time.time()

    def section(self, name: str, needs_s: float, work: Section) -> None:
        """work(seconds that are left) -> its findings. Skipped when less than `needs_s` is left."""
        begun = time.monotonic()
        entry: dict[str, Any] = {}
        if self.left < needs_s:
            entry["skipped"] = f"needs {needs_s:.0f} s, {self.left:.0f} s are left"
        else:
            try:
                entry["found"] = work(self.left)
            except BaseException as error:
                entry["error"] = f"{type(error).__name__}: {error}"[:2000]
                entry["where"] = traceback.format_exc()[-3000:]
        entry["seconds"] = round(time.monotonic() - begun, 2)
        self.found["sections"][name] = entry
        self._path.write_text(json.dumps(self.found, indent=1, default=str) + "\n")
        state = "error" if "error" in entry else "skipped" if "skipped" in entry else "ok"
        print(f"{state}: {name} ({entry['seconds']:.1f} s)", flush=True)
        if state != "ok":
            print("   ", entry.get("error") or entry["skipped"], flush=True)
        elif isinstance(entry["found"], dict):
            print("   ", _short(entry["found"]), flush=True)


def _short(found: dict[str, Any]) -> str:
    plain = {k: v for k, v in found.items() if not isinstance(v, list)}
    text = json.dumps(plain, default=lambda value: str(value)[:80])
    return text if len(text) <= 900 else text[:900] + " ..."


def tests(left: float) -> dict[str, Any]:
    """The tests that need a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--timeout=100"]
    files = ["tests/unit/optim/test_gpu.py"]
    done = subprocess.run(
        command + files, cwd=ROOT, capture_output=True, text=True, timeout=min(left, 150), check=False
    )
    if done.returncode:
        raise AssertionError(done.stdout[-2500:] + done.stderr[-500:])
    return {"tail": done.stdout.splitlines()[-1:]}


def kernels(left: float) -> dict[str, Any]:
    """Every kernel against the CPU's bits or float64."""
    from bench.gpu.kernels import CHECKS

    found = {}
    for check in CHECKS:
        begun = time.monotonic()
        check()
        found[check.__name__] = round(time.monotonic() - begun, 2)
    return found


def kernel_rates(left: float) -> dict[str, Any]:
    """Kernels beside a device copy, and the way to the host beside a pinned copy."""
    from p2pavg.bench.codec import cuda

    found: dict[str, Any] = cuda.measure(1 << 28, 7)
    return found


def model(name: str, scaled: bool, pairs: int, seconds: float) -> Section:
    def work(left: float) -> dict[str, Any]:
        from bench.gpu import models

        until = time.monotonic() + min(seconds, left - 20)
        job = models.MODELS[name]()
        try:
            found = models.measure(job, MICROBATCHES, pairs, scaled, until)
            if not scaled:
                found["boundary"] = models.boundary(job)
            return found
        finally:
            del job
            models.forget()

    return work


def hivemind(name: str, pairs: int, seconds: float) -> Section:
    """The same loop under Hivemind, in the default way and in the one that accumulates in `.grad`."""

    def work(left: float) -> dict[str, Any]:
        from bench.gpu import models

        job = models.MODELS[name]()
        found = {}
        try:
            for key, reuse, share in (("own_buffers", False, 0.7), ("reuse_grad_buffers", True, 0.3)):
                until = time.monotonic() + share * min(seconds, left - 20)
                found[key] = models.measure_hivemind(job, MICROBATCHES, pairs, reuse, until)
            return found
        finally:
            del job
            models.forget()

    return work


def usable() -> bool:
    """Whether the device still works in this process: after some errors it does not."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="results go there")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all")
    parser.add_argument("--only", nargs="*", default=None, help="sections whose names begin so")
    parser.add_argument("--resume", nargs=2, help=argparse.SUPPRESS)  # the last section, and when to end
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if native.cuda() is None:
        print("No usable CUDA device, or p2pavg was built without its CUDA module.", file=sys.stderr)
        return 1
    import torch

    from bench.gpu import pair, path

    torch.backends.cudnn.benchmark = True
    end = float(args.resume[1]) if args.resume else time.time() + args.budget
    story = Story(args.out, end, bool(args.resume))
    sections: list[tuple[str, float, Section]] = [("kernels", 20, kernels)]
    sections += [(f"path {it.__name__}", 15, lambda left, it=it: it()) for it in path.CHECKS]
    sections += [
        ("tests", 30, tests),
        ("pair exact", 60, lambda left: pair.check_exact()),
        ("model resnet152", 30, model("resnet152", False, 20, 70)),
        ("model xlmr_large", 30, model("xlmr_large", False, 20, 70)),
        ("model convnext_large", 30, model("convnext_large", False, 20, 70)),
        *((f"hivemind {name}", 30, hivemind(name, 20, 45)) for name in HIVEMIND),
        ("pair together", 120, lambda left: pair.together(min(250.0, left - 5))),
        ("model resnet152 scaled", 25, model("resnet152", True, 40, 110)),
        ("kernel rates", 25, kernel_rates),
    ]
    if find_spec("hivemind") is None:
        sections = [one for one in sections if not one[0].startswith("hivemind")]
    names = [name for name, _, _ in sections]
    done = names.index(args.resume[0]) + 1 if args.resume else 0
    for name, needs, work in sections[done:]:
        if args.only is not None and not any(name.startswith(wanted) for wanted in args.only):
            continue
        story.section(name, needs, work)
        if not usable():
            command = [sys.executable, "-m", "bench.gpu", *sys.argv[1:]]
            command = command[: command.index("--resume")] if args.resume else command
            os.execv(sys.executable, [*command, "--resume", name, str(story.end)])
    print(f"{story.failed} sections failed; {story.left:.0f} s of the budget are left")
    return 0 if story.failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
