"""`p2pavg monitor` beside real processes: what it shows is true, and soon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pavg.credentials import new_secret
from tests.swarm.watched import ROOT, RUN, alive, kill, monitor, training


def mean_rate(reports: list[dict[str, Any]], samples: str) -> float:
    return sum(r[samples] for r in reports) / sum(r["seconds_total"] for r in reports)


@pytest.mark.parametrize("closed", [False, True])
def test_a_killed_peer_shows_within_two_seconds(closed: bool, tmp_path: Path) -> None:
    """In open and closed runs all peers are shown at work; one that is killed is gone two seconds later."""
    environment = {}
    if closed:
        secret = tmp_path / "run.secret"
        secret.write_text(new_secret(RUN))
        secret.chmod(0o600)
        environment["P2PAVG_CREDENTIALS"] = str(secret)
    with (
        training(3, step_seconds=0.02, target=60, **environment) as (workers, address),
        monitor(address, environment=environment) as watched,
    ):
        line = watched.until(
            lambda line: (
                len(alive(line)) == 3
                and line["epoch"] >= 3
                and {(link["peer"], link["distance"]) for link in line["links"]}
                == {(peer, "host") for peer in alive(line)}
            )
        )
        assert line["target"] == 60
        at = kill(workers.workers[2])
        line = watched.until(lambda line: len(alive(line)) == 2)
        assert line["at"] - at <= 2.0
        assert any("was lost in epoch" in event["words"] for event in line["events"])
        watched.until(lambda later: later["epoch"] >= line["epoch"] + 2)
        watched.process.send_signal(signal.SIGTERM)
        assert watched.process.wait(10) == 0


def test_a_killed_peer_that_nobody_can_dial_shows_within_two_seconds() -> None:
    """The monitor has no link to a peer behind a router; members have, and tell of it and of its end."""
    with (
        training(2, client_only=1, step_seconds=0.02, target=60) as (workers, address),
        monitor(address) as watched,
    ):
        line = watched.until(lambda line: len(alive(line)) == 3)
        assert [peer["state"] for peer in line["peers"]].count("training") == 1
        at = kill(workers.workers[2])
        line = watched.until(lambda line: len(alive(line)) == 2)
        assert line["at"] - at <= 2.0
        assert [peer["state"] for peer in line["peers"]].count("gone") == 1


def test_a_stopped_peer_shows_as_silent() -> None:
    """A peer whose process is stopped, with all its links open, is shown as silent."""
    with training(3, step_seconds=0.02, target=60) as (workers, address), monitor(address) as watched:
        watched.until(lambda line: len(alive(line)) == 3)
        workers.workers[1].process.send_signal(signal.SIGSTOP)
        line = watched.until(lambda line: len(alive(line)) == 2)
        assert [peer["state"] for peer in line["peers"]].count("silent") == 1


def test_the_monitors_rates_are_the_peers_own(tmp_path: Path) -> None:
    """The run's samples/s and each peer's agree within 2% with what the peers themselves report."""
    path = tmp_path / "reports.jsonl"
    with training(2, step_seconds=0.02, target=40, P2PAVG_REPORTS=str(path)) as (_, address):
        with monitor(address) as before:
            before.until(lambda line: line["epoch"] >= 3)  # in the first epochs peers still join
        with monitor(address) as watched:
            first = watched.until(lambda line: len(alive(line)) == 2)
            last = watched.until(lambda line: line["epoch"] >= first["epoch"] + 20)
        reports = [json.loads(line) for line in path.read_text().splitlines()]
    own = [r for r in reports if first["at"] - 1.0 <= r["finished_at"] <= last["at"]]
    assert len(own) >= 30
    assert last["samples_per_second"] == pytest.approx(mean_rate(own, "samples"), rel=0.02)
    for peer in last["peers"]:
        mine = [r for r in own if r["peer"] == peer["peer"]]
        assert peer["samples_per_second"] == pytest.approx(mean_rate(mine, "local_samples"), rel=0.02)


def test_a_monitor_adds_no_member_and_no_stream(tmp_path: Path) -> None:
    """While it is watched, a run has the same members, links and streams, and nobody lists the watcher."""
    path = tmp_path / "reports.jsonl"
    with training(2, step_seconds=0.02, target=20, P2PAVG_REPORTS=str(path)) as (_, address):
        with monitor(address) as watched:
            first = watched.until(lambda line: len(alive(line)) == 2)
            watched.until(lambda line: line["epoch"] >= first["epoch"] + 8)
            table = subprocess.run(
                [sys.executable, "-m", "p2pavg", "peers", RUN, "--initial-peers", address, "--json", "-"],
                capture_output=True,
                cwd=ROOT,
                timeout=60,
                check=True,
            )
        reports = [json.loads(line) for line in path.read_text().splitlines()]
    listed = json.loads(table.stdout)["peers"]
    assert len(listed) == 2
    assert all(peer["samples_per_second"] > 0 for peer in listed)
    late = [r for r in reports if r["epoch"] >= first["epoch"]]
    assert {len(r["members"]) for r in late} == {2}
    assert {len(r["links"]) for r in late} == {1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--initial-peers"),
        (("--initial-peers", "127.0.0.1:9"), "none of the initial peers answered"),
        (("--initial-peers", "nonsense"), "host:port"),
        (("--initial-peers", "127.0.0.1:9", "--jsonl", "/nowhere/at/all"), "cannot write"),
        (("--initial-peers", "127.0.0.1:9", "--prices", "/nowhere/at/all"), "cannot read"),
    ],
)
def test_a_users_mistake_is_one_clear_line(arguments: tuple[str, ...], words: str) -> None:
    """Without a way in, or with files that cannot be used, the command ends with code 1 and one line."""
    environment = {k: v for k, v in os.environ.items() if k != "P2PAVG_INITIAL_PEERS"}
    done = subprocess.run(
        [sys.executable, "-m", "p2pavg", "monitor", "r", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_closed_run_is_not_watched_without_credentials(tmp_path: Path) -> None:
    """Without the run's credentials the monitor is told that it needs them."""
    secret = tmp_path / "run.secret"
    secret.write_text(new_secret(RUN))
    secret.chmod(0o600)
    with training(1, step_seconds=0.02, target=10, P2PAVG_CREDENTIALS=str(secret)) as (_, address):
        done = subprocess.run(
            [sys.executable, "-m", "p2pavg", "monitor", RUN, "--initial-peers", address],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert "credentials" in done.stderr
    assert done.stderr.count("\n") == 1
