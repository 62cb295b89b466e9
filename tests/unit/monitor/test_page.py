"""What the page of a run is told, and what it reads back of an earlier watch."""

from __future__ import annotations

import asyncio
import errno
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2pavg.monitor.lines import JsonLines, frames
from p2pavg.monitor.picture import Picture
from p2pavg.monitor.shown import Shown
from p2pavg.monitor.web import Page, recalled
from p2pavg.web.access import Place
from tests.unit.monitor.test_monitor import PRICES, A, B, C, named, status, three, told_of

HOSTILE = "<img src=x onerror=alert(1)>"


def after_epochs(*epochs: int) -> Shown:
    """Three peers that reported these epochs."""
    picture = three(PRICES)
    for epoch in epochs:
        for peer in (A, B, C):
            picture.told(peer, told_of(epoch, local_samples=400), 0.2)
    return picture.show(1.0)


def test_a_frame_tells_all_that_the_page_shows() -> None:
    """Shares, reach, version, memory, loss, egress, pass, rounds and the verdict are in one frame of JSON."""
    picture = three(PRICES)
    for peer, samples in ((A, 100), (B, 300), (C, 600)):
        picture.told(peer, told_of(4, local_samples=samples, seconds_total=10.0), 0.2)
    picture.told(A, status(loss=1.5, passes=0.25, blocks_consumed=9, device_memory=7), 0.3)
    picture.told(B, status(loss=2.5), 0.3)
    data = picture.show(0.5).to_dict(1e9)
    assert [peer["share"] for peer in data["peers"]] == pytest.approx([0.1, 0.3, 0.6])
    first = data["peers"][0]
    assert (first["reach"], first["version"], first["memory_bytes"]) == ("direct", "0.1.0", 10**9)
    assert (data["loss"], data["passes"], data["blocks_consumed"]) == (2.0, 0.25, 9)
    assert (data["memory_bytes"], data["device_memory_bytes"]) == (3 * 10**9, 7)
    assert (data["level"], data["verdict"]) == ("well", "3 peers train; an epoch takes 10 s")
    (one,) = data["rounds"]
    assert (one["epoch"], one["members"], one["samples"], len(one["peers"])) == (4, 2, 1000, 3)
    assert one["phases"][0] == 8.0
    assert one["peers"][A.hex()][:2] == [100, 10.0]
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e308])
def test_a_loss_that_is_no_number_is_text(loss: float) -> None:
    """JSON has no such number; the words have, and finite losses of others do not hide it."""
    picture = three()
    picture.told(A, status(loss=loss), 0.3)
    picture.told(B, status(loss=2.0), 0.3)
    data = picture.show(0.5).to_dict(1e9)
    assert (data["loss"], data["loss_text"]) == (None, f"{loss:.4g}")
    json.dumps(data, allow_nan=False)


def test_discarded_samples_are_news() -> None:
    """They are said as an event, counted for the peer and the run, and change the verdict for a minute."""
    picture = three()
    picture.told(B, told_of(4, samples_discarded=12), 0.2)
    shown = picture.show(1.0)
    assert any("discarded 12 samples in epoch 4" in words for _, _, words in shown.events)
    assert (shown.samples_discarded, shown.level) == (12, "look")
    assert [peer.samples_discarded for peer in shown.peers] == [0, 12, 0]


def test_a_peer_that_leaves_is_not_lost() -> None:
    """Whose record is withdrawn left; whose link breaks is lost: only that changes the verdict."""
    picture = Picture("run")
    records = {peer: named(peer, name) for peer, name in ((A, "ada"), (B, "bob"), (C, "cy"))}
    picture.listed(records, 0.0)
    for peer in (A, B):
        picture.linked(peer, 0.0)
        picture.told(peer, status(), 0.0)
    picture.listed({A: records[A], B: records[B]}, 1.0)
    shown = picture.show(1.0)
    assert [peer.left for peer in shown.peers if peer.state == "gone"] == [True]
    assert shown.level == "well"
    picture.unlinked(B, "closed by the other side", 1.5)
    shown = picture.show(1.5)
    assert shown.verdict == "bob was lost; 1 peer goes on"


