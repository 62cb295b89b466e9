"""The page of a run in a real browser, beside a swarm of real processes: what it shows is true, and soon."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from p2pavg.bench.workers import START_DEADLINE_S, Workers
from p2pavg.monitor.lines import JsonLines
from p2pavg.monitor.picture import Picture
from p2pavg.monitor.web import Page
from p2pavg.web.access import Place
from tests.ports import free_port
from tests.swarm.watched import ROOT, alive, kill, monitor, training
from tests.unit.monitor.test_monitor import A, B, C, event, named, status, three, told_of

pytestmark = pytest.mark.swarm
playwright: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
SHOTS = ROOT / "out" / "page"
PATIENCE_MS = 60_000
SHIFTS = """() => { window.shifted = 0; new PerformanceObserver((seen) => {
    for (const one of seen.getEntries()) window.shifted += one.value;
}).observe({type: "layout-shift"}); }"""


class Browser:
    """A headless Chromium, and what its pages complained of."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium
        self.complaints: list[str] = []

    def open(self, url: str, *, width: int = 1360, scheme: str = "dark") -> Any:
        """A page in a context of its own."""
        context = self._chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on(
            "console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text)
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"a dialog: {dialog.message}"))
        page.asked = []  # addresses of the history that the page asked for
        page.on("request", lambda request: "/history" in request.url and page.asked.append(request.url))
        page.goto(url, wait_until="commit")
        return page


@pytest.fixture
def browser() -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield Browser(chromium)
        chromium.close()


def shoot(page: Any, name: str, *, whole: bool = True) -> None:
    """Keep a picture; whole: also of what is below the window."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=whole)


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until a JavaScript expression, or a function of `arg`, is true of the page.

    As `wait_for_function`, which evaluates text inside the page, where its policy forbids that.
    """
    end = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"{expression} is not true of the page, with {arg}"
        page.wait_for_timeout(20)


def count(page: Any, selector: str, expected: int) -> None:
    """Wait until so many elements match."""
    until(page, "([s, n]) => document.querySelectorAll(s).length === n", [selector, expected])


@contextmanager
def newcomer(address: str) -> Iterator[None]:
    """One more peer of the swarm of `training`."""
    with Workers(1, "p2pavg.bench.rounds.worker") as more:
        (worker,) = more.workers
        config = {"target": 60, "step_seconds": 0.02, "epochs": 10**6}
        worker.send(do="start", index=3, initial_peers=[address], client_only=False, **config)
        worker.receive(START_DEADLINE_S)
        worker.send(do="train")
        try:
            yield
        finally:
            worker.process.kill()


