"""p2pavg doctor: what it finds on this machine, and what it advises."""

from __future__ import annotations

import json
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from p2pavg import cli, native
from p2pavg.cli import doctor, machine_checks
from p2pavg.cli.machine_checks import CheckResult
from p2pavg.cli.reach import Found, Reach
from p2pavg.errors import UnreachableError


def test_the_page_has_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    """Every check is named, with its mark; nothing is written to stderr."""
    code = cli.main(["doctor", "--port", "45999"])
    out, err = capsys.readouterr()
    for name in (
        "native module",
        "torch and GPU",
        "TCP port 45999",
        "UDP port",
        "clock",
        "TCP buffers",
        "open files",
    ):
        assert name in out
    assert out.splitlines()[-1] == "ok good, -- could be better, !! wrong, ?? unknown"
    assert code in (0, 1)
    assert not err


def test_json_has_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json - writes JSON alone; to a file, the page comes too."""
    cli.main(["doctor", "--json", "-"])
    told = json.loads(capsys.readouterr().out)
    assert {"name", "state", "found", "advice"} == set(told["checks"][0])
    cli.main(["doctor", "--json", str(tmp_path / "d.json")])
    assert len(json.loads((tmp_path / "d.json").read_text())["checks"]) == len(told["checks"])
    assert "native module" in capsys.readouterr().out


def test_a_taken_port_is_told_with_advice() -> None:
    """TCP and UDP are tried apart."""
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        tcp, udp = machine_checks.ports(holder.getsockname()[1])
    assert tcp.state is CheckResult.SLOW
    assert "next free port" in tcp.advice
    assert udp.state is CheckResult.GOOD


def test_small_buffers_are_told_with_the_command(tmp_path: Path) -> None:
    """What keeps windows small is named, with the sysctl that mends it."""
    (tmp_path / "tcp_rmem").write_text("4096 131072 6291456")
    (tmp_path / "tcp_wmem").write_text("4096 16384 1048576")
    check = machine_checks.buffers(tmp_path)
    assert check.state is CheckResult.SLOW
    assert "sysctl -w net.ipv4.tcp_wmem=" in check.advice
    assert "tcp_rmem" not in check.advice
    assert machine_checks.buffers(tmp_path / "none").state is CheckResult.UNKNOWN


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No native module, few open files, a full disk: each with what to do."""
    monkeypatch.setattr(native, "available", lambda: False)
    assert "compiler" in machine_checks.modules().advice
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert "ulimit -n" in machine_checks.open_files().advice
    usage: Any = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    assert "TMPDIR" in machine_checks.disk().advice


def test_a_clock_that_nothing_keeps_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """adjtimex() says whether the clock is synchronised; where there is none, that is said."""
    states = {5: CheckResult.SLOW, 0: CheckResult.GOOD, None: CheckResult.UNKNOWN}
    for value, state in states.items():
        monkeypatch.setattr(machine_checks, "_clock_state", lambda value=value: value)
        assert machine_checks.clock().state is state


def test_a_port_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, exit code 1."""
    assert cli.main(["doctor", "--port", "99999"]) == 1
    assert "--port 99999 is no port" in capsys.readouterr().err


def test_streams_whose_windows_shrink_are_told_with_the_command(tmp_path: Path) -> None:
    """The sysctl that mends it is named; where it is mended, or unknown, that is said."""
    setting = tmp_path / "tcp_slow_start_after_idle"
    assert machine_checks.idle_streams(tmp_path).state is CheckResult.UNKNOWN
    setting.write_text("1\n")
    assert "tcp_slow_start_after_idle=0" in machine_checks.idle_streams(tmp_path).advice
    setting.write_text("0\n")
    assert machine_checks.idle_streams(tmp_path).state is CheckResult.GOOD


@pytest.mark.parametrize(
    ("reach", "state"),
    [
        ("open", CheckResult.GOOD),
        ("mapped", CheckResult.GOOD),
        ("out only", CheckResult.SLOW),
        ("unknown", CheckResult.UNKNOWN),
    ],
)
def test_what_members_find_stands_in_place_of_the_addresses(
    reach: Reach, state: CheckResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a member's address others try; what they find is a check like the others."""
    asked: list[object] = []

    def look(member: object, port: int) -> Found:
        asked.append((member, port))
        return Found(reach, addresses=["203.0.113.9:45998"], nat="none", gateway="it gives none")

    monkeypatch.setattr(doctor, "look", look)
    cli.main(["doctor", "192.0.2.1:31330", "--port", "45998", "--json", "-"])
    assert asked == [(("192.0.2.1", 31330), 45998)]
    told = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "addresses" not in told
    assert told["reached by others"]["state"] == state
    assert ("forward port 45998" in told["reached by others"]["advice"]) == (reach == "out only")


def test_a_member_that_does_not_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence of the error is the advice, and the exit code is 1."""

    def look(member: object, port: int) -> Found:
        raise UnreachableError("none of the initial peers answered")

    monkeypatch.setattr(doctor, "look", look)
    assert cli.main(["doctor", "192.0.2.1:31330", "--port", "45997"]) == 1
    assert "none of the initial peers answered" in capsys.readouterr().out
