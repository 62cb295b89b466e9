from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.cold  # all of it as a person starts it
def test_demo_shows_what_it_promises(tmp_path):
    """The demo, for a third of its epochs: a kill, a newcomer, equal bits, and the loss of one process within
    the spread of five seeds.
    """
    out = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(out), "--epochs", "40"],
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["doubts"] == []
    assert summary["difference"] <= summary["seed_spread"]
    assert len(set(summary["digests"].values())) == 1
    assert set(summary["digests"]) == {"ada", "bob", "dora"}
    assert 0.4 <= summary["killed_in_epoch"] / summary["epochs"] <= 0.6
    assert summary["samples"]["dora"] > 0
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    for words in ("cleo is killed with SIGKILL", "has downloaded the state", "Shown: three processes"):
        assert words in done.stdout
