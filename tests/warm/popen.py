"""`subprocess.Popen` for programs of this repository: forked from one that has imported what they need."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from p2pavg.lab.lab import ROUTER

ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
# Read by the interpreter or by libraries as they start: programs that are told others are started anew.
EARLY = re.compile(r"PYTHON(?!PATH$|UNBUFFERED$)|(OMP|MKL|OPENBLAS|TORCH|LD|MALLOC|CUDA|MPL)_|P2PAVG_NATIVE$")
OURS = re.compile(r"(p2pavg(?!\.(lab|launch)\b)|bench|tests)\b")
Cold = subprocess.Popen


class Interpreter:
    """One warm interpreter. hash_seed: of its sets of strings, so of those of its programs."""

    def __init__(self, hash_seed: int) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path[0] = {str(ROOT)!r}; from tests.warm import interpreter as i; "
        code += f"p = i.wait({theirs.fileno()}); sys.path[:] = {_bare_path()!r}; i.run(p)"
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONUNBUFFERED")}
        env["PYTHONHASHSEED"] = str(hash_seed)
        with theirs:
            self._process = Cold(
                [sys.executable, "-c", code],
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, program: Mapping[str, Any], streams: Sequence[int]) -> int:
        """The id of a new process, a child of this one."""
        with _adopting():
            socket.send_fds(self._control, [json.dumps(program).encode()], streams)
            return int(self._control.recv(32))


def _bare_path() -> list[str]:
    """sys.path of an interpreter without PYTHONPATH and program."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = {"", str(ROOT), *named} if any(named) else {""}
    return [place for place in sys.path if place not in own]


@contextmanager
def _adopting() -> Iterator[None]:
    """Orphaned descendants become children of this process, until then."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class Warm(subprocess.Popen):  # type: ignore[type-arg]
    """Starts `python ...` from a warm interpreter where the program cannot tell; all else as ever."""

    _lock = threading.Lock()
    _interpreters: list[Interpreter] = []  # noqa: RUF012
    _turns = itertools.count()

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell = more[:7]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = more[7:13]
        _, gid, gids, uid, umask, session, *group = more[13:]
        plain = close_fds and not (shell or pass_fds or preexec_fn or executable)
        plain = plain and (gid, gids, uid, umask, *group) in ((None,) * 3 + (-1, -1), (None,) * 3 + (-1,))
        program = _program(args, os.environ if env is None else env) if plain else None
        if program is None:
            super()._execute_child(args, executable, preexec_fn, *more)  # type: ignore[misc]
            return
        program |= {"folder": os.path.abspath(cwd or os.curdir), "session": bool(session)}
        given = (p2cread, c2pwrite, errwrite)
        streams = [number if stream == -1 else stream for number, stream in enumerate(given)]
        with self._lock:
            if not self._interpreters:
                self._interpreters.extend([Interpreter(1), Interpreter(2)])
            interpreter = self._interpreters[next(self._turns) % 2]  # sets differ in order from peer to peer
            self.pid = interpreter.start(program, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _program(args: Any, env: Mapping[str, str]) -> dict[str, Any] | None:
    """What to tell an interpreter; None: start it anew."""
    if isinstance(args, (str, bytes, os.PathLike)):
        return None
    words = [os.fspath(word) for word in args]
    host, env = None, dict(env)
    if words[:2] == [str(ROUTER), "enter"]:  # a program on a host of a lab
        host, words = [int(word) for word in words[2:4]], words[4:]
        if words[:1] == ["env"]:
            words = words[1:]
            while words and "=" in words[0]:
                env.update([words.pop(0).split("=", 1)])
    if len(words) < 2 or words[0] != sys.executable or _early(env) != _early(os.environ):
        return None
    if words[1] in ("-c", "-m"):
        if len(words) < 3 or not (OURS.match if words[1] == "-m" else OURS.search)(words[2]):
            return None
    elif not words[1].startswith(str(ROOT / "examples")) and not words[1].startswith("examples/"):
        return None
    path = {os.path.abspath(place) for place in env.get("PYTHONPATH", "").split(os.pathsep) if place}
    if not path <= {str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}:
        return None
    return {"words": words[1:], "env": env, "host": host}


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if EARLY.match(name)}
