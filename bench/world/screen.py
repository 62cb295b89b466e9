"""The web page of the run, as a browser shows it at some moments.

`python -m bench.world.screen BROWSER URL PATH` takes one picture; it needs playwright.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from bench.world import who
from p2pavg.lab import Lab

WEB = "127.0.0.1:8033"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LOADS_MS = 30_000  # until the page has its figures and its charts
DRAWN = """() => document.querySelectorAll("#peers tbody tr").length > 0
    && [...document.querySelectorAll("#charts path.line")].some((line) => line.getAttribute("d"))"""
ENDS_S = 45.0  # in which a browser ends


class Camera:
    """A monitor beside the bootstrap peer, and a browser that looks at its page."""

    def __init__(self, lab: Lab, folder: Path, env: dict[str, str], way_in: str) -> None:
        self._lab, self._folder, self._env = lab, folder, env
        self.shots: list[str] = []
        has_driver = importlib.util.find_spec("playwright") is not None
        found = next((found for name in BROWSERS if (found := shutil.which(name))), None)
        self._browser = found if has_driver else None
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
        argv = [sys.executable, "-m", "bench.world.screen", self._browser]
        argv += [f"http://{WEB}/", str(self._folder / name)]
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


def photograph(browser: str, url: str, path: str) -> None:
    """Open the page, wait until its charts are drawn, and write a picture of it; of what there is, when that
    takes long.
    """
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 1200, "height": 1500})
        page.goto(url, wait_until="domcontentloaded")
        with suppress(Error):
            page.wait_for_function(DRAWN, timeout=LOADS_MS)
        page.screenshot(path=path)
        chromium.close()


if __name__ == "__main__":
    photograph(*sys.argv[1:])
