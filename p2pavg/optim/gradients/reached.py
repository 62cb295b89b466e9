"""Which microbatch reached which parameter, and what a gradient is that somebody assigned. Plain counting."""

from __future__ import annotations

from p2pavg.errors import ConfigurationError

EDITED = (
    "gradients were changed between backward() and step(), where they are sums of microbatches: to clip the "
    "averaged gradient, pass max_grad_norm=; to drop this peer's share of the epoch, call discard()"
)
ASSIGNED = (
    "some .grad were assigned, and it cannot be told whether they replace sums of several microbatches: "
    "assign them for all parameters, after zero_grad() and without backward(), and they are added"
)


class Reached:
    """A clock that counts microbatches, and for each parameter when a backward pass reached it last.

    Hooks write to `clock`, `seen` and `repeated` by themselves.
    """

    def __init__(self, count: int) -> None:
        self.clock = [0]
        self.seen = [-1] * (count + 1)  # by parameter; the last: any's
        self.repeated: dict[int, int] = {}  # parameters that this microbatch reached again, and how often
        self._cleared = 0  # the clock when sums and marks were cleared
        self._empty = 0  # the clock since which sums are 0; -1: other peers' are in them
        self._whole = 0  # the clock of the microbatch before which all views were seen in place
        self._fresh = True  # gradients that are not views now were assigned in this microbatch
        self._ended = 0  # 1: gradients are those of the microbatch before the clock's

    @property
    def pending(self) -> bool:
        """Whether a backward pass ran in this microbatch."""
        return self.seen[-1] == self.clock[0]

    @property
    def passes(self) -> int:
        """How many backward passes this microbatch had, as far as parameters tell."""
        return 1 + max(self.repeated.values()) if self.repeated else 1

    @property
    def alone(self) -> bool:
        """Whether nothing but this microbatch is in the sums."""
        return self.clock[0] - self._ended == self._empty

    def touched(self, index: int) -> bool:
        """Whether a backward pass reached the parameter since the sums were cleared."""
        return self.seen[index] >= self._cleared

    def touch(self, index: int) -> None:
        """Note that the parameter has sums of another origin than a backward pass."""
        self.seen[index] = max(self.seen[index], self._cleared)

    def assigned(self, index: int) -> None:
        """Note that a gradient was assigned to the parameter, which counts like a backward pass."""
        self.seen[index] = self.seen[-1] = self.clock[0] - self._ended

    def judge(self, one_displaced: bool) -> None:
        """Once per microbatch, before anything is put back: when were gradients assigned that are no views?

        One view was seen in place when the last microbatch ended; one_displaced: that parameter has another
        gradient now. Then all were assigned since.
        """
        self._fresh = self._whole == self.clock[0] or one_displaced

    def adds(self, index: int, loose: bool) -> bool:
        """Whether a gradient that is no view is one of the microbatch's own, and not a changed sum.

        loose: autograd itself put new tensors in the place of views. Raises ConfigurationError for what
        nobody can tell, or what changes sums of earlier microbatches.
        """
        if self.seen[index] == self.clock[0] - self._ended:
            if self.alone or loose:
                return False
            raise ConfigurationError(EDITED)
        if not (self._fresh or self.alone):
            raise ConfigurationError(ASSIGNED)
        return True

    def look_back(self, ended: bool) -> None:
        """ended: gradients found from now on are those of the microbatch that has ended, if one has."""
        self._ended = int(ended and not self.pending and self.clock[0] > self._empty)

    def end(self, whole: bool) -> None:
        """End a microbatch. whole: all views are in place."""
        self.clock[0] += 1
        self.repeated.clear()
        if whole:
            self._whole = self.clock[0]

    def installed(self) -> None:
        """Note that all views are in place."""
        self._whole = self.clock[0]

    def clear(self) -> None:
        """Note that sums and marks are 0."""
        self._cleared = self._empty = self._whole = self.clock[0] = self.clock[0] + 1
        self.repeated.clear()

    def filled(self) -> None:
        """Sums that are not of this epoch's microbatches were added: the next one is none of them."""
        self._empty = -1
        if not self.pending:
            self.end(whole=self._whole == self.clock[0])
