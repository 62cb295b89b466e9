"""Files with secret content, for Python's ssl, which takes keys by path only."""

from __future__ import annotations

import os
import tempfile


class secret_file:
    """The path of a file with secret content, that no other user can read and that leaves no trace."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __enter__(self) -> str:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("p2pavg", os.MFD_CLOEXEC)
            os.write(self._descriptor, self._content)
            self._path = f"/proc/self/fd/{self._descriptor}"
        else:
            self._descriptor, self._path = tempfile.mkstemp()
            os.write(self._descriptor, self._content)
        return self._path

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
        if not self._path.startswith("/proc/"):
            os.unlink(self._path)
