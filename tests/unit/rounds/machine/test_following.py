"""A peer that catches up stands where its parameters are, whatever becomes of the download."""

from __future__ import annotations

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import OpenJob, StartHeal
from p2pavg.rounds.machine.core import Config
from p2pavg.rounds.machine.events import Followed, HealFailed, LocalProgress, PeerDown, PeerUp, Tick
from p2pavg.rounds.machine.machine import Machine

ME, DONOR = (name * 20 for name in (b"a", b"b"))
HERE, AHEAD = b"l" * 32, b"m" * 32


def test_a_result_that_is_applied_after_the_download_was_given_up_counts() -> None:
    """The last donor goes while results wait for the training thread, and the peer trains on alone. What it
    applies then is in its parameters: it averages from there, and not from where it was.
    """
    machine = Machine(
        Config(
            me=ME, run_id="r", epoch=0, lineage=HERE, target=4, plan=lambda members: Plan((Part(0, 0, 5),))
        ),
        0.0,
    )
    actions = machine.handle(PeerUp(DONOR, 1, AHEAD, leader=DONOR), 0.1)
    assert [action.results_do for action in actions if isinstance(action, StartHeal)] == [True]
    machine.handle(PeerDown(DONOR, "gone"), 0.2)
    machine.handle(HealFailed("no donor is left"), 0.2)
    now = 0.2
    while machine.core.here.joining is not None:
        now += 0.1
        assert now < 10.0
        machine.handle(Tick(), now)
    machine.handle(Followed(0, HERE, AHEAD, 77, 8, DONOR), now + 0.1)
    assert (machine.epoch, machine.lineage, machine.total_samples) == (1, AHEAD, 8)
    actions = machine.handle(LocalProgress(4, 1.0, at_boundary=True), now + 0.2)
    assert [a.ballot.standing for a in actions if isinstance(a, OpenJob)] == [(1, AHEAD)]
