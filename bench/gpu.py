"""The GPU story in one run: correctness first, then times. `python bench/gpu.py [--json PATH]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import gpu_kernels
from p2pavg import native
from p2pavg.bench import codec, codec_cuda, common


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--numel", type=int, default=1 << 28)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    if native.cuda() is None:
        print("No usable CUDA device, or p2pavg was built without its CUDA module.", file=sys.stderr)
        return 1
    for check in gpu_kernels.CHECKS:
        check()
        print(f"ok: {check.__doc__}", flush=True)
    result = {"environment": common.environment()}
    for name, measured in (
        ("cuda", codec_cuda.measure(args.numel, args.rounds)),
        ("cpu", codec.measure_cpu(1 << 26, 5)),
    ):
        result[name] = measured
        print(*codec.table(measured), sep="\n", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
