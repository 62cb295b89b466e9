"""Feedback: what a coarse codec took from this peer's contributions, added to the next ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.encoding import Owed
from p2pavg.codecs import Codec, encode_feedback

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BYTES = 2  # of a bfloat16


class Residual:
    """By how much the averages so far fall short, element by element, through the rounding of this peer.

    With the share s of a round (own weight / all weights), the mean m and c that was sent for it, the average
    fell short by s·(m - c). A later round with another share s' makes up for r by sending m + r/s'. So the
    averages add up to what they would be without rounding, but for the last residual, whatever the weights.

    An element that is 0 in the contribution is sent as 0, and its residual waits: what no backward pass
    reached must not move.

    Kept as bfloat16, once as of the last commit and once as of the attempt under way: 4 bytes an element.
    """

    def __init__(self, numel: int, allocate: Callable[[int], U8] | None = None) -> None:
        """allocate: host memory, uint8[n], of any content; None: ordinary memory."""
        size = BYTES * numel
        if allocate is None:
            self._committed, self._pending = np.zeros(size, np.uint8), np.empty(size, np.uint8)
        else:
            self._committed, self._pending = allocate(size), allocate(size)
            self.forget()

    def encode(self, codec: Codec, start: int, values: F32, scale: float, out: U8, share: float) -> bool:
        """out <- the encoded values * scale, elements from `start` on, with what is owed; whether all was
        finite.

        An attempt encodes every element once, and `commit` makes what that lost the residual. After one that
        failed, the next begins from the same residual.
        """
        kept = slice(BYTES * start, BYTES * (start + len(values)))
        return encode_feedback(codec, values, scale, self._committed[kept], share, out, self._pending[kept])

    def owed(self, share: float) -> Owed:
        """What `encode` takes and gives, for whoever encodes elsewhere."""
        return Owed(self._committed, self._pending, share)

    def commit(self) -> None:
        """The attempt that was encoded last is in the average."""
        self._committed, self._pending = self._pending, self._committed

    def forget(self) -> None:
        """The parameters are another peer's now: what they lack is not known."""
        self._committed.fill(0)
