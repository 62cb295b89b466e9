"""The states of a member of the rounds and what leads from one to another: a drawing, and its legend."""

from __future__ import annotations

from collections.abc import Callable
from math import hypot

from p2pavg.rounds.machine.memory.state import MemberState
from pages.markdown import table

S = MemberState
TURNS: dict[tuple[MemberState, MemberState], str] = {  # a test holds them against simulated rounds
    (S.JOINING, S.COUNTING): "state and results are in, or the download is given up",
    (S.COUNTING, S.JOINING): "the others are ahead, or another lineage wins",
    (S.COUNTING, S.PROMISED): "PREPARE came, or this member proposes itself",
    (S.PROMISED, S.COUNTING): "ABORTED, a newer PREPARE, or the leader is lost before BEGIN",
    (S.PROMISED, S.AVERAGING): "BEGIN",
    (S.PROMISED, S.DENIED): "a successor asks, and is told that this member is not DONE",
    (S.PROMISED, S.APPLYING): "a ballot is given up by a member that has an average to apply",
    (S.AVERAGING, S.DONE): "the whole result is here: DONE is told to the leader",
    (S.AVERAGING, S.COUNTING): "ABORTED, or a newer PREPARE",
    (S.AVERAGING, S.DENIED): "a successor asks, and is told that this member is not DONE",
    (S.DENIED, S.COUNTING): "the successor says ABORTED, or COMMITTED without this member",
    (S.DONE, S.APPLYING): "COMMITTED, with the digests of the own copy",
    (S.DONE, S.COUNTING): "ABORTED, or another copy was committed",
    (S.APPLYING, S.COUNTING): "the training thread has applied the average",
    (S.APPLYING, S.PROMISED): "PREPARE came: this member follows without a vote",
    (S.APPLYING, S.JOINING): "too many averages wait, or another lineage wins",
}
MEANINGS: dict[MemberState, str] = {
    S.JOINING: "downloads a state; member of no round",
    S.COUNTING: "accumulates samples; holds no ballot",
    S.PROMISED: "holds a ballot that has not begun",
    S.AVERAGING: "gradients flow",
    S.DENIED: "will not become DONE",
    S.DONE: "holds the result, waits for the outcome",
    S.APPLYING: "the average waits for the training thread",
}
_PLACES: dict[MemberState, tuple[int, int]] = {
    S.JOINING: (330, 60),
    S.COUNTING: (120, 250),
    S.PROMISED: (470, 190),
    S.AVERAGING: (780, 250),
    S.DENIED: (640, 60),
    S.DONE: (780, 440),
    S.APPLYING: (280, 440),
}
_WIDTH, _HEIGHT = 190, 56
_SHIFT = 12.0  # of an arrow beside the line between two middles, so that arrows there and back part


def _numbers() -> dict[tuple[MemberState, MemberState], int]:
    return {turn: number for number, turn in enumerate(TURNS, 1)}


def _arrow(turn: tuple[MemberState, MemberState], number: int) -> str:
    (x0, y0), (x1, y1) = _PLACES[turn[0]], _PLACES[turn[1]]
    length = hypot(x1 - x0, y1 - y0)
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    sx, sy = -uy * _SHIFT, ux * _SHIFT
    reach = min((_WIDTH / 2 + 4) / abs(ux) if ux else 1e9, (_HEIGHT / 2 + 4) / abs(uy) if uy else 1e9)
    ax, ay = x0 + ux * reach + sx, y0 + uy * reach + sy
    bx, by = x1 - ux * reach + sx, y1 - uy * reach + sy
    mx, my = ax + 0.4 * (bx - ax), ay + 0.4 * (by - ay)
    return (
        f'<path d="M{ax:.0f} {ay:.0f}L{bx:.0f} {by:.0f}" stroke="#444" fill="none" marker-end="url(#tip)"/>'
        f'<circle cx="{mx:.0f}" cy="{my:.0f}" r="10" fill="#fff" stroke="#444"/>'
        f'<text x="{mx:.0f}" y="{my + 4:.0f}" text-anchor="middle" font-size="12">{number}</text>'
    )


def _box(state: MemberState) -> str:
    x, y = _PLACES[state]
    left, top = x - _WIDTH / 2, y - _HEIGHT / 2
    words, mid = MEANINGS[state].split("; ")[0], f'x="{x}" text-anchor="middle"'
    return (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#cfe3f7"'
        f' stroke="#5b8fc7"/><text {mid} y="{y - 4}" font-weight="bold">{state.value}</text>'
        f'<text {mid} y="{y + 15}" font-size="11" textLength="{min(178, 6 * len(words))}">{words}</text>'
    )


def drawing() -> str:
    """docs/member.svg."""
    parts = [_box(state) for state in MemberState] + [
        _arrow(turn, number) for turn, number in _numbers().items()
    ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 500" font-family="sans-serif"'
        ' font-size="14" role="img" aria-label="The states of one member, and the ways between them">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M0 0 8 4 0 8z" fill="#444"/></marker></defs>\n'
        '<rect width="900" height="500" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def legend() -> str:
    """What each arrow of the drawing means."""
    rows = [
        [str(number), f"{turn[0].value} → {turn[1].value}", TURNS[turn]]
        for turn, number in _numbers().items()
    ]
    return table(["arrow", "from → to", "what happens"], rows)


TABLES: dict[str, Callable[[], str]] = {"member_states": legend}
DRAWINGS: dict[str, Callable[[], str]] = {"member.svg": drawing}
