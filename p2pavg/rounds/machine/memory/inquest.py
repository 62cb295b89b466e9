"""What a successor asks all members of a ballot, and what their answers decide."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pavg.rounds.protocol.ballot import Ballot, Held, PeerId, Stage


@dataclass(slots=True)
class Inquest:
    """The questions of one successor."""

    ballot: Ballot
    asked: dict[PeerId, float] = field(default_factory=dict)  # peer -> when it was asked
    # Peers of which nothing had been heard over their links, if they had any, when they were asked.
    unheard: set[PeerId] = field(default_factory=set)
    answers: dict[PeerId, Held | None] = field(default_factory=dict)
    dismissed: set[PeerId] = field(default_factory=set)  # peers that are unreachable, or stand elsewhere
    # Peer -> the first ballot that its process promised here.
    since: dict[PeerId, Ballot] = field(default_factory=dict)

    def witnesses(self) -> dict[PeerId, Held | None]:
        """The answers that count. A process that began to promise after the round in question knows nothing
        of
        that round: an earlier process of the same peer may have been DONE.
        """
        whole = (Stage.DONE, Stage.COMMITTED)
        done = [held.ballot for held in self.answers.values() if held is not None and held.stage in whole]
        if not done:
            return self.answers
        highest = max(done)
        new = {peer for peer, first in self.since.items() if first > highest}
        return {peer: held for peer, held in self.answers.items() if peer not in new}


def decide(answers: dict[PeerId, Held | None]) -> Held | None:
    """The ballot to commit, from what the reachable voters hold; None: abort. Pure.

    A ballot is to be committed when one voter has committed it, or when all of its voters that answered are
    DONE
    with equal digests: then the leader may have committed the ballot. If any voter is not DONE, nobody can
    have committed it.
    """
    for held in answers.values():
        if held is not None and held.stage is Stage.COMMITTED:
            return held
    done = [held for held in answers.values() if held is not None and held.stage is Stage.DONE]
    if not done:
        return None
    highest = max(done, key=lambda held: held.ballot)
    for peer, held in answers.items():
        if peer in highest.voters and (
            held is None
            or held.ballot != highest.ballot
            or held.stage is not Stage.DONE
            or held.digests != highest.digests
        ):
            return None
    return highest
