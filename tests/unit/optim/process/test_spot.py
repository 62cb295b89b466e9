"""Notices of clouds that take a machine, as their documentation writes them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from p2pavg.optim.process import spot


@contextmanager
def metadata(answer: Callable[[str, str, dict[str, str]], tuple[int, str]]) -> Iterator[str]:
    """A metadata service on loopback; `answer` gets method, path and headers."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            code, text = answer(self.command, self.path, headers)
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_aws_is_asked_with_a_token_that_is_made_anew_when_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """IMDSv2: PUT for a token, which each GET carries; 404 is no notice, 401 an expired token."""
    made: list[str] = []
    notice: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if (method, path) == ("PUT", "/latest/api/token"):
            assert 0 < int(headers["x-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
            made.append(f"token{len(made)}")
            return 200, made[-1]
        assert (method, path) == ("GET", "/latest/meta-data/spot/instance-action")
        if headers.get("x-aws-ec2-metadata-token") != made[-1]:
            return 401, ""
        return (200, notice[0]) if notice else (404, "<html>404 - Not Found</html>")

    with metadata(answer) as base:
        monkeypatch.setattr(spot, "BASE", base)
        aws = spot.Aws()
        assert aws() is None
        made.append("another")  # the first one has expired
        assert aws() is None
        assert aws() is None
        notice.append('{"action": "terminate", "time": "2026-09-18T08:22:00Z"}')
        assert aws() == "AWS will terminate it at 2026-09-18T08:22:00Z"
    assert made == ["token0", "another", "token2"]


def test_google_is_asked_whether_it_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header that Google demands is sent; FALSE is no notice."""
    told = ["FALSE"]

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        assert path == "/computeMetadata/v1/instance/preempted"
        return (200, told[0]) if headers.get("metadata-flavor") == "Google" else (403, "")

    with metadata(answer) as base:
        monkeypatch.setattr(spot, "BASE", base)
        assert spot.google() is None
        told[0] = "TRUE"
        assert spot.google() == "Google Cloud preempts it"


def test_azure_names_the_machines_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of other machines of the set, and pauses of seconds, are no notice."""
    event = {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Scheduled",
        "EventType": "Freeze",
        "ResourceType": "VirtualMachine",
        "Resources": ["this_one"],
        "NotBefore": "Mon, 11 Apr 2026 22:26:58 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": 5,
    }

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if headers.get("metadata") != "true":
            return 400, ""
        if path.startswith("/metadata/instance/compute/name?api-version="):
            return 200, "this_one"
        assert path.startswith("/metadata/scheduledevents?api-version=")
        return 200, json.dumps({"DocumentIncarnation": 2, "Events": [event]})

    with metadata(answer) as base:
        monkeypatch.setattr(spot, "BASE", base)
        azure = spot.Azure()
        assert azure() is None
        event.update(EventType="Preempt", Resources=["another"])
        assert azure() is None
        event.update(Resources=["another", "this_one"])
        assert azure() == "Azure: Preempt, not before Mon, 11 Apr 2026 22:26:58 GMT"


def test_the_firmware_tells_which_cloud_this_is(tmp_path: Path) -> None:
    """What stands there decides; elsewhere nobody is asked."""
    assert spot.cloud(tmp_path) is None
    for name, text, told in (
        ("product_name", "Google Compute Engine\n", "Google Cloud"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77\n", "Azure"),
        ("sys_vendor", "Amazon EC2\n", "AWS"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sys_vendor").write_text("QEMU\n")
        (folder / name).write_text(text)
        assert spot.cloud(folder) == told
        assert told in spot.looks()


@pytest.mark.parametrize("wrong", ["", "{}", "not JSON", '{"action": 1}', "[]"])
def test_an_answer_that_cannot_be_read_is_no_notice(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Nor does it end the watching."""
    with metadata(lambda *_: (200, wrong)) as base:
        monkeypatch.setattr(spot, "BASE", base)
        assert spot._told(spot.Aws()) is None
        assert spot._told(spot.google) is None
        assert spot._told(spot.Azure()) is None
    assert spot._told(spot.Aws()) is None  # nobody listens there any more


PROGRAM = """
import sys, time
import torch
from p2pavg import CollaborativeOptimizer
from p2pavg.optim.process import spot
spot.BASE, spot.POLL_S, spot.cloud = sys.argv[1], 0.05, lambda: "AWS"
model = torch.nn.Linear(2, 1)
opt = CollaborativeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "taken", 8, 4, listen="127.0.0.1:0")
with opt:
    while True:
        model(torch.ones(4, 2)).sum().backward()
        opt.step()
        print(opt.epoch, flush=True)
        time.sleep(0.01)
"""


def test_a_notice_lets_an_optimizer_leave() -> None:
    """As SIGTERM: at the next step, with exit code 143, and a line that names the cloud."""
    taken = threading.Event()

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if method == "PUT":
            return 200, "token"
        return (200, '{"action": "stop", "time": "soon"}') if taken.is_set() else (404, "")

    with metadata(answer) as base:
        peer = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, base], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert peer.stdout is not None
        assert peer.stdout.readline()
        taken.set()
        _, said = peer.communicate(timeout=100)
    assert peer.returncode == 143, said
    assert "this machine is taken (AWS will stop it at soon): leaving the run" in said
    assert "Traceback" not in said
