"""pip's own options on other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from p2pavg.launch import pip

OPTIONS = {
    "extra-index-url": ["https://a.example/simple", "https://b.example/simple"],
    "timeout": 7,
    "no-compile": True,
    "index-url": "https://me:p%40ss@c.example/simple",
}


def listed(environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_pip_reads_what_is_written(tmp_path: Path) -> None:
    """As a file: several addresses, numbers, words for yes and no, and signs that need escapes elsewhere."""
    (tmp_path / "pip.conf").write_text(pip.configuration(OPTIONS))
    told = listed({"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")})
    assert "global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'" in told
    assert "global.timeout='7'" in told
    assert "global.no-compile='true'" in told
    assert "global.index-url='https://me:p%40ss@c.example/simple'" in told


def test_pip_reads_the_variables() -> None:
    """The same, where no file can be laid."""
    told = listed(pip.environment(OPTIONS))
    assert ":env:.extra-index-url='https://a.example/simple https://b.example/simple'" in told
    assert ":env:.no-compile='true'" in told
    assert ":env:.timeout='7'" in told
