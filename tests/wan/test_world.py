"""Six peers of strangers through what the internet does, judged by a checker that knows nothing of p2pavg."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINUTES = 5

pytestmark = [pytest.mark.long, pytest.mark.timeout(60 * MINUTES + 900)]


@pytest.mark.parametrize(
    ("script", "needs"), [("--fault-every=20", "transformers"), ("--lightning", "lightning")]
)
def test_no_promise_is_broken(script: str, needs: str, tmp_path: Path) -> None:
    """Whatever befalls the peers: equal bits, each index once, nobody hangs, nobody ends by itself."""
    pytest.importorskip(needs)
    argv = [
        sys.executable,
        "-m",
        "bench.world",
        f"--minutes={MINUTES}",
        "--no-replay",
        f"--out={tmp_path}/world",
    ]
    subprocess.run([*argv, script], cwd=ROOT, check=False)
    verdict = json.loads((tmp_path / "world" / "verdict.json").read_text())
    assert verdict["broken"] == []
    assert verdict["averages"] >= MINUTES
    assert verdict["faults"] >= MINUTES
