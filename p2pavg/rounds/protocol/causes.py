"""Why a ballot was refused, a round came to nothing, or samples are lost: codes, and words for people."""

from __future__ import annotations

from enum import StrEnum


class Objection(StrEnum):
    """Why a member does not accept a ballot."""

    WATCHER = "watcher"  # the member takes no part in rounds
    ELSEWHERE = "elsewhere"  # the member stands at another epoch or lineage
    PENDING = "pending"  # the member has not applied the last average
    BEHIND = "behind"  # the member has several averages to apply
    DEPARTING = "departing"
    PROMISED = "promised"  # the member promised a higher ballot
    BUSY = "busy"  # the member hears the leader of the ballot that it holds
    DEPOSED = "deposed"  # nothing got done under the leader of the ballot
    FAR_AHEAD = "far-ahead"  # no leader can have made so many attempts
    NO_LINK = "no-link"  # the member has no link to another member, which the refusal names


class Loss(StrEnum):
    """Why samples that a peer counted are in no average of the surviving lineage."""

    HEALED = "healed"  # the average of another camp took the place of the one that had the samples
    # A correction: so many samples that were named as lost are in the surviving lineage after all.
    HEALED_BACK = "healed back"
    LEFT = "left"  # the peer left, and no other peer took the samples
    # The peer left, and the samples were too old for the peers that stay.
    LEFT_BEHIND = "left, behind the others"
    LEFT_PERHAPS = "left, and its receiver may have them"


class Cause(StrEnum):
    """Why an attempt came to nothing, or why a member is left out of the epoch."""

    UNANSWERED = "unanswered"
    UNLINKED = "unlinked"
    MEETING = "meeting"
    WITHDRAWN = "withdrawn"
    SILENT_TO_SUCCESSOR = "silent-to-successor"
    IMPLAUSIBLE_BEGIN = "implausible-begin"
    IMPLAUSIBLE_READY = "implausible-ready"
    UNDECIDED = "undecided"
    GIVEN_UP = "given-up"
    QUESTION_GIVEN_UP = "question-given-up"
    ANOTHER_LEADS = "another-leads"
    ANOTHER_BALLOT = "another-ballot"
    ELSEWHERE = "elsewhere"
    PENDING = "pending"
    REFUSED = "refused"
    NOTHING_TO_AVERAGE = "nothing-to-average"
    WRONG_PARTS = "wrong-parts"
    WRONG_RESULT = "wrong-result"
    MUTE = "mute"
    LEADER_STANDS = "leader-stands"
    STALLED = "stalled"
    NO_DATA = "no-data"
    COMPLAINT = "complaint"
    LOST = "lost"
    LEADER_LOST = "leader-lost"
    HEALING = "healing"
    LATE = "late"
    OVERTOLD = "overtold"
    PENANCE = "penance"

    @property
    def words(self) -> str:
        """The cause in words, for people."""
        return _WORDS[self]


FORGIVABLE = frozenset({Cause.UNANSWERED, Cause.UNLINKED, Cause.WITHDRAWN, Cause.SILENT_TO_SUCCESSOR})
"""A peer that is left out for one of these said nothing wrong, and may come back within the epoch."""

OFFENCES = frozenset(Cause) - {Cause.LOST, Cause.LEADER_LOST, Cause.SILENT_TO_SUCCESSOR, Cause.PENANCE}
"""A peer that is left out for one of these hindered a round. A lost link is nobody's fault."""

NO_FAILURE = frozenset(
    {
        *(Cause.ANOTHER_LEADS, Cause.UNDECIDED, Cause.HEALING, Cause.GIVEN_UP, Cause.QUESTION_GIVEN_UP),
        *(Cause.LEADER_LOST, Cause.LOST, Cause.PENANCE, Cause.MEETING),
    }
)
"""An attempt that ended by one of these says nothing about how well its leader leads."""

_WORDS = {
    Cause.UNANSWERED: "a member did not answer the proposal",
    Cause.UNLINKED: "members have no link to each other",
    Cause.MEETING: "links between members are still coming up",
    Cause.WITHDRAWN: "its wait ended while the round began",
    Cause.SILENT_TO_SUCCESSOR: "did not answer the successor",
    Cause.IMPLAUSIBLE_BEGIN: (
        "it began a round with samples or weights that its members did not declare or cannot have"
    ),
    Cause.IMPLAUSIBLE_READY: "it declares more samples, or another weight, than it can have",
    Cause.UNDECIDED: "an earlier round is undecided",
    Cause.GIVEN_UP: "its leader gave it up",
    Cause.QUESTION_GIVEN_UP: "the question was given up",
    Cause.ANOTHER_LEADS: "another peer leads",
    Cause.ANOTHER_BALLOT: "a member holds another ballot",
    Cause.ELSEWHERE: "a member stands elsewhere",
    Cause.PENDING: "a member has not applied the last average yet",
    Cause.REFUSED: "a member refused",
    Cause.NOTHING_TO_AVERAGE: "nobody has anything to contribute",
    Cause.WRONG_PARTS: "a member told digests of other parts",
    Cause.WRONG_RESULT: "its result of a part is not that of the others",
    Cause.MUTE: "a member neither finished nor said why",
    Cause.LEADER_STANDS: "the leader's own transfer does not run",
    Cause.STALLED: "the transfer stalled, and nobody is to blame",
    Cause.NO_DATA: "its data did not move",
    Cause.COMPLAINT: "a member cannot go on",
    Cause.LOST: "a member was lost",
    Cause.LEADER_LOST: "its leader was lost",
    Cause.HEALING: "the leader goes to another state",
    Cause.LATE: "it did not finish long after most others had",
    Cause.OVERTOLD: "it told many more samples than it declared, so that the round came too early",
    Cause.PENANCE: "it hindered rounds before",
}