def test_a_file_of_lines_brings_the_past_back(tmp_path: Path) -> None:
    """Rounds are written once for each time that more of them is known; what is no frame is left out."""
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        written = JsonLines(file)
        for second, epochs in enumerate([(1,), (1, 2), (1, 2), (1, 2, 3)]):
            written.write(after_epochs(*epochs).to_dict(1e9 + second))
        file.write('garbage\n{"run_id": "run"}\n[1]\n{"run_id": "run", "at": "x", "peers": []}\n\n')
        written.write({**after_epochs(1, 2, 3, 4).to_dict(1e9 + 9), "run_id": "other"})
        file.write('{"run_id": "run", "at": 1')
    lines = [json.loads(line) for line in path.read_text().splitlines()[:4]]
    assert [[one["epoch"] for one in line["rounds"]] for line in lines] == [[1], [2], [], [3]]
    past = recalled(str(path), "run")
    assert (past.begin, past.end) == (1e9, 1e9 + 3)
    assert [one["epoch"] for one in past.rounds(0, 2e9)] == [1, 2, 3]
    opened = past.round(3)
    assert opened is not None
    assert len(opened["peers"]) == 3
    assert recalled(str(tmp_path / "none.jsonl"), "run").begin is None


@asynccontextmanager
async def page_of(jsonl: str | None = None) -> AsyncIterator[tuple[Page, Any]]:
    """A page, and a client whose addresses begin there."""
    aiohttp = pytest.importorskip("aiohttp")
    pytest.importorskip("prometheus_client")
    page = Page(Place("127.0.0.1", 0), "run", jsonl)
    url = await page.start()
    async with aiohttp.ClientSession(url) as client:
        try:
            yield page, client
        finally:
            await page.close()


async def test_the_past_of_the_file_and_the_present_are_one_history(tmp_path: Path) -> None:
    """While the file is read the page serves the present; then both are there, and nothing twice."""
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        for second in range(50):
            JsonLines(file).write(after_epochs(1).to_dict(1e9 + second))
    async with page_of(str(path)) as (page, client):
        shown = after_epochs(1, 2)
        page.show(shown, shown.to_dict(1e9 + 49))  # the last line of the file
        page.show(shown, shown.to_dict(1e9 + 60))
        async with asyncio.timeout(20):
            while True:
                told = await (await client.get("/history")).json()
                if told["begin"] == 1e9:
                    break
        assert told["figures"]["epoch"][0] == [1e9 + second for second in (*range(50), 60)]
        assert [one["epoch"] for one in told["rounds"]] == [1, 2]


async def test_hostile_text_stays_text_in_all_that_the_page_is_told(tmp_path: Path) -> None:
    """Names and regions of members arrive in JSON and in labels of metrics, and end neither."""
    picture = Picture(HOSTILE)
    picture.listed({A: named(A, HOSTILE[:32], region=HOSTILE)}, 0.0)
    picture.linked(A, 0.0)
    picture.told(A, status(region=HOSTILE, version=HOSTILE, reach='"}\n# x', state=HOSTILE), 0.0)
    async with page_of() as (page, client):
        shown = picture.show(0.5)
        page.show(shown, shown.to_dict(1e9))
        state = await (await client.get("/state")).read()
        assert b"<" not in state
        assert json.loads(state)["peers"][0]["region"] == HOSTILE
        text = await (await client.get("/metrics")).text()
        assert all(line.startswith(("#", "p2pavg_")) for line in text.splitlines())


def test_json_lines_hold_no_number_that_json_has_not() -> None:
    """A strange loss does not break the file."""
    picture = three()
    picture.told(A, status(loss=float("nan")), 0.3)
    file = io.StringIO()
    JsonLines(file).write(picture.show(0.5).to_dict(1e9))
    assert "NaN" not in file.getvalue()


class Disk(io.StringIO):
    """A file on a disk that may be full: what is not flushed is lost, and half of a line may stay."""

    full = False

    def flush(self) -> None:
        if self.full:
            written = self.getvalue()
            self.seek(len(written) - 20)
            self.truncate()
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_a_gap_in_the_history_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The monitor goes on, says so once, and what it writes when there is room again is read."""
    disk = Disk()
    written = JsonLines(disk)
    for second in range(6):
        disk.full = 2 <= second < 4
        written.write(after_epochs(1).to_dict(1e9 + second))
    assert caplog.text.count("the file of --jsonl cannot be written (No space left on device)") == 1
    path = tmp_path / "run.jsonl"
    path.write_text(disk.getvalue())
    run_id = json.loads(disk.getvalue().splitlines()[0])["run_id"]
    assert [frame["at"] - 1e9 for frame in frames(str(path), run_id)] == [0, 1, 4, 5]
    assert "2 lines, from line 3 on, of" in caplog.text
    assert "no JSON of a monitor, and left out" in caplog.text
