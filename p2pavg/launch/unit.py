"""A systemd user unit for a keeper, where the machine lets users have such units that outlive their
sessions.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

UNIT = """\
[Unit]
Description=p2pavg {name} of run {run}
StartLimitIntervalSec=0

[Service]
ExecStart="@PYTHON@" -m p2pavg.launch.keeper "@FOLDER@"
StandardOutput=append:@FOLDER@/keeper.log
StandardError=append:@FOLDER@/keeper.log
Restart=on-abnormal
RestartSec=2
KillMode=mixed
TimeoutStopSec={stop_s:.0f}

[Install]
WantedBy=default.target
"""
# on-abnormal: a keeper that was killed is started again, and one that ended by itself, after a peer that has
# left or crashed too often, is not. mixed: SIGTERM goes to the keeper alone, which asks its peer to leave.

_PREPARED = 'export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"'
_USABLE = (
    "systemctl --user show-environment > /dev/null 2>&1 && "
    "{ loginctl enable-linger > /dev/null 2>&1 || true; "
    '[ "$(loginctl show-user "$(id -un)" --property=Linger --value 2> /dev/null)" = yes ]; }'
)
# In paths with other characters, a unit file would read some as its own signs.
_PLAIN = 'case "$D$PY" in *[!A-Za-z0-9/._@%+,:~\\ -]*) false ;; esac'
_FOLDER = '"$HOME/.config/systemd/user"'


def name_of(run: str, name: str) -> str:
    """Of the unit of a peer."""
    return f"p2pavg-{run}-{name}.service"


def starting(run: str, name: str, stop_s: float, otherwise: str) -> Sequence[str]:
    """Lines of a shell script that start the keeper of the folder `$D` by the Python `$PY`: as a unit, which
    the machine starts again with itself, or by the command `otherwise`.
    """
    unit = name_of(run, name)
    text = UNIT.format(run=run, name=name, stop_s=stop_s)
    return [
        _PREPARED,
        f"if {_PLAIN} && {_USABLE}; then",
        f"mkdir -p {_FOLDER}",
        "d=$(printf %s \"$D\" | sed 's/%/%%/g'); p=$(printf %s \"$PY\" | sed 's/%/%%/g')",
        f'printf %s {shlex.quote(text)} | sed "s|@FOLDER@|$d|g; s|@PYTHON@|$p|g" > {_FOLDER}/{unit}',
        f"systemctl --user daemon-reload && systemctl --user enable --now {unit} > /dev/null 2>&1",
        f"else {otherwise}",
        "fi",
    ]


def stopping(run: str, name: str) -> Sequence[str]:
    """Lines that let the machine forget the unit; where there is none, they do nothing."""
    unit = name_of(run, name)
    return [
        f"if [ -e {_FOLDER}/{unit} ]; then",
        _PREPARED,
        f"systemctl --user disable --now {unit} > /dev/null 2>&1 || true",
        f"rm -f {_FOLDER}/{unit}",
        "systemctl --user daemon-reload > /dev/null 2>&1 || true",
        "fi",
    ]
