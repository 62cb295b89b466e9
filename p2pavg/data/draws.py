"""What this peer holds of the data: positions that it may draw, has given out, has trained on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pavg.data import notes
from p2pavg.data.ledger import PositionLedger
from p2pavg.data.notes import Said
from p2pavg.data.runs import (
    Run,
    Runs,
    by_pass,
    difference,
    first_piece,
    head,
    intersection,
    packed,
    pieces,
    size,
    union,
    unpacked,
)
from p2pavg.errors import ConfigurationError

AHEAD = 2.0  # a peer holds leases for so many epochs like its last one
MEANWHILE = 0.5  # of an epoch like this one may be drawn while a round is under way
PIECES = 256  # of a pass that are claimed one at a time, so that blocks of one sample make no endless list
MOST_CLAIM_RUNS = 4096
MOST_CLAIMED = 1 << 20  # positions of one peer, the lowest: others draw beyond these
MOST_AT_A_TIME = MOST_CLAIMED >> 4
MOST_FRUITLESS = 8  # iterations that end with a pass and train nothing; a look at a batch or two is none
BEYOND = 1 << 63  # all positions


@dataclass(frozen=True, slots=True)
class DrawFigures:
    """For the report of a round."""

    consumed: Sequence[tuple[int, int, int]]  # (pass, first, end) of positions, of all members
    passes: float  # over the data, as far as they are consumed
    blocks_consumed: int
    blocks_returned: int  # that this peer drew, and whose samples are in no average


class Draws:
    """A position goes from held to given out (to the loader), to trained (counted by a step()), to consumed.

    The training thread and the thread of delayed updates both come here. A peer never waits for a lease: when
    its own are used up it claims positions that nobody has a lease for, and says so with its next
    contribution. Should two peers draw the same position all the same, the leader counts one of the two, and
    the other's accumulation is `spoiled`.
    """

    def __init__(self, length: int, block: int) -> None:
        """length: positions of a pass. block: how many are drawn together."""
        self.length = length
        self._block = block
        self._piece = -(-max(block, min(length // PIECES, MOST_AT_A_TIME)) // block) * block
        self._lock = threading.RLock()
        self._me: bytes | None = None
        self._peers: Callable[[], Collection[bytes]] = tuple
        self._tell: Callable[[], None] = lambda: None
        self._claims: dict[bytes, Runs] = {}  # what others hold without a lease, by name
        self._yielded: Runs = ()  # of what was given out or trained, what others claimed too and keep
        self._yielded_to: set[bytes] = set()  # since this peer's samples were last in an average
        self.ledger = PositionLedger()
        self._held: Runs = ()  # leases and claims, whatever became of them until they are consumed
        self._ready: Runs = ()  # of those, what was not given out
        self._out: tuple[Run, ...] = ()  # in the order in which it was given out
        self._ended = False  # the loader came to the end of a pass, and nothing was trained since
        self._fruitless = 0  # loaders in a row that did, and gave nothing to train
        self._trained: tuple[Run, ...] = ()  # in the order in which it was trained
        self._declared = 0  # positions in the contribution under way
        self._epoch_drew = 0  # positions in the last contribution that was counted
        self._inherited: Runs = ()  # of those trained, what was leased to a peer that left
        self._returned = 0

    def attach(self, me: bytes, peers: Callable[[], Collection[bytes]], tell: Callable[[], None]) -> None:
        """This peer's id is known. peers: the ids of the others. tell: called when `claims` has changed."""
        with self._lock:
            self._me, self._peers, self._tell = notes.name(me), peers, tell
            self._refresh()

    # ---------------------------------------------------------------------- the loader

    def begin(self) -> None:
        """A loader begins anew: what an earlier one was given and no step() counted is given out again.

        Raises ConfigurationError when many in a row came to the end of the pass, and nothing was trained: it
        would be the same for ever.
        """
        with self._lock:
            self._fruitless += self._ended and bool(self._out)
            if self._fruitless >= MOST_FRUITLESS:
                raise ConfigurationError(
                    f"the loader came to the end of the pass, and none of the last {size(self._out)} samples "
                    "reached a step(): where it drops a short last batch, use SwarmSampler(..., "
                    "endless=True) or drop_last=False"
                )
            self._ended = False
            self._out = ()
            self._refresh()

    def next_run(self, current_pass: int | None, most: Callable[[int], int]) -> Run | None:
        """The next positions to draw, which are now given out; None when they belong to another pass than
        that.

        most: at most how many positions from this one on, all of its pass.
        """
        with self._lock:
            if self._me is None:
                raise ConfigurationError(
                    "this sampler draws for no run yet: pass it as CollaborativeOptimizer(..., sampler=) "
                    "before a loader iterates it"
                )
            if not self._ready:
                self._claim()
                self._tell()
            first, end = self._ready[0]
            if current_pass is not None and first // self.length != current_pass:
                self._ended = True
                return None
            run = first, min(end, first + most(first))
            self._ready = self._ready[1:] if run[1] == end else ((run[1], end), *self._ready[1:])
            self._out = _appended(self._out, run)
            return run

    def _claim(self) -> bool:
        """Of what the ledger leaves free, each of n peers takes every n-th piece: those that know each other
        and stand at the same round never meet, though nobody waits to hear what others claim. Each begins
        somewhere else in the pass, by its name, so that those that know different peers hardly ever meet;
        who is alone draws the lowest first. Returns whether there was one to take.
        """
        me = self._me or b""
        names = sorted({me, *map(notes.name, self._peers())})
        taken = union(self._held, self._out, self._trained, *self._claims.values())
        free, mine = self._free(), (names.index(me), len(names))
        of_pass = intersection(free, ((0, (free[0][0] // self.length + 1) * self.length),))
        begins = 0
        if len(names) > 1:
            begins = int.from_bytes(me, "big") * pieces(of_pass, self._piece) >> 8 * notes.NAME_BYTES
        piece = first_piece(of_pass, taken, self._piece, *mine, begins)
        piece = piece or first_piece(free, taken, self._piece, *mine)
        self._held = union(self._held, piece)
        self._refresh()
        return bool(piece)

    def _free(self) -> Runs:
        """What nobody has a lease for and is not consumed; beyond all that is, in a run of its own."""
        used = union(self.ledger.consumed, *self.ledger.leases.values())
        end = -(-(used[-1][1] if used else 0) // self._piece) * self._piece
        return (*difference(((0, end),), used), (end, BEYOND))

    # ---------------------------------------------------------------------- the training loop

    def trained(self, samples: int) -> None:
        """A step() counted so many samples: the next ones that were given out. Raises ConfigurationError."""
        with self._lock:
            if size(self._out) < samples:
                raise ConfigurationError(
                    f"step() counts {samples} samples, but the sampler gave out only {size(self._out)} "
                    "that are not counted yet: count each batch of its loader once, and nothing else"
                )
            gone, self._out = head(self._out, samples)
            self._trained += gone
            self._ended, self._fruitless = False, 0

    @property
    def yielded(self) -> int:
        """How many samples must be dropped now: all that wait to be handed in, if any of them is yielded."""
        with self._lock:
            waiting = head(self._trained, self._declared)[1] if self._yielded else ()
            return size(waiting) if intersection(union(waiting), self._yielded) else 0

    @property
    def spoiled(self) -> bool:
        """Whether another peer's samples are among those that this one accumulated."""
        with self._lock:
            return bool(intersection(union(self._trained), self._elsewhere()))

    def say(self, inner: bytes, samples: int) -> bytes:
        """The note of a contribution with so many samples, around the optimizer's own."""
        with self._lock:
            self._declared = samples
            drawn = union(head(self._trained, samples)[0])
            # What is claimed while the round is under way the others would hear of too late.
            if size(self._ready) < (meanwhile := min(int(MEANWHILE * samples), self.length)):
                while size(self._ready) < meanwhile and self._claim():
                    pass
                self._tell()
            most = max(samples, self._epoch_drew)
            wanted = size(self._out) + size(self._trained) - samples + int(AHEAD * most)
            return notes.say(inner, Said(drawn, self._unleased(), wanted))

    def combine(
        self, said: Mapping[bytes, bytes], members: Sequence[bytes], leader: bytes
    ) -> tuple[bytes, frozenset[bytes]]:
        """As the leader: see `notes.combine`."""
        with self._lock:
            return notes.combine(said, members, leader, self.ledger.consumed, self._claims)

    def committed(self, note: bytes, epoch: int, counted: bool) -> None:
        """The average of `epoch` is in the parameters. counted: with this peer's contribution."""
        with self._lock:
            if counted:
                self._trained = head(self._trained, self._declared)[1]
                self._epoch_drew = self._declared
                self._yielded_to.clear()
            self._declared = 0
            for gone in self.ledger.commit(epoch, notes.understand(note)[1]):
                self._claims.pop(gone, None)
            self._refresh()

    def dropped(self, since: int = 0) -> None:
        """All accumulated samples but the last `since` are discarded: they are drawn again."""
        with self._lock:
            gone, self._trained = head(self._trained, size(self._trained) - since)
            self._returned += size(gone)
            self._refresh()

    def inherited(self, note: bytes) -> bool:
        """Take over the samples of a peer that leaves. False: some are known here already."""
        understood = notes.heard(note)
        with self._lock:
            known = union(self.ledger.consumed, self._trained, self._out)
            if understood is None or intersection(understood[1].drawn, known):
                return False
            drawn = understood[1].drawn
            self._held = union(self._held, drawn)
            self._inherited = union(self._inherited, drawn)
            self._trained += drawn
            self._refresh()  # they may be leased to this peer, and must not be drawn once more
            return True

    # ---------------------------------------------------------------------- others

    def claims(self) -> list[int]:
        """What this peer holds without a lease, for the others; packed."""
        with self._lock:
            return packed(self._unleased())

    def heard(self, peer: bytes, claims: Any) -> None:
        """Another peer told its `claims`. Raises ValueError for what is none.

        Two that claimed the same before they heard of each other find out here, long before a round: the
        larger name yields, and so loses what it trained on since, not an epoch. It yields to each peer
        once from one average of its samples to the next, whatever that peer claims.
        """
        name, runs = notes.name(peer), head(unpacked(claims, MOST_CLAIM_RUNS), MOST_CLAIMED)[0]
        with self._lock:
            if name not in self._claims and len(self._claims) >= notes.MOST_MEMBERS:
                return
            self._claims[name] = runs
            if self._me is None or name >= self._me or name in self._yielded_to:
                return
            if both := difference(intersection(self._unleased(), runs), self._inherited):
                self._yielded_to.add(name)
                self._yielded = union(self._yielded, both)
                self._refresh()
                self._tell()

    def figures(self, note: bytes) -> DrawFigures:
        """What a report says of a round."""
        with self._lock:
            consumed = by_pass(notes.understand(note)[1].consumed, self.length)
            done = size(self.ledger.consumed)
            return DrawFigures(
                consumed, done / self.length, done // self._block, self._returned // self._block
            )

    def state_dict(self) -> dict[str, Any]:
        """The ledger, which belongs to the swarm's state."""
        with self._lock:
            return self.ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Another state of the swarm took the place of this peer's; `dropped` tells what that cost.
        Raises StateError.
        """
        with self._lock:
            self.ledger.load_state_dict(state)
            self._refresh()

    def _elsewhere(self) -> Runs:
        """What is consumed, or another peer's to draw."""
        leased = self.ledger.leased_to_others(self._me or b"")
        return union(self.ledger.consumed, difference(leased, self._inherited), self._yielded)

    def _unleased(self) -> Runs:
        lease = self.ledger.leases.get(self._me or b"", ())
        gone = union(lease, self.ledger.consumed, self._yielded)
        return difference(union(self._held, self._out, self._trained), gone)

    def _refresh(self) -> None:
        """The ledger or what was given out changed: what is this peer's to give out now."""
        lease = self.ledger.leases.get(self._me or b"", ())
        self._inherited = intersection(self._inherited, union(self._trained))
        self._yielded = difference(self._yielded, lease)  # the ledger decides
        self._held = difference(union(self._held, lease), self._elsewhere())
        self._yielded = intersection(self._yielded, union(self._out, self._trained))
        self._ready = difference(self._held, union(self._out, self._trained))
        left = {peer: difference(runs, self.ledger.consumed) for peer, runs in self._claims.items()}
        self._claims = {peer: runs for peer, runs in left.items() if runs}


def _appended(runs: tuple[Run, ...], run: Run) -> tuple[Run, ...]:
    """In order; a run that goes on where the last one ended makes it longer."""
    if runs and runs[-1][1] == run[0]:
        return (*runs[:-1], (runs[-1][0], run[1]))
    return (*runs, run)
