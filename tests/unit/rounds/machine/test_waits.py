"""What a member declares holds while the wait at the boundary lasts that declared it, and no longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from p2pavg.errors import RoundFailedError
from p2pavg.peer.peer import Peer
from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import Action, BeginJob, OpenJob, Resume, Send
from p2pavg.rounds.machine.events import LocalProgress, PeerUp, Received
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.protocol.ballot import Ballot
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.messages import Aborted, Begin, Message, Prepare, Promise, Ready, Unready

ME, OTHER, THIRD = (name * 20 for name in (b"a", b"b", b"c"))
LINEAGE = b"l" * 32
BALLOT = Ballot(0, 0, OTHER, 1, LINEAGE)
DEADLINE_S = 60.0
Kind = TypeVar("Kind", bound=Message)


def waits(samples: int, weight: float | None = None) -> LocalProgress:
    return LocalProgress(samples, 1.0, at_boundary=True, weight=weight)


def computes(samples: int) -> LocalProgress:
    return LocalProgress(samples, 1.0, at_boundary=False)


def sent(actions: list[Action], kind: type[Kind]) -> list[Kind]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def machine(leader: bytes) -> Machine:
    made = Machine(
        Config(
            me=ME,
            run_id="r",
            epoch=0,
            lineage=LINEAGE,
            target=12,
            plan=lambda members: Plan((Part(0, 0, 5),)),
            weighted=True,
        ),
        0.0,
    )
    made.core.sticky = leader
    for peer in (OTHER, THIRD):
        made.handle(PeerUp(peer, 0, LINEAGE, leader=leader), 0.1)
    return made


def leading() -> tuple[Machine, Ballot]:
    """It is ready and has proposed; both others have promised."""
    leader = machine(ME)
    actions = leader.handle(waits(12), 0.2)
    ballot = next(action for action in actions if isinstance(action, OpenJob)).ballot
    for peer in (OTHER, THIRD):
        leader.handle(Received(peer, Promise(ballot, None, ballot)), 0.3)
    return leader, ballot


def proposed() -> Machine:
    """A member whose thread computes."""
    member = machine(OTHER)
    prepare = Prepare(BALLOT, (ME, OTHER, THIRD), (True,) * 3, Plan((Part(1, 0, 5),)))
    member.handle(Received(OTHER, prepare), 0.2)
    return member


def test_begin_counts_the_wait_that_stands() -> None:
    """A member's wait ends and another begins before BEGIN: what the second declared is counted."""
    leader, ballot = leading()
    leader.handle(Received(OTHER, Ready(ballot, 1, 1, 1.0, b"", 0.0, 0)), 0.4)
    leader.handle(Received(OTHER, Unready(ballot, 1)), 0.5)
    assert not sent(leader.handle(Received(THIRD, Ready(ballot, 5, 2, 2.0, b"", 0.0, 0)), 0.6), Begin)
    begin = sent(leader.handle(Received(OTHER, Ready(ballot, 2, 1, 3.0, b"", 0.0, 0)), 0.7), Begin)[0]
    assert (begin.weights[1:], begin.waits[1:]) == ((3.0, 2.0), (2, 5))


def test_a_late_word_of_an_older_wait_takes_nothing_back() -> None:
    """UNREADY of a wait that is over leaves the declaration of the next one alone."""
    leader, ballot = leading()
    leader.handle(Received(OTHER, Ready(ballot, 2, 1, 3.0, b"", 0.0, 0)), 0.4)
    leader.handle(Received(OTHER, Unready(ballot, 1)), 0.5)
    assert sent(leader.handle(Received(THIRD, Ready(ballot, 5, 2, 2.0, b"", 0.0, 0)), 0.6), Begin)


@pytest.mark.parametrize("wait", [1, 7])
def test_a_withdrawal_that_crosses_begin_ends_the_attempt(wait: int) -> None:
    """The wait that BEGIN counted is over at the member: the attempt is void, and the member is asked again
    once it is needed. Another wait's end makes no difference.
    """
    leader, ballot = leading()
    leader.handle(Received(THIRD, Ready(ballot, 5, 2, 2.0, b"", 0.0, 0)), 0.4)
    assert sent(leader.handle(Received(OTHER, Ready(ballot, 1, 1, 1.0, b"", 0.0, 0)), 0.5), Begin)
    aborted = sent(leader.handle(Received(OTHER, Unready(ballot, wait)), 0.6), Aborted)
    assert [(message.cause, message.blamed) for message in aborted[:1]] == (
        [(Cause.WITHDRAWN, (OTHER,))] if wait == 1 else []
    )


def test_who_declares_no_wait_is_left_out() -> None:
    """READY without a wait would make the leader's BEGIN contradict itself: its sender is named."""
    leader, ballot = leading()
    leader.handle(Received(OTHER, Ready(ballot, 0, 1, 1.0, b"", 0.0, 0)), 0.4)
    assert OTHER in leader.core.epoch_state.excluded


