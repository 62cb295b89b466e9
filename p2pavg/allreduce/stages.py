"""What a member sends in each stage of a plan. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2pavg.plan import Plan

CONTRIBUTIONS, PARTIAL, RESULTS, PASSED_ON = "contributions", "partial means", "results", "results passed on"


def sent_by_stage(
    plan: Plan,
    rank: int,
    weights: Sequence[float],
    contribution_size: Callable[[int], int],
    result_size: Callable[[int], int],
) -> dict[str, int]:
    """Encoded bytes that `rank` sends once, by stage; stages without any are missing. What is packed, lost
    and sent again is not in them. contribution_size, result_size: bytes of a part of n elements.
    """
    sent = dict.fromkeys((CONTRIBUTIONS, PARTIAL, RESULTS, PASSED_ON), 0)
    for index, part in enumerate(plan.parts):
        partial, receiver = plan.sends_partial(index, rank), plan.receiver(index, rank)
        if receiver is not None and plan.weight(index, rank, weights) > 0:
            size = result_size(part.count) if partial else contribution_size(part.count)
            sent[PARTIAL if partial else CONTRIBUTIONS] += size
        children = len(plan.children(index, rank, len(weights)))
        if plan.gathers:
            given = plan.weight(index, rank, weights) > 0
            sent[CONTRIBUTIONS] += children * result_size(part.count) if given else 0
        else:
            passed_on = rank in part.deputies and not part.swaps
            sent[PASSED_ON if passed_on else RESULTS] += children * result_size(part.count)
    return {stage: count for stage, count in sent.items() if count}
