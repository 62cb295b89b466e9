"""Labs come up, do not meet, and go down: in order, after crashes, as root and without privilege."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.lab import Lab, RunningLab, state
from tests.warm.popen import ROOT, Cold

Wire = Callable[[Lab], Any]
LAB = [sys.executable, "-m", "p2pavg.lab"]
DEADLINE_S = 10


def lab_verb(*words: str, prefix: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*(prefix or []), *LAB, *words], capture_output=True, text=True, timeout=30)


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Any:
    """A lab's name, free before and after the test."""
    name = f"test-{os.getpid()}"
    state.reclaim(name)
    yield name
    state.reclaim(name)


def test_two_labs_of_one_topology_do_not_meet(traffic: Wire) -> None:
    """Two labs with the same addresses run side by side, and neither sees the other's packets or changes."""
    with Lab("lan-4") as first, Lab("lan-4") as second:
        assert first.address("b") == second.address("b")
        first.set("*", "*", down=True)
        assert traffic(second).rtt_ms("a", "b", 3) < 1.4
        assert first.stats().paths["a", "b"].sent_packets == 0
        assert second.stats().paths["a", "b"].delivered_packets == 3


def test_nothing_is_left_of_a_lab() -> None:
    """After the with block its processes, router and directory are gone."""
    with Lab("lan-4") as lab:
        sleeper = lab.spawn("a", ["sleep", "1000"])
        router = os.pidfd_open(lab.state.pid)
        path = state.directory(lab.name)
        assert path.exists()
    assert sleeper.returncode == -signal.SIGKILL
    assert ended(router)
    assert not path.exists()


