"""Files and texts that somebody else may have written, or a broken disk."""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np

from p2pavg import credentials
from p2pavg.credentials import Authority, Credentials, texts
from p2pavg.errors import ConfigurationError, CredentialError, StateError
from p2pavg.identity import Identity
from p2pavg.lab import topology
from p2pavg.monitor import history
from p2pavg.report import reading
from p2pavg.report.prices import EXAMPLE, PriceTable
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.files import blockfile, checkpoints
from tests.fuzz.target import Target, file_with, quiet
from tests.unit.report.reports import report

_ABOUT = checkpoints.About("run", b"s" * 32, "a model", "torch")


class _OneFile(checkpoints.Checkpoints):
    """Finds the file in memory, however it is named."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent, _ABOUT)
        self._path = path

    def paths(self) -> list[Path]:
        return [self._path]


def _checkpoint_files() -> list[bytes]:
    noise = np.random.default_rng(0).bytes(20_000)
    return [_checkpoint_file(buffer) for buffer in (bytes(64), noise + bytes(40_000) + b"ab" * 10_000)]


def _checkpoint_file(buffer: bytes) -> bytes:
    packed = msgpack.packb({"meta": {}, "buffers": [["t", len(buffer)]]}) + buffer
    blob = np.frombuffer(packed, np.uint8)
    manifest = state.describe(3, b"l" * 32, len(packed) - len(buffer), blob)
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoints.Checkpoints(folder, _ABOUT)
        path = saved.save(manifest, blob, [[2, b"l" * 32, 7, 8, 24, b"p" * 20]])
        assert path is not None
        return path.read_bytes()


def _parse_checkpoint(data: bytes) -> None:
    _OneFile(file_with(data)).newest()


def _block_files() -> list[bytes]:
    made = []
    for data in (bytes(100), b"ab" * 1500 + bytes(1000) + np.random.default_rng(0).bytes(1200)):
        file = io.BytesIO()
        blockfile.write(file, np.frombuffer(data, np.uint8), 1000, blockfile.Disk())
        made.append(len(data).to_bytes(4, "little") + file.getvalue())
    return made


def _parse_block_file(data: bytes) -> None:
    """The total as it stands before the table; what is allocated follows from the table that was checked."""
    total = int.from_bytes(data[:4], "little")
    file = io.BytesIO(data[4:])
    lengths = blockfile.read_table(file, total, 1000, len(data) - 4)
    assert 4 * len(lengths) <= len(data)
    for span in blockfile.read(file, lengths, np.zeros(total, np.uint8), 1000):
        assert span.stop <= total


_AUTHORITY = Authority.new("run")
_KEPT, _REQUEST = credentials.new_request()
_INVITATION = _AUTHORITY.invite(_REQUEST)


def _credentials() -> list[bytes]:
    lines = [
        _AUTHORITY.to_text(),
        credentials.new_secret("run"),
        _KEPT,
        _REQUEST,
        _INVITATION,
        _AUTHORITY.member().to_text(),
    ]
    bodies = []
    for text in lines:
        kind, fields = texts.from_text(text)
        bodies.append(bytes([texts.KINDS.index(kind)]) + msgpack.packb(fields))
    return bodies


def _parse_credentials(data: bytes) -> None:
    """As what its kind is for; when the first byte has its highest bit, as everything that it is not, too."""
    kind = texts.KINDS[data[0] % len(texts.KINDS)] if data else "member"
    text = f"p2pavg-{kind}:" + base64.urlsafe_b64encode(data[1:]).decode()
    users: dict[str, Callable[[], object]] = {
        "member": lambda: Credentials.load(text).context(server=True),
        "authority": lambda: Authority.load(text).invite(_REQUEST),
        "request": lambda: _AUTHORITY.invite(text),
        "invitation": lambda: credentials.accept(_KEPT, text),
        "request-key": lambda: credentials.accept(text, _INVITATION),
        "secret": lambda: Credentials.load(text),
        "certificate": lambda: credentials.certificate_key(data),
    }
    for use in users.values() if data[:1] >= b"\x80" else (users[kind], users["certificate"]):
        quiet(lambda _, use=use: use(), CredentialError)(data)  # type: ignore[misc]


def _parse_credentials_file(data: bytes) -> None:
    Credentials.load(file_with(data))


def _identities() -> list[bytes]:
    return [base64.b64encode(bytes(range(32))) + b"\n"]


def _parse_identity(data: bytes) -> None:
    Identity.load_or_create(file_with(data))


def _topologies() -> list[bytes]:
    files = Path(topology.__file__).parent / "topologies"
    return [path.read_bytes() for path in sorted(files.glob("*.toml"))]


def _parse_topology(data: bytes) -> None:
    topology.parse(data.decode(errors="replace"), "fuzzed").configuration()


def _reports() -> list[bytes]:
    lines = [report(epoch=epoch).to_json().encode() + b"\n" for epoch in (3, 4)]
    return [b"".join(lines), lines[0]]


def _parse_reports(data: bytes) -> None:
    """All that `p2pavg report` says of them."""
    run = reading.load([file_with(data)])
    history.words(history.summary(run, PriceTable({}, {})))


def _parse_prices(data: bytes) -> None:
    PriceTable.load(file_with(data)).hourly("us-east-1")


TARGETS = (
    Target("credentials", _parse_credentials, _credentials),
    Target("credentials-file", quiet(_parse_credentials_file, CredentialError), lambda: [_KEPT.encode()]),
    Target("identity-file", quiet(_parse_identity, ConfigurationError), _identities),
    Target("checkpoint", quiet(_parse_checkpoint, StateError), _checkpoint_files),
    Target("block-file", quiet(_parse_block_file, blockfile.MalformedFileError), _block_files),
    Target("topology", quiet(_parse_topology, ConfigurationError), _topologies),
    Target("reports", quiet(_parse_reports, ConfigurationError), _reports),
    Target("prices", quiet(_parse_prices, ConfigurationError), lambda: [EXAMPLE.encode()]),
)
