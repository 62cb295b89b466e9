"""The page's server: what it answers, to whom, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2pavg.errors import AddressInUseError, ConfigurationError
from p2pavg.web import server as made
from p2pavg.web.access import Place
from p2pavg.web.broadcast import Broadcast, encode
from p2pavg.web.server import Server
from p2pavg.web.timeline import Timeline
from tests.unit.web.frames import frame, round_of

aiohttp: Any = pytest.importorskip("aiohttp")
PAGE = Path(made.__file__).parent / "page"


@asynccontextmanager
async def serving(token: str = "") -> AsyncIterator[tuple[Server, Any]]:
    """A server on a free port of loopback, and a client whose addresses begin there."""
    served = Server(Place("127.0.0.1", 0, token), Timeline(), lambda: b"p2pavg_epoch 7\n")
    await served.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{served.place.port}") as client:
        try:
            yield served, client
        finally:
            await served.close()


async def test_all_that_the_page_needs_is_there() -> None:
    """The page and each file that it names are served, under a strict policy, from here alone."""
    async with serving() as (_, client):
        for path in ("/", *(f"/page/{file.name}" for file in PAGE.iterdir())):
            answer = await client.get(path)
            text = await answer.text()
            assert answer.status == 200
            assert answer.headers["Content-Security-Policy"] == made.POLICY
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            outside = text.replace("http://www.w3.org/2000/svg", "")
            assert "http:" not in outside
            assert "https:" not in outside
        for path in ("/page/nothing", "/page/..%2fserver.py", "/page/__init__.py", "/etc/passwd"):
            assert (await client.get(path)).status == 404
    assert "unsafe" not in made.POLICY
    assert "default-src 'none'" in made.POLICY


def test_the_page_is_small_and_makes_text_of_text() -> None:
    """All files together take at most 150 kB, and none turns text into markup or runs it."""
    assert sum(file.stat().st_size for file in PAGE.iterdir()) <= 150_000
    for file in PAGE.iterdir():
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "style=",
        ):
            assert word not in file.read_text(), file


def test_modules_are_fetched_at_once() -> None:
    """The page names each of them, and so a browser does not find one in the other, a request at a time."""
    index = (PAGE / "index.html").read_text()
    for file in PAGE.glob("*.js"):
        assert f'"page/{file.name}"' in index, file.name


async def test_it_takes_nothing() -> None:
    """Only GET and HEAD are understood."""
    async with serving() as (_, client):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for path in ("/", "/state", "/metrics"):
                assert (await client.request(method, path)).status == 405


async def test_a_token_opens_every_path_and_nothing_else_does() -> None:
    """Without the token all is refused in one sentence; it may come in the address, a cookie or a header."""
    token = "0123456789abcdef"
    paths = ("/", "/page/main.js", "/live", "/state", "/history", "/round/1", "/metrics", "/nothing")
    async with serving(token) as (_, client):
        for path in paths:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "p2pavg_token=wrong"}):
                answer = await client.get(path, headers=headers)
                assert answer.status == 401
                assert "p2pavg monitor" in await answer.text()
        assert (await client.get("/metrics", headers={"Authorization": f"Bearer {token}"})).status == 200
        answer = await client.get("/", params={"token": token}, allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
    async with serving(token) as (_, client):
        answer = await client.get("/state", headers={"Cookie": f"p2pavg_token={token}"})
        assert answer.status == 200


async def test_a_request_for_another_host_gets_no_page() -> None:
    """A name that somebody else points at loopback is refused."""
    async with serving() as (_, client):
        answer = await client.get("/state", headers={"Host": "evil.example:8033"})
        assert answer.status == 421


async def test_what_is_told_is_answered() -> None:
    """State, history, one round and metrics."""
    async with serving() as (served, client):
        told = frame(
            1e9, rounds=[round_of(7, 1e9)], events=[{"number": 1, "at": 1e9, "words": "<b>lost</b>"}]
        )
        served.timeline.add(told)
        served.tell(told, {"run": told})
        assert (await (await client.get("/state")).json())["epoch"] == 7
        past = await (await client.get("/history")).json()
        assert past["figures"]["loss"] == [[1e9], [2.0], [2.0], [2.0]]
        assert past["events"] == [{"at": 1e9, "words": "<b>lost</b>"}]
        assert len((await (await client.get("/round/7")).json())["peers"]) == 2
        assert (await client.get("/round/8")).status == 404
        assert (await client.get("/round/" + "9" * 40)).status == 404
        assert await (await client.get("/metrics")).text() == "p2pavg_epoch 7\n"
        for query in ("?from=x&to=y", "?from=nan", "?from=-1e308&to=1e308", "?peer=%3Cscript%3E"):
            answer = await client.get("/history" + query)
            assert answer.status == 200
            json.loads(await answer.text())


async def test_who_looks_is_told_as_it_happens() -> None:
    """A stream begins with the newest of every topic; then what changed comes, and nothing else."""
    async with serving() as (served, client):
        served.tell({}, {"run": {"epoch": 1}, "links": []})
        async with client.get("/live") as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            await until(answer, b'data: {"epoch":1}\n\n')
            served.tell({}, {"run": {"epoch": 2}, "links": []})
            seen = await until(answer, b'data: {"epoch":2}\n\n')
            assert b"links" not in seen


async def until(answer: Any, end: bytes) -> bytes:
    """What comes until these bytes have come with it."""
    seen = b""
    async with asyncio.timeout(20):
        while end not in seen:
            seen += await answer.content.readany()
    return seen


async def test_a_slow_listener_gets_the_newest_and_keeps_nothing_waiting() -> None:
    """Whoever takes a message late finds one for each topic, however many there were."""
    told = Broadcast()
    told.tell({"run": 0, "links": 0})
    listener = told.listen(10.0)
    await anext(listener)
    for number in range(1, 1000):
        told.tell({"run": number, "links": 0})
    assert await anext(listener) == b"event: run\ndata: 999\n\n"
    quiet = told.listen(0.001)
    await anext(quiet)
    assert await anext(quiet) == b":\n\n"


def test_json_cannot_end_a_script_or_an_event() -> None:
    """Text with markup or line ends stays inside its JSON string, and NaN never becomes JSON."""
    data = {"name": "</script><!-- & \n\r\u2028\ndata: x"}
    made_of_it = encode(data)
    assert json.loads(made_of_it) == data
    for part in (b"<", b"&", b"\n", b"\r"):
        assert part not in made_of_it
    with pytest.raises(ValueError):
        encode({"x": math.nan})


async def test_a_port_that_is_taken_is_one_sentence() -> None:
    """The message names the port and the option."""
    async with serving() as (served, _):
        second = Server(served.place, Timeline(), bytes)
        with pytest.raises(AddressInUseError, match=f"port {served.place.port} .*--web"):
            await second.start()
    with pytest.raises(ConfigurationError, match="address of this machine"):
        await Server(Place("192.0.2.1", 8033, "t"), Timeline(), bytes).start()


async def test_without_aiohttp_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, that fits a clone too."""
    monkeypatch.setitem(__import__("sys").modules, "aiohttp", None)
    with pytest.raises(ConfigurationError, match="pip install 'aiohttp"):
        await Server(Place("127.0.0.1", 0), Timeline(), bytes).start()


async def test_the_number_of_open_pages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One page too many is told so; when another closes there is room again."""
    monkeypatch.setattr(made, "MOST_LISTENERS", 1)
    async with serving() as (served, client):
        async with client.get("/live") as first:
            await until(first, b"retry: 1000\n\n")
            assert (await client.get("/live")).status == 503
        async with asyncio.timeout(20):
            while True:
                served.tell({}, {"run": asyncio.get_running_loop().time()})
                async with client.get("/live") as again:
                    if again.status == 200:
                        break