def test_a_lab_ends_with_the_process_that_made_it() -> None:
    """When the process that holds a Lab is killed, the router and all that runs on the hosts end."""
    code = (
        "import sys\nfrom p2pavg.lab import Lab\nlab = Lab('lan-4').__enter__()\n"
        "child = lab.spawn('a', ['sleep', '1000'], start_new_session=True)\n"
        "print(lab.name, lab.state.pid, child.pid, flush=True)\nsys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    name, router, child = owner.stdout.readline().split()
    pidfds = [os.pidfd_open(int(router)), os.pidfd_open(int(child))]
    owner.kill()
    owner.wait()
    assert all(ended(pidfd) for pidfd in pidfds)
    assert not state.directory(name).exists()


def test_what_is_measured_in_a_lab_is_kept_where_a_file_is_named_for_it() -> None:
    """Paths of a lab are no real ones with the same addresses, and none of the next lab."""
    with Lab("lan-4") as lab:
        assert lab.environment("a", {"HOME": "/root"})["P2PAVG_PATHS"] == ""
        assert lab.environment("a", {"P2PAVG_PATHS": "/x"})["P2PAVG_PATHS"] == "/x"


def test_who_enters_a_lab_that_goes_down_ends(name: str, tmp_path: Path) -> None:
    """A program that was on its way into a host when the lab looked for whom to end is not left in there."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no compiler makes the library that stops a program on its way")
    shim, source = tmp_path / "entering.so", Path(__file__).with_name("entering.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(shim), str(source)], check=True)
    assert lab_verb("up", "lan-4", "--name", name).returncode == 0
    running = RunningLab(name)
    late = running.spawn("a", ["sleep", "1000"], env=os.environ | {"LD_PRELOAD": str(shim)})
    try:
        os.waitid(os.P_PID, late.pid, os.WSTOPPED | os.WNOWAIT)
        assert lab_verb("down", name).returncode == 0
        late.send_signal(signal.SIGCONT)
        assert late.wait(DEADLINE_S) == 1
    finally:
        late.kill()


def test_a_crashed_router_is_cleaned_up_by_name_and_nothing_else(name: str) -> None:
    """After the router was killed, `down` ends the processes of that lab, and those alone."""
    assert lab_verb("up", "lan-4", "--name", name).returncode == 0
    running = RunningLab(name)
    inside = running.spawn("a", ["sleep", "1000"], start_new_session=True)
    environment = {**os.environ, state.ENVIRONMENT_NAME: name}
    outside = subprocess.Popen(["sleep", "1000"], env=environment)
    with Lab("lan-4") as other:
        neighbour = other.spawn("a", ["sleep", "1000"])
        router = os.pidfd_open(running.state.pid)
        os.kill(running.state.pid, signal.SIGKILL)
        assert ended(router)
        assert inside.poll() is None
        assert lab_verb("down", name).returncode == 0
        assert inside.wait(DEADLINE_S) == -signal.SIGKILL
        assert outside.poll() is None
        assert neighbour.poll() is None
        assert other.stats().write_errors == 0
    outside.kill()
    outside.wait()
    assert lab_verb("down", name).returncode == 1


def test_a_name_is_taken_once_and_free_after_a_crash(name: str) -> None:
    """A second lab of the same name is refused in one line; after a crash the name can be used again."""
    assert lab_verb("up", "lan-4", "--name", name).returncode == 0
    second = lab_verb("up", "lan-4", "--name", name)
    assert second.returncode == 1
    assert f"lab down {name}" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    pid = RunningLab(name).state.pid
    router = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert ended(router)
    with pytest.raises(ConfigurationError, match="is up"):
        RunningLab(name)
    assert lab_verb("up", "lan-4", "--name", name).returncode == 0


def test_the_command_line_drives_a_lab(name: str) -> None:
    """up, exec, set, stats and down work on one lab from separate processes."""
    up = lab_verb("up", "two-300ms", "--name", name)
    assert "10.77.0.2" in up.stdout
    where = lab_verb(
        "exec", name, "b", "--", "sh", "-c", "echo $P2PAVG_LAB $P2PAVG_LAB_HOST $P2PAVG_LAB_ADDRESS"
    )
    assert where.stdout.split() == [name, "b", "10.77.0.2"]
    assert lab_verb("exec", name, "a", "--", "sh", "-c", "exit 7").returncode == 7
    assert lab_verb("set", name, "a:b", "--both", "delay_ms=10", "down=on", "cut=0:99").returncode == 0
    assert lab_verb("set", name, "a", "egress_mbps=7").returncode == 0
    settings = RunningLab(name).stats().settings
    assert settings["a", "b"]["delay_ns"] == settings["b", "a"]["delay_ns"] == 10e6
    assert settings["a", "b"]["down"]
    stats = json.loads(lab_verb("stats", name, "--json", "-").stdout)
    assert {(path["src"], path["dst"]) for path in stats["paths"]} == {("a", "b"), ("b", "a")}
    assert "router:" in lab_verb("stats", name).stdout
    assert lab_verb("down", name).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("set", "NAME", "a:b", "delay=3"), "no setting 'delay'"),
        (("set", "NAME", "a:b", "loss=1.5"), "fraction"),
        (("set", "NAME", "a:b", "loss=-1"), "at least 0"),
        (("set", "NAME", "a:b", "loss=x"), "not a value"),
        (("set", "NAME", "a:z", "loss=0"), "no host 'z'"),
        (("set", "NAME", "a", "cut=1:2"), "A:B"),
        (("exec", "NAME", "z", "--", "true"), "no host 'z'"),
        (("up", "no-such"), "no topology"),
        (("stats", "no-such"), "is up"),
    ],
)
def test_mistakes_get_one_line(name: str, words: tuple[str, ...], message: str) -> None:
    """A user's mistake is one line on stderr and exit code 1, and changes nothing."""
    lab_verb("up", "two-300ms", "--name", name)
    done = lab_verb(*[name if word == "NAME" else word for word in words])
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert RunningLab(name).stats().settings["a", "b"]["delay_ns"] == 150e6


def test_a_lab_inside_a_user_namespace(name: str) -> None:
    """Inside `unshare -Urn`, where the user is not root outside, a lab carries traffic."""
    code = (
        "import sys\nfrom p2pavg.lab import Lab\nwith Lab('lan-4', sys.argv[1]) as lab:\n"
        "    server = lab.spawn('b', [sys.executable, sys.argv[2], 'echo', '7'], stdout=-1)\n"
        "    server.stdout.readline()\n"
        "    print(lab.run('a', [sys.executable, sys.argv[2], 'ping', '10.77.0.2', '7', '3', '1000']))"
    )
    script = str(Path(__file__).parent / "traffic.py")
    unshare = ["unshare", "-Urn"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("user namespaces are not allowed here")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", code, name, script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rtts"]) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_lab_of_a_user_without_privilege() -> None:
    """A user without privilege, who may open /dev/net/tun, can use a lab."""
    python = shutil.which("python3", path="/usr/bin:/bin")
    as_nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    if python is None or subprocess.run([*as_nobody, python, "-c", "import p2pavg.lab"]).returncode != 0:
        pytest.skip("no Python 3.11 here that another user may run")
    verb = f"PYTHONDONTWRITEBYTECODE=1 {python} -m p2pavg.lab"
    name = f"test-{os.getpid()}"
    script = (
        "mount -t tmpfs none /mnt && mkdir /mnt/net && mknod -m 666 /mnt/net/tun c 10 200 && "
        f"mount --bind /mnt/net /dev/net && exec {' '.join(as_nobody)} sh -ec '"
        f"{verb} up lan-4 --name {name}; {verb} exec {name} a -- cat /proc/net/route; {verb} down {name}'"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "wan0" in done.stdout


PLACE = """
import json, os, sys, p2pavg.errors
routes = "10.77.0.2" in open("/proc/net/fib_trie").read().split()
place = [os.stat("/proc/self/ns/net").st_ino, routes, os.environ["P2PAVG_LAB_HOST"], sys.argv]
print(json.dumps([place, "torch" in sys.modules]))
"""


def test_a_forked_program_is_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that these tests fork from a warm interpreter is where the system would have started it."""
    words = [sys.executable, "-c", PLACE, "word"]
    with Lab("two-300ms") as lab:
        place, forked = json.loads(lab.run("b", words))
        assert forked
        assert place[1:] == [True, "b", ["-c", "word"]]
        assert json.loads(lab.run("b", ["env", f"PYTHONPATH={ROOT}", *words])) == [place, True]
        monkeypatch.setattr(subprocess, "Popen", Cold)
        assert json.loads(lab.run("b", words)) == [place, False]
