"""From what the members of a group can move to the parts of the vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2pavg.allreduce.partition import Capacity
from p2pavg.allreduce.plan import plan
from p2pavg.part import Part
from p2pavg.rounds.machine.core import Plan
from p2pavg.rounds.protocol.roles import PlanMember


def planner(numel: Callable[[], int]) -> Plan:
    """numel: values of the vector that is averaged next."""

    def parts(members: Sequence[PlanMember]) -> tuple[Part, ...]:
        capacities = [
            Capacity(m.upload_bps / 8 or None, owns=m.voter and m.owns) for m in members
        ]  # what a member receives says what others sent; where it is the limit, the links to it show that
        rank = {m.peer: rank for rank, m in enumerate(members)}
        links = {
            (rank[sender], rank[m.peer]): bps / 8
            for m in members
            for sender, bps in m.link_bps.items()
            if sender in rank
        }
        return plan(numel(), capacities, links)

    return parts
