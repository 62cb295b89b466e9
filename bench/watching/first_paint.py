"""How soon a browser paints a run: `python -m bench.watching.first_paint [--times 15] [--json PATH]`.

Three peers train, a monitor serves their page on loopback, and headless Chromium opens that page so many
times, each time with nothing kept from before. The browser itself says when it painted first (the page's
frame) and when it painted content first, since the address was entered; `table_ms` is when the rows of the
peers stood there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from p2pavg.bench.machine import environment
from p2pavg.bench.workers import Workers
from p2pavg.errors import P2PAvgError

RUN = "bench-rounds"
BAR_MS = 200.0
PEERS = 3
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# The browser tells when it painted, in milliseconds since the navigation began; the rows come by the events.
PAINTED = """() => new Promise((done) => {
    const told = () => {
        const paints = performance.getEntriesByType("paint");
        const at = Object.fromEntries(paints.map((one) => [one.name, one.startTime]));
        const rows = document.querySelectorAll("#peers tbody tr").length;
        if (at["first-paint"] === undefined || rows < %d) return requestAnimationFrame(told);
        done({...at, rows: performance.now()});
    };
    told();
})"""


def measure(times: int) -> dict[str, Any]:
    """Open the page so often; the figures."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise P2PAvgError(f"no browser is installed: none of {', '.join(BROWSERS)}")
    found: list[dict[str, float]] = []
    with Workers(PEERS, "p2pavg.bench.rounds.worker") as workers:
        answers = workers.join(target=60, step_seconds=0.02, epochs=10**9)
        for worker in workers.workers:
            worker.send(do="train")
        command = [sys.executable, "-m", "p2pavg", "monitor", RUN, "--initial-peers", answers[0]["address"]]
        command += ["--web", "127.0.0.1:0", "--jsonl", "-"]
        monitor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert monitor.stderr is not None
        try:
            url = "http://127.0.0.1:" + monitor.stderr.readline().rpartition(":")[2].strip()
            with sync_playwright() as driver:
                chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
                for _ in range(times + 1):
                    context = chromium.new_context()
                    page = context.new_page()
                    page.goto(url, wait_until="commit")
                    found.append(page.evaluate(PAINTED % PEERS))
                    context.close()
                chromium.close()
        finally:
            monitor.terminate()
            monitor.wait()
            for worker in workers.workers:
                worker.process.kill()
    opened = found[1:]  # the first one starts the browser's own processes
    return {
        "times": times,
        "first_paint_ms_median": statistics.median(one["first-paint"] for one in opened),
        "first_paint_ms_most": max(one["first-paint"] for one in opened),
        "content_ms_median": statistics.median(one["first-contentful-paint"] for one in opened),
        "table_ms_median": statistics.median(one["rows"] for one in opened),
        "bar_ms": BAR_MS,
        "page_bytes": sum(file.stat().st_size for file in page_files()),
        "environment": environment(),
    }


def page_files() -> list[Path]:
    """All that a browser loads."""
    import p2pavg.web

    return [path for path in (Path(p2pavg.web.__file__).parent / "page").iterdir() if path.is_file()]


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    result = measure(args.times)
    print(
        f"first paint {result['first_paint_ms_median']:.0f} ms (median of {args.times}, most "
        f"{result['first_paint_ms_most']:.0f}), content {result['content_ms_median']:.0f} ms, the peers' "
        f"rows {result['table_ms_median']:.0f} ms; {result['page_bytes'] / 1000:.0f} kB"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
