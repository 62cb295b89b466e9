"""The web page of the run, as a browser shows it at some moments."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from bench.world import who
from p2pavg.lab import Lab

WEB = "127.0.0.1:8033"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LOADS_MS = 6000  # until the page has its first figures
ENDS_S = 20.0  # in which a browser ends


class Camera:
    """A monitor beside the bootstrap peer, and a browser that looks at its page."""

    def __init__(self, lab: Lab, folder: Path, env: dict[str, str], way_in: str) -> None:
        self._lab, self._folder, self._env = lab, folder, env
        self.shots: list[str] = []
        self._browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
        self._shooting: list[subprocess.Popen[bytes]] = []
        if self._browser is not None:
            self._argv = [sys.executable, "-m", "p2pavg", "monitor", who.RUN, "--web", WEB]
            self._argv += ["--initial-peers", way_in]

    def begin(self) -> None:
        """Look on from now on."""
        if self._browser is not None:
            self._spawn(self._argv, "monitor")

    def shoot(self) -> None:
        """One picture, a few seconds from now; nobody waits for it."""
        if self._browser is None:
            return
        name = f"page{len(self.shots) + 1}.png"
        self.shots.append(name)
        argv = [self._browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        argv += ["--window-size=1200,1500", f"--timeout={LOADS_MS}"]
        argv += [f"--screenshot={self._folder / name}", f"http://{WEB}/"]
        self._shooting.append(self._spawn(argv, "browser"))

    def end(self) -> None:
        """Wait for the last picture."""
        for browser in self._shooting:
            with suppress(subprocess.TimeoutExpired):
                browser.wait(ENDS_S)

    def _spawn(self, argv: list[str], name: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return self._lab.spawn(
                who.BOOTSTRAP, argv, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
