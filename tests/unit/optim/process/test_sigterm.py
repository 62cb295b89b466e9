from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import os, signal, sys, threading, time
from p2pavg.optim.process import sigterm
called_off = threading.Event()
class Optimizer:
    began = True
    def __init__(self, notice=0.3):
        sigterm.watch(self, notice)
    def call_off(self):
        called_off.set()
    def close(self, notice_s=None):
        print("left", round(notice_s, 1), flush=True)
        sigterm.forget(self)
def term():
    os.kill(os.getpid(), signal.SIGTERM)
"""
PROGRAMS = {
    "at the next step": (
        """
departing = [Optimizer(5.0), Optimizer(7.0)]
term()
assert sigterm.asked()
try:
    sigterm.obey()
finally:
    print("finally")
""",
        143,
        ["left 5.0", "left 7.0", "finally"],
    ),
    "in a step that waits for others": (
        """
departing = Optimizer(100.0)
term()
assert called_off.wait(20)
try:
    sigterm.obey()
finally:
    print("finally")
""",
        143,
        ["left 100.0", "finally"],
    ),
    "no step comes": (
        """
departing = Optimizer(0.1)
sigterm.SLACK_S = 0.1
term()
try:
    while True:
        time.sleep(0.01)
finally:
    print("finally")
""",
        143,
        ["finally"],
    ),
    "before it has trained": (
        """
Optimizer.began = False
departing = Optimizer(100.0)
try:
    term()
    time.sleep(50)
finally:
    print("finally")
""",
        143,
        ["finally"],
    ),
    "a second signal": (
        """
departing = Optimizer(100.0)
term()
try:
    term()
    time.sleep(50)
finally:
    print("finally")
""",
        143,
        ["finally"],
    ),
    "a training thread": (
        """
departing = Optimizer(5.0)
term()
try:
    threading.Thread(target=sigterm.obey).start()
    time.sleep(50)
finally:
    print("finally")
""",
        143,
        ["left 5.0", "finally"],
    ),
    "after the last one left": (
        """
departing = Optimizer()
departing.close(0.0)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
term()
time.sleep(50)
""",
        -15,
        ["left 0.0"],
    ),
    "the user's own handler": (
        """
signal.signal(signal.SIGTERM, lambda *_: print("mine"))
departing = Optimizer()
term()
assert not sigterm.asked()
departing.close(0.0)
term()
""",
        0,
        ["mine", "left 0.0", "mine"],
    ),
    "not in the main thread": (
        """
thread = threading.Thread(target=Optimizer)
thread.start()
thread.join()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
""",
        0,
        [],
    ),
    "a forked child": (
        """
departing = Optimizer()
child = os.fork()
if not child:
    time.sleep(50)
    os._exit(0)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
assert not sigterm.asked()
""",
        0,
        [],
    ),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_program_ends_as_it_should(what: str) -> None:
    """Whoever handles SIGTERM, in whatever thread or process, with or without a step: optimizers leave once,
    `finally` clauses run, and the exit code is that of the signal.
    """
    program, code, lines = PROGRAMS[what]
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program],
        capture_output=True,
        text=True,
        timeout=40,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.splitlines() == lines, done.stderr
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