@pytest.mark.timeout(300)
def test_the_page_shows_a_run_as_it_is(browser: Browser) -> None:
    """Three peers, their rounds by phase, their links; a killed one within 2 s; a newcomer; no errors."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    with (
        training(3, step_seconds=0.02, target=60) as (workers, address),
        monitor(address, "--web", f"127.0.0.1:{port}") as watched,
    ):
        first = watched.until(lambda line: len(alive(line)) == 3 and len(line["links"]) == 6)
        watched.until(lambda line: line["epoch"] >= first["epoch"] + 5)  # rounds of which all three tell
        page = browser.open(url)
        count(page, "#peers tbody tr", 3)
        count(page, "#links tbody td b", 6)
        rows_and_verdict(page)
        a_round_opens_and_survives_a_reload(page, url)
        a_peer_opens_by_the_keyboard(page)
        a_range_is_dragged_and_survives_a_reload(page)
        nothing_jumps(page)
        at_every_size(browser, url)

        at = kill(workers.workers[2])
        line = watched.until(lambda line: len(alive(line)) == 2)
        assert line["at"] - at <= 2.0  # the page is told in the same moment
        page.wait_for_selector('#peers tr[data-state="lost"]')
        print(f"on the page after {time.time() - at:.2f} s")
        assert "lost" in page.inner_text("#verdict-words")
        assert "was lost in epoch" in page.inner_text("#events")
        shoot(page, "lost-desktop-dark")

        with newcomer(address):
            until(page, "document.querySelectorAll('#peers tr:not([data-state=lost]) .name').length >= 3")
            page.wait_for_selector("#events >> text=joined in epoch")
        watched.process.kill()
        page.wait_for_selector('body[data-connection="lost"]')
        complaints = [text for text in browser.complaints if "ERR_" not in text]  # the monitor is gone
    assert complaints == []


def rows_and_verdict(page: Any) -> None:
    """The first line, the tiles and the rows tell of three peers that train."""
    until(page, "/3 peers train/.test(document.getElementById('verdict-words').textContent)")
    assert page.get_attribute("#verdict", "data-level") == "well"
    assert page.inner_text("#tile-peers .tile-value") == "3"
    shares = [
        int(text.rstrip("%")) for text in page.locator("#peers td.share > span:last-child").all_inner_texts()
    ]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert all(
        re.fullmatch(r"0\.\d+\.\d+", text) for text in page.locator("#peers td.version").all_inner_texts()
    )
    assert all(text.endswith("MB") for text in page.locator("#peers td.memory").all_inner_texts())
    heights = page.evaluate(
        """[...document.querySelectorAll('.round:last-child .stack > span')]
            .map((one) => one.getBoundingClientRect().height)"""
    )
    assert heights[0] > 0.5 * sum(heights)  # calculation: most of an epoch


def a_round_opens_and_survives_a_reload(page: Any, url: str) -> None:
    """A column opens its round, with all members; the address leads back to it."""
    label = page.get_attribute(".round:nth-last-child(3)", "aria-label")
    epoch = re.match(r"epoch (\d+)", label)[1]  # type: ignore[index]
    page.evaluate(f"document.querySelector('.round[data-key=\"{epoch}\"]').click()")
    count(page, ".members li", 3)
    assert page.evaluate("location.hash") == f"#round={epoch}"
    page.reload(wait_until="commit")
    count(page, ".members li", 3)
    assert page.inner_text("#detail-title") == f"Epoch {epoch}"
    assert page.locator(".phases tbody tr").count() == 6
    shoot(page, "round-desktop-dark", whole=False)
    page.keyboard.press("Escape")
    until(page, "location.hash === ''")


def a_peer_opens_by_the_keyboard(page: Any) -> None:
    """Focus on a name and Enter open the peer with its charts and links; Escape closes it."""
    page.focus("#peers tbody tr:first-child .name")
    page.keyboard.press("Enter")
    count(page, "#detail .scroll tbody tr", 2)
    until(page, "document.querySelector('#detail .line').getAttribute('d').length > 20")
    shoot(page, "peer-desktop-dark", whole=False)
    page.keyboard.press("Escape")
    until(page, "!document.getElementById('detail').open")


def a_range_is_dragged_and_survives_a_reload(page: Any) -> None:
    """A drag over a chart selects a range for all; the address keeps it; Escape in a chart leads back."""
    box = page.locator("#charts svg").first.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.8 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.95 * box["width"], y, steps=4)
    page.mouse.up()
    until(page, "/^#from=[0-9.]+&to=[0-9.]+$/.test(location.hash)")
    until(page, "/ to /.test(document.getElementById('range-words').textContent)")
    words = page.inner_text("#range-words")
    page.reload(wait_until="commit")
    until(page, "(words) => document.getElementById('range-words').textContent === words", words)
    page.focus("#charts svg")
    page.keyboard.press("Escape")
    until(page, "location.hash === ''")


def nothing_jumps(page: Any) -> None:
    """While a steady run is shown, nothing on the page moves."""
    page.evaluate(SHIFTS)
    newest = page.get_attribute(".round:last-child", "data-key")
    page.wait_for_selector(f'.round[data-key="{int(newest) + 3}"]')
    assert page.evaluate("window.shifted") < 0.01


def at_every_size(browser: Browser, url: str) -> None:
    """On a desktop and a phone, dark and light, nothing but tables of their own is wider than the window."""
    for name, width in (("desktop", 1360), ("phone", 390)):
        for scheme in ("dark", "light"):
            page = browser.open(url, width=width, scheme=scheme)
            count(page, "#peers tbody tr", 3)
            page.wait_for_selector(".round:last-child")
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            shoot(page, f"well-{name}-{scheme}")
            page.context.close()


HOSTILE = "<img src=x onerror=alert(1)>"


@contextmanager
def showing(picture: Picture, token: str = "", jsonl: str | None = None) -> Iterator[str]:
    """The page of a picture that nobody feeds any more; its address. jsonl: a file of its past."""
    shown = picture.show(1.0)
    told: Queue[str] = Queue()
    stop = asyncio.Event()

    async def serve() -> None:
        page = Page(Place("127.0.0.1", 0, token), picture.run_id, jsonl)
        told.put(await page.start())
        while not stop.is_set():
            page.show(shown, shown.to_dict(time.time()))
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.2)
        await page.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield told.get(timeout=PATIENCE_MS / 1000)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("loss", [float("nan"), 1e308])
def test_hostile_text_is_shown_and_nothing_of_it_runs(browser: Browser, loss: float) -> None:
    """Markup in names, regions, states and causes, and losses that are no numbers, are text on the page."""
    picture = Picture(HOSTILE)
    others = {A: "</script><script>alert(1)</script>"[:32], B: HOSTILE, C: "javascript:alert(1)"}
    picture.listed({peer: named(peer, name, region=HOSTILE) for peer, name in others.items()}, 0.0)
    for peer in others:
        picture.linked(peer, 0.0)
        links = [[other, 4, 0.1, 8, 2e8, 1, 1] for other in others if other != peer]
        strange = {"region": HOSTILE, "version": HOSTILE, "reach": HOSTILE, "state": 'x" onclick="alert(1)'}
        picture.told(peer, status(loss=loss, links=links, **strange), 0.1)
        picture.told(peer, told_of(4), 0.2)
    picture.told(A, event("silent", peer=B, why=HOSTILE), 0.3)
    with showing(picture) as url:
        page = browser.open(url)
        count(page, "#peers tbody tr", 3)
        count(page, "#links tbody td b", 4)
        assert page.inner_text("#run") == HOSTILE
        assert HOSTILE in page.locator("#peers .name").all_inner_texts()
        assert set(page.locator("#peers td.region").all_inner_texts()) == {HOSTILE}
        assert HOSTILE in page.inner_text("#events")
        assert page.inner_text("#tile-loss .tile-value") == f"{loss:.4g}"
        page.locator("#peers .name").first.click()
        count(page, "#detail .scroll tbody tr", 2)
        assert (
            page.evaluate("document.querySelectorAll('img, script:not([src]), [onclick], [onerror]').length")
            == 0
        )
        shoot(page, f"hostile-{loss:.4g}", whole=False)
    assert [text for text in browser.complaints if "ERR_" not in text] == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize("view", ["", "#last=all"])
def test_a_page_that_is_opened_late_shows_the_past(browser: Browser, tmp_path: Path, view: str) -> None:
    """What the file of an earlier watch holds is in the charts, from its beginning to now."""
    picture = three()
    picture.told(A, told_of(4), 0.2)
    path = tmp_path / "run.jsonl"
    began = time.time() - 300
    with path.open("w") as file:
        written, shown = JsonLines(file), picture.show(1.0)
        for second in range(290):
            written.write(shown.to_dict(began + second))
    with showing(picture, jsonl=str(path)) as url:
        page = browser.open(url + view)
        line = "(document.querySelector('#charts .line')?.getAttribute('d') ?? '')"
        until(page, f"{line}.split('L').length > 280")
        asked = parse_qs(urlsplit(page.asked[0]).query)  # at once, and not when the page asks again later
        assert "from" not in asked or float(asked["from"][0]) < began
        left = float(page.evaluate(line).removeprefix("M").partition(",")[0])
        assert left < 0.2 * page.locator("#charts svg").first.bounding_box()["width"]
    assert [text for text in browser.complaints if "ERR_" not in text] == []


@pytest.mark.timeout(240)
def test_the_page_of_an_empty_run_says_how_to_begin(browser: Browser) -> None:
    """Nobody is there: one sentence and a line of code; and without the token there is no page at all."""
    token = "0123456789abcdef"
    with showing(Picture("my-run"), token) as url:
        page = browser.open(url)
        page.wait_for_selector("#welcome >> text=Nobody is here yet")
        until(page, "document.getElementById('welcome-run').textContent === 'my-run'")
        assert page.evaluate("location.href") == url.partition("?")[0]  # the token is in a cookie now
        assert not page.is_visible("#tiles")
        for width, scheme in ((1360, "dark"), (390, "light")):
            small = browser.open(url, width=width, scheme=scheme)
            small.wait_for_selector("#welcome >> text=Nobody is here yet")
            shoot(small, f"empty-{width}-{scheme}")
        browser.complaints.clear()
        stranger = browser.open(url.partition("?")[0])
        assert "needs its token" in stranger.inner_text("body")
