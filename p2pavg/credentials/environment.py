"""Credentials that come in the environment, which every child process would inherit."""

from __future__ import annotations

import os

from p2pavg.credentials import texts

VARIABLE = "P2PAVG_CREDENTIALS"
_line: str | None = None  # the secret line that was in the environment


def from_environment() -> str | None:
    """The value of P2PAVG_CREDENTIALS: a path, or the line itself; None: not set.

    A line is a secret. It is taken out of the environment, so that children of this process (workers that
    load data, shells) do not get it, and kept here for later calls.
    """
    global _line
    source = os.environ.get(VARIABLE)
    if not source:
        return _line
    if texts.is_line(source):
        _line = source
        del os.environ[VARIABLE]
    else:
        _line = None  # the environment names a path since
    return source
