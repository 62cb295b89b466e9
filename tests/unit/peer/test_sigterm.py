"""SIGTERM to a process that has a Peer and no optimizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import asyncio, os, signal, sys, threading, time
from p2pavg import Peer
from p2pavg.peer.runtime import Runtime

close = Runtime.close

async def told(self, notice_s):
    await close(self, notice_s)
    print("left", flush=True)

Runtime.close = told

def start():
    return Peer("run", initial_peers=[], listen="127.0.0.1:0").start()

def term():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(50)
"""
PROGRAMS = {
    "a script": ("peer = start()\nterm()", 143, ["left"]),
    "a with block of asyncio": (
        """
async def main():
    async with Peer("run", initial_peers=[], listen="127.0.0.1:0"):
        asyncio.get_running_loop().call_soon(term)
        await asyncio.sleep(50)

asyncio.run(main())
""",
        143,
        ["left"],
    ),
    "after the last one left": (
        "start().close()\nassert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\nterm()",
        -15,
        ["left"],
    ),
    "the user's own handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\npeer = start()\nterm()",
        3,
        ["left"],
    ),
    "a forked child": (
        """
peer = start()
child = os.fork()
if not child:
    term()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
peer.close()
""",
        0,
        ["left"],
    ),
    "an optimizer that left before": (
        """
from p2pavg.optim.process import sigterm
class Optimizer:
    began = True
peer, optimizer = start(), Optimizer()
sigterm.watch(optimizer, 5.0)
sigterm.forget(optimizer)
term()
""",
        143,
        ["left"],
    ),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_peer_leaves_on_sigterm(what: str) -> None:
    """It is closed, once, whatever the program does; who has left, or is a child, dies as by default."""
    program, code, lines = PROGRAMS[what]
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.splitlines() == lines, done.stderr
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
