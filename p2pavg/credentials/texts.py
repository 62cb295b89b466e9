"""The texts in which credentials travel: one line, or a file that holds it.

"p2pavg-KIND:" and base64 of a msgpack map.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from p2pavg.errors import ConfigurationError, CredentialError

MAX_TEXT = 1 << 20
_SECRET = re.compile(r"[\w+=-]{40}")
KINDS = ("authority", "secret", "request-key", "request", "invitation", "member")


def to_text(kind: str, fields: Mapping[str, Any]) -> str:
    """One line that carries `fields`."""
    return f"p2pavg-{kind}:" + base64.urlsafe_b64encode(msgpack.packb(dict(fields))).decode()


def from_text(text: str, where: str = "these") -> tuple[str, dict[str, Any]]:
    """(kind, fields) of a line that `to_text` made. where: what holds it, in words. Raises CredentialError
    for other texts.
    """
    if not text.strip():
        raise CredentialError(f"{where}: nothing is in there; look what the command said that wrote it")
    head, _, body = text.strip().partition(":")
    kind = head.removeprefix("p2pavg-")
    if not head.startswith("p2pavg-") or kind not in KINDS or len(text) > MAX_TEXT:
        are = "these are not" if where == "these" else f"{where}: no"
        raise CredentialError(
            f"{are} credentials of p2pavg; give the file, or the text, that 'p2pavg credentials' made"
        )
    try:
        fields = msgpack.unpackb(base64.b64decode(body, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, msgpack.UnpackException):
        fields = None
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise CredentialError(f"the {kind} is damaged; copy the whole line again")
    return kind, fields


def is_line(text: str) -> bool:
    """Whether the text looks like a line of credentials, rather than like a path."""
    return any(text.strip().startswith(f"p2pavg-{kind}:") for kind in KINDS)


def read(source: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The line in a file, or the text itself when it is a line. A file that others can read is refused."""
    if not isinstance(source, (str, os.PathLike)):
        raise CredentialError(
            f"credentials are given as a path, or as the line itself, not as {type(source).__name__}"
        )
    text = str(source)
    if is_line(text):
        return from_text(text)
    path = Path(text)
    try:
        path = path.expanduser()
        with path.open("rb") as file:
            mode = os.fstat(
                file.fileno()
            ).st_mode  # of the open file: its name may stand for another one later
            content = file.read(MAX_TEXT + 1).decode()
    except (OSError, ValueError, RuntimeError) as error:  # not UTF-8, an impossible path, or no such home
        why = error.strerror if isinstance(error, OSError) else "it is no text, or no path"
        name = (
            "" if _SECRET.search(text) else f" {path}"
        )  # the "path" may be a secret line whose beginning is damaged
        raise CredentialError(f"cannot read the credentials file{name} ({why})") from None
    if mode & 0o077 and from_text(content, str(path))[0] not in ("request", "invitation"):
        raise CredentialError(f"others can read {path}; run 'chmod 600 {path}' first")
    return from_text(content, str(path))


def write(path: str | os.PathLike[str], text: str) -> None:
    """Store a secret line, readable by its owner only. Raises ConfigurationError; never overwrites."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigurationError(f"{path} exists already; name another file, or remove it first") from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {path} ({error.strerror}); name a writable file") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")


def field(fields: Mapping[str, Any], name: str, kind: type, size: int | None = None) -> Any:
    """One field of a line, of this type and length. Raises CredentialError."""
    value: Any = fields.get(name)
    if type(value) is not kind or (size is not None and len(fields[name]) != size):
        raise CredentialError("these credentials are damaged, or of another version of p2pavg; make new ones")
    return value


def replace(path: str | os.PathLike[str], text: str) -> None:
    """Replace the secret line in a file, at once or not at all. Raises ConfigurationError."""
    draft = Path(f"{os.fspath(path)}.{os.getpid()}.new")
    write(draft, text)
    try:
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigurationError(f"cannot write {path} ({error.strerror}); name a writable file") from None