def test_a_wait_that_ends_takes_its_declaration_back() -> None:
    """READY, UNREADY when the thread goes on, READY of the next wait; BEGIN begins with that one alone."""
    member = proposed()
    first = sent(member.handle(waits(4, 1.0), 0.3), Ready)[0]
    assert sent(member.handle(waits(4, 1.0), 0.35), Ready) == []
    assert sent(member.handle(computes(4), 0.4), Unready) == [Unready(BALLOT, first.wait)]
    second = sent(member.handle(waits(5, 3.0), 0.5), Ready)[0]
    assert second.wait > first.wait
    crossed = Begin(BALLOT, (1.0, 4.0, 4.0), (4, 4, 4), (first.wait, 1, 1), b"")
    actions = member.handle(Received(OTHER, crossed), 0.6)
    assert not any(isinstance(action, BeginJob) for action in actions)
    assert not member.counted
    stands = replace(crossed, weights=(3.0, 4.0, 4.0), samples=(5, 4, 4), waits=(second.wait, 1, 1))
    actions = member.handle(Received(OTHER, stands), 0.7)
    assert any(isinstance(action, BeginJob) for action in actions)
    assert member.counted


def test_another_contribution_is_another_wait() -> None:
    """The thread left and came back between two looks, with more samples: the first declaration is void."""
    member = proposed()
    first = sent(member.handle(waits(4, 4.0), 0.3), Ready)[0]
    actions = member.handle(waits(8, 8.0), 0.4)
    assert sent(actions, Unready) == [Unready(BALLOT, first.wait)]
    assert [ready.samples for ready in sent(actions, Ready)] == [8]


def test_whoever_heals_takes_its_declaration_back() -> None:
    """A member goes over to another camp while its leader is about to begin: the leader hears that."""
    member = proposed()
    ready = sent(member.handle(waits(4, 4.0), 0.3), Ready)[0]
    member.abandon_round("behind the others")
    assert sent(member.handle(computes(4), 0.4), Unready) == [Unready(BALLOT, ready.wait)]


@pytest.mark.parametrize("whose", [0, 2])
def test_a_weight_for_one_that_computes_is_a_lie(whose: int) -> None:
    """BEGIN counts samples of somebody who declared nothing: its leader is left out of the epoch."""
    member = proposed()
    wait = sent(member.handle(waits(4, 4.0), 0.3), Ready)[0].wait
    counted = [wait, 1, 1]
    counted[whose] = 0
    begin = Begin(BALLOT, (4.0, 4.0, 4.0), (4, 4, 4), tuple(counted), b"")
    actions = member.handle(Received(OTHER, begin), 0.4)
    assert not any(isinstance(action, BeginJob) for action in actions)
    assert member.core.epoch_state.excluded[OTHER] is Cause.IMPLAUSIBLE_BEGIN


def test_a_wait_that_was_never_declared_is_a_lie() -> None:
    """BEGIN names a wait of which this peer never spoke."""
    member = proposed()
    wait = sent(member.handle(waits(4, 4.0), 0.3), Ready)[0].wait
    begin = Begin(BALLOT, (4.0, 4.0, 4.0), (4, 4, 4), (wait + 1, 1, 1), b"")
    member.handle(Received(OTHER, begin), 0.4)
    assert member.core.epoch_state.excluded[OTHER] is Cause.IMPLAUSIBLE_BEGIN


def test_an_idle_thread_that_is_counted_on_stays() -> None:
    """An idle leader comes to its boundary, where the others' samples reach the target: it declares that
    it has nothing, and waits for the outcome. When no round is forming it goes on at once.
    """
    leader = machine(ME)
    assert any(isinstance(action, Resume) for action in leader.handle(waits(0), 0.2))
    told = replace(machine(ME).core.progress(), samples=12, boundary=True, leader=ME)
    actions = leader.handle(Received(OTHER, told), 0.3)
    assert any(isinstance(action, OpenJob) for action in actions)
    assert not any(isinstance(action, Resume) for action in leader.handle(waits(0), 0.4))
    assert leader.member.declared


def machine_of(peer: Peer) -> Machine:
    place = peer._runtime
    assert place is not None
    assert place.driver is not None
    return place.driver.machine


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_call_that_timed_out_is_in_no_average() -> None:
    """Three peers, of which one is idle: the round waits for it. Another one's call ends after its READY, and
    it calls again with other values and another weight: the average is of those.
    """
    run, listen = "withdrawn", "127.0.0.1:0"
    async with (
        Peer(run, listen=listen, compression="none") as one,
        Peer(run, listen=listen, compression="none", initial_peers=[one.address]) as two,
        Peer(run, listen=listen, compression="none", initial_peers=[one.address]) as idle,
    ):
        peers = (one, two, idle)
        await asyncio.gather(*(peer.all_reduce(np.ones(9, np.float32), group_size=3) for peer in peers))
        for peer in peers:
            core = machine_of(peer).core
            core.config = replace(core.config, patience_s=DEADLINE_S)
            peer.set_target(2)
        zeros, hundreds, nothing = (np.full(9, value, np.float32) for value in (0.0, 100.0, 7.0))
        first = asyncio.create_task(one.all_reduce(zeros, 1.0, group_size=2, timeout=DEADLINE_S))
        declared = False
        while not declared:
            ended = asyncio.create_task(
                two.all_reduce(np.ones(9, np.float32), 1.0, group_size=2, timeout=0.5)
            )
            while not ended.done():
                declared = declared or machine_of(two).member.declared
                await asyncio.sleep(0.01)
            with pytest.raises(RoundFailedError):
                await ended
        second = asyncio.create_task(two.all_reduce(hundreds, 3.0, group_size=2, timeout=DEADLINE_S))
        await until(lambda: machine_of(two).core.own.boundary)
        third = asyncio.create_task(idle.all_reduce(nothing, 0.0, group_size=2, timeout=DEADLINE_S))
        await asyncio.gather(first, second, third)
        assert all(np.all(values == 75.0) for values in (zeros, hundreds, nothing))
