"""A Python process that has imported torch and p2pavg, and becomes programs by forking: imports cost one
seconds of a processor, a fork hundredths.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MOST = 1 << 20  # bytes of a request
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
OTHERS = ("hf", "lightning", "bench")  # they import frameworks that few programs need
_libraries: dict[str, ModuleType] = {}


@dataclass
class Program:
    """What a process becomes. words: those behind `python`. host: of a lab, as `_router enter` takes it."""

    words: list[str]
    env: dict[str, str]
    host: tuple[int, int] | None = None
    folder: str | None = None
    session: bool = False


def wait(descriptor: int) -> Program:
    """Import all, then fork a process for each program asked for at the socket; returns in those alone."""
    _import_all()
    control = socket.socket(fileno=descriptor)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is for those that were forked
        while True:
            request, streams, _, _ = socket.recv_fds(control, MOST, 3)
            if not request:
                break
            told, tell = os.pipe()
            child = os.fork()
            if child == 0:
                between = os.getpid()
                grandchild = os.fork()
                if grandchild == 0:
                    while os.getppid() == between:
                        time.sleep(1e-4)
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                    control.detach()
                    os.closerange(3, max(descriptor, told, tell, *streams) + 1)
                    return Program(**json.loads(request))
                os.write(tell, str(grandchild).encode())
                os._exit(0)
            os.waitpid(child, 0)  # so the program is an orphan now, and a child of whom asked
            control.send(os.read(told, 32))
            for opened in (told, tell, *streams):
                os.close(opened)
    os._exit(0)


@atexit.register  # before all others, so it comes after them
def _leave_libraries() -> None:
    """A program's own modules and p2pavg's end with it, one by one; of the libraries that would take long."""
    for name in _libraries:
        sys.modules.pop(name, None)


def _import_all() -> None:
    early = set(sys.modules)
    import numpy
    import torch

    import p2pavg

    folder = Path(p2pavg.__path__[0])
    for file in sorted(folder.rglob("*.py")):
        room = file.relative_to(folder).parts
        if room[0] not in OTHERS and not file.name.startswith("__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(["p2pavg", *room[:-1], file.stem]))
    torch.optim.SGD(
        [torch.nn.Parameter(torch.zeros(1))]
    )  # the first optimizer of a process imports for seconds
    os.register_at_fork(after_in_child=numpy.random.seed)  # as `random` does
    _libraries.update(
        (name, module)
        for name, module in sys.modules.items()
        if name not in early and not name.startswith("p2pavg")
    )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_libraries))
    gc.collect()
    gc.freeze()


def run(program: Program) -> None:
    """Be `python WORDS`: ends as that ends."""
    if program.host is not None:
        _enter(*program.host)
    if program.session:
        os.setsid()
    if program.folder is not None:
        os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.env)
    _open_streams()
    words = program.words
    sys.orig_argv = [sys.executable, *words]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    path = [place for place in program.env.get("PYTHONPATH", "").split(os.pathsep) if place]
    if words[0] == "-m":
        sys.path[:0] = [os.getcwd(), *path]
        sys.argv = ["-m", *words[2:]]
        sys.modules.pop(words[1], None)
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.path[:0] = ["", *path]
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.path[:0] = [os.path.dirname(os.path.abspath(words[0])), *path]
        sys.argv = words
        main.__file__ = words[0]
        with io.open_code(os.path.abspath(words[0])) as file:
            code = compile(file.read(), words[0], "exec")
        exec(code, main.__dict__)


def _enter(process: int, descriptor: int) -> None:
    """Move into the network namespace that a process holds open, out of its user namespace if need be."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    door = f"/proc/{process}/fd/{descriptor}"
    opened = os.open(door, os.O_RDONLY)
    if setns(opened, CLONE_NEWNET) < 0:
        user = os.open(f"/proc/{process}/ns/user", os.O_RDONLY)
        if setns(user, CLONE_NEWUSER) < 0 or setns(opened, CLONE_NEWNET) < 0:
            raise OSError(ctypes.get_errno(), "cannot enter the host's namespace")
        os.close(user)
    if os.stat(door).st_ino != os.fstat(opened).st_ino:  # as `_router enter`: the lab may be gone
        raise ProcessLookupError("the lab is going down")
    os.close(opened)


def _open_streams() -> None:
    """As the interpreter opens them when it starts."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    old: Any = sys.stdin
    sys.stdin = sys.__stdin__ = open(  # noqa: SIM115
        0, encoding=old.encoding, errors=old.errors, closefd=False
    )
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        raw: Any = open(descriptor, "wb", 0 if at_once else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=name == "stderr" or os.isatty(descriptor),
            write_through=at_once,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
