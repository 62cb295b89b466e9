"""The wheel of p2pavg that a launch carries to other machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import p2pavg
from p2pavg.errors import ConfigurationError, P2PAvgError

BUILD_S = 600.0


def made(folder: Path) -> Path:
    """Build a wheel into `folder`, of the clone that this package runs from, or that is the current
    directory.
    Raises ConfigurationError where there is no clone, P2PAvgError when the build fails.
    """
    roots = (Path(p2pavg.__file__).resolve().parents[1], Path.cwd())
    root = next((root for root in roots if (root / "csrc" / "pump").is_dir()), None)
    if root is None:
        raise ConfigurationError(
            "there are no sources of p2pavg here: start this command in a clone, name a wheel with wheel=, "
            "or set install = false where it is installed already"
        )
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "--wheel-dir", str(folder), str(root)],
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise P2PAvgError(f"the wheel was not built in {BUILD_S:.0f} s") from None
    wheels = sorted(folder.glob("p2pavg-*.whl"), key=lambda path: path.stat().st_mtime)
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise P2PAvgError(f"the wheel cannot be built ({last}); 'make wheel' says more")
    return wheels[-1]
