"""Python processes as a person starts them in a terminal."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Condition, Thread
from typing import Any

ROOT = Path(__file__).parents[2]
LINE_S = 120.0  # until a line is printed that a test waits for
LM = ("--listen", "127.0.0.1:0", "--target-batch-size", "64", "--epochs", "40", "--validation-windows", "64")


class Script:
    """`python WORDS`. Its output is read all the time, so that it never waits for a reader."""

    def __init__(
        self, *words: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, stdin: int | None = None
    ) -> None:
        """stdin: a file descriptor; None: an empty one."""
        self.words = words
        self.lines: list[str] = []
        self._read = 0
        self._news = Condition()
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | dict(env or {}),
            text=True,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = Thread(target=self._follow, daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def line_with(self, words: str) -> str:
        """The next line that contains `words`."""
        end = time.monotonic() + LINE_S
        with self._news:
            while True:
                while self._read < len(self.lines):
                    self._read += 1
                    if words in self.lines[self._read - 1]:
                        return self.lines[self._read - 1].strip()
                if not self._reader.is_alive() or time.monotonic() > end:
                    raise AssertionError(f"{words!r} never came:\n{''.join(self.lines)}")
                self._news.wait(1.0)

    def skip(self) -> None:
        """Wait with `line_with` for what is said from now on."""
        with self._news:
            self._read = len(self.lines)

    def rest(self) -> str:
        """All its output, when it has ended by itself."""
        self.process.wait()
        self._reader.join()
        return "".join(self.lines)

    def end(self) -> str:
        """All its output, of a script that must end well."""
        output = self.rest()
        assert self.process.returncode == 0, output
        return output

    def interrupt(self) -> str:
        """Ctrl-C; all its output."""
        self.process.send_signal(signal.SIGINT)
        return self.rest()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Terminal:
    """Starts scripts; whatever still runs at the end is killed."""

    def __init__(self) -> None:
        self._scripts: list[Script] = []

    def __call__(self, *words: str, **options: Any) -> Script:
        """options: those of Script."""
        self._scripts.append(Script(*words, **options))
        return self._scripts[-1]

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        for script in self._scripts:
            script.kill()


def write_shards(folder: Path, name: str, count: int, images: int = 30) -> None:
    """Tar shards NAME-000.tar and on, of small pictures in three colours, their classes."""
    from PIL import Image

    draw = random.Random(0)
    for shard in range(count):
        with tarfile.open(folder / f"{name}-{shard:03d}.tar", "w") as tar:
            for number in range(images):
                label = draw.randrange(3)
                colour = [40 + draw.randrange(30) + 120 * (channel == label) for channel in range(3)]
                picture = io.BytesIO()
                Image.new("RGB", (8, 8), tuple(colour)).save(picture, "png")
                for suffix, data in (("png", picture.getvalue()), ("cls", str(label).encode())):
                    info = tarfile.TarInfo(f"{shard:03d}{number:04d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
