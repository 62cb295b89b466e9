"""Feedback: what a coarse codec took from this peer's contributions, added to the next ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.codecs import Codec

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


class Residual:
    """By how much the averages so far fall short, element by element, through the rounding of this peer.

    With the share s of a round (own weight / all weights), the mean m and c that was sent for it, the average
    fell short by s·(m - c). A later round with another share s' makes up for r by sending m + r/s'. So the
    averages add up to what they would be without rounding, but for the last residual, whatever the weights.

    An element that is 0 in the contribution is sent as 0, and its residual waits: what no backward pass
    reached must not move.

    Kept as bfloat16, once as of the last commit and once as of the attempt under way: 4 bytes an element.
    """

    def __init__(self, numel: int) -> None:
        self._store = codecs.get("bf16")
        self._committed: U8 = np.zeros(self._store.encoded_size(numel), np.uint8)
        self._pending: U8 = np.empty_like(self._committed)
        self._scratch: tuple[F32, F32] = (np.empty(0, np.float32), np.empty(0, np.float32))

    def encode(self, codec: Codec, start: int, mean: F32, out: U8, share: float) -> bool:
        """out <- encode(mean + what is owed); whether all was finite.

        An attempt encodes every element once, and `commit` makes what that lost the residual. After one that
        failed, the next begins from the same residual.
        """
        n, by = len(mean), np.float32(share)
        if len(self._scratch[0]) < n:
            self._scratch = (np.empty(n, np.float32), np.empty(n, np.float32))
        owed, sent = (scratch[:n] for scratch in self._scratch)
        kept = slice(self._store.encoded_size(start), self._store.encoded_size(start + n))
        self._store.decode(self._committed[kept], owed)
        with np.errstate(all="ignore"):
            wanted = np.divide(owed, by, out=sent)
            np.copyto(wanted, 0, where=mean == 0)
            wanted += mean
            finite = codec.encode(wanted, out, 1.0)
            codec.decode(out, sent)
            short = np.subtract(mean, sent, out=sent)
            short *= by
            short += owed
        self._store.encode(short, self._pending[kept], 1.0)
        return finite

    def commit(self) -> None:
        """The attempt that was encoded last is in the average."""
        self._committed, self._pending = self._pending, self._committed

    def forget(self) -> None:
        """The parameters are another peer's now: what they lack is not known."""
        self._committed.fill(0)
