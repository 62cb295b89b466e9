"""Leaving the run on purpose, under a virtual clock."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.core import MOST_WORDS
from p2pavg.rounds.machine.departure import Acceptance
from p2pavg.rounds.protocol.ballot import Held, Lineage, PeerId, Stage
from p2pavg.rounds.protocol.messages import Committed, Departing, Message
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node


def total(calm: Calm, node: Node) -> int:
    """Samples of this node that count in the lineage that the others end in."""
    best = max((n for n in calm.nodes if n.alive), key=lambda n: n.machine.epoch)
    final = calm.swarm.checks.books.counted[best.machine.lineage]
    return sum(1 for peer, _ in final if peer == node.me)


@pytest.mark.parametrize("moment", [0.0, 0.03, 0.11, 0.2, 0.205, 0.21])
@pytest.mark.parametrize("who", ["leader", "member"])
def test_who_leaves_loses_no_sample(who: str, moment: float) -> None:
    """Whenever a peer leaves, all that it ever counted is in the averages of those that stay."""
    calm = Calm(3, chunk_seconds=0.002)
    calm.epochs(2)
    calm.run(moment)
    leader = calm.leader
    departing = leader if who == "leader" else next(node for node in calm.nodes if node is not leader)
    departing.leave()
    calm.run(10.0, lambda: not departing.alive)
    assert not departing.alive
    assert departing.discarded == 0
    calm.epochs(max(node.machine.epoch for node in calm.nodes) + 3)
    assert departing.produced > 0
    assert total(calm, departing) == departing.produced


@pytest.mark.parametrize("state_seconds", [0.01, 1.0])
def test_who_is_left_behind_by_an_epoch_leaves_its_samples(state_seconds: float) -> None:
    """An epoch goes on without a peer, which leaves before it has the next state: its samples count."""
    calm = Calm(3)
    calm.swarm.state_seconds = state_seconds
    calm.epochs(2)
    leader = calm.leader
    departing, other = (node for node in calm.nodes if node is not leader)
    calm.run(0.05)
    departing.hung = True
    calm.run(20.0, lambda: departing.machine.role is Role.JOINER)
    assert departing.machine.role is Role.JOINER
    epoch = departing.machine.epoch
    assert {leader.machine.epoch, other.machine.epoch} == {epoch + 1}
    for node in (leader, other):
        node.hung = True  # they do not finish the next epoch before
    calm.run(0.1)
    departing.leave()
    departing.hung = False
    calm.run(3.0, lambda: not departing.alive)
    assert not departing.alive
    assert departing.discarded == 0
    for node in (leader, other):
        node.hung = False
    calm.epochs(epoch + 3)
    assert total(calm, departing) == departing.produced


def test_who_leaves_asks_what_became_of_its_round() -> None:
    """The word that its round is committed is lost, the others go on: a departing peer asks, and loses
    nothing.
    """
    calm = Calm(3)
    calm.epochs(2)
    calm.run(0.05)
    departing = next(node for node in calm.nodes if node is not calm.leader)
    lost: list[Message] = []
    send = calm.swarm.send

    def lossy(node: Node, peer: PeerId, message: Message) -> None:
        if peer == departing.me and isinstance(message, Committed) and not lost:
            lost.append(message)
        else:
            send(node, peer, message)

    calm.swarm.send = lossy  # type: ignore[method-assign]
    calm.run(20.0, lambda: bool(lost))
    assert departing.machine.core.holding is not None
    departing.leave()
    calm.run(3.0, lambda: not departing.alive)  # well within the notice
    assert not departing.alive
    assert departing.discarded == 0
    calm.epochs(max(node.machine.epoch for node in calm.nodes) + 3)
    assert total(calm, departing) == departing.produced


def test_a_receiver_that_has_yet_to_hear_of_the_epoch_is_waited_for() -> None:
    """The only receiver has not heard of the last average when the departing peer asks: it takes them
    once it has.
    """
    calm = Calm(2)
    calm.epochs(2)
    receiver = calm.leader
    (departing,) = (node for node in calm.nodes if node is not receiver)
    calm.run(0.05)
    there = receiver.machine.departure.acceptance
    asked: list[Acceptance] = []

    def acceptance(epoch: int, lineage: Lineage, offered: Collection[int]) -> Acceptance:
        asked.append(Acceptance.LATER if len(asked) < 3 else there(epoch, lineage, offered))
        return asked[-1]

    receiver.machine.departure.acceptance = acceptance  # type: ignore[method-assign]
    departing.leave()
    calm.run(2.0, lambda: not departing.alive)
    assert asked.count(Acceptance.LATER) == 3
    assert departing.discarded == 0
    assert receiver.receiver_of


@pytest.mark.parametrize(
    ("back", "acceptance"),
    [(-1, Acceptance.LATER), (0, Acceptance.TAKEN), (1, Acceptance.TAKEN), (2, Acceptance.BEHIND)],
)
def test_samples_count_one_epoch_later_at_most(back: int, acceptance: Acceptance) -> None:
    """A receiver says whether samples count here now, may count later, or are too old."""
    calm = Calm(2)
    calm.epochs(3)
    receiver = calm.leader.machine
    before = {made.epoch + 1: made.lineage for made in receiver.history}
    epoch = receiver.epoch - back
    assert receiver.departure.acceptance(epoch, before.get(epoch, b"ahead"), ()) is acceptance
    assert receiver.departure.acceptance(receiver.epoch, b"another", ()) is Acceptance.NEVER


def test_the_last_peer_names_what_it_loses() -> None:
    """Nobody is left to count the samples: they are named as discarded, and the peer goes at once."""
    calm = Calm(1)
    calm.epochs(2)
    calm.run(0.05)
    (alone,) = calm.nodes
    before = calm.swarm.world.now
    alone.leave()
    calm.run(10.0, lambda: not alone.alive)
    assert calm.swarm.world.now - before < 0.1
    assert alone.discarded == len(alone.samples) > 0


def test_what_is_discarded_on_the_way_out_is_named_once() -> None:
    """The training thread finds its last samples worthless after the machine said to whom they go: who
    discards them names them, and the machine does not name them again.
    """
    calm = Calm(2)
    calm.epochs(2)
    machine, now = calm.nodes[0].machine, calm.nodes[0].clock()
    machine.handle(ev.LocalProgress(8, 10.0, True), now)
    assert [a.samples for a in machine.handle(ev.Leave(5.0, True), now) if isinstance(a, act.HandOver)] == [8]
    machine.handle(ev.Discard("drawn by another peer too"), now)
    actions = machine.handle(ev.HandedOver(taken=False), now)
    assert machine.departure.left
    assert not [action for action in actions if isinstance(action, act.Discarded)]


def test_a_dead_receiver_is_passed_over() -> None:
    """The nearest receiver is gone when it is asked: the next one takes the samples."""
    calm = Calm(3)
    calm.epochs(2)
    departing, *others = calm.nodes
    calm.run(0.05)
    nearest, other = sorted(others, key=lambda node: node.me)
    nearest.stop()
    departing.leave()
    calm.run(10.0, lambda: not departing.alive)
    assert departing.discarded == 0
    assert not nearest.receiver_of
    assert other.receiver_of


def test_last_words_of_strangers_take_bounded_memory() -> None:
    """A thousand peers that link, say last words of far epochs and leave cost little; a voter's are kept."""
    calm = Calm(3, chunk_seconds=0.002)
    calm.epochs(2)
    calm.run(10.0, lambda: calm.leader.machine.core.holding is not None)
    node = calm.leader
    core, held = node.machine.core, node.machine.core.holding
    assert held is not None
    far = Held(replace(held.ballot, epoch=1 << 60), Stage.OPEN, True)
    for number in range(1000):
        stranger = number.to_bytes(20, "big")
        node.machine.handle(ev.PeerUp(stranger, 0, b"l" * 32), core.now)
        words = Departing(0, (held.described(), far))
        node.machine.handle(ev.Received(stranger, words), core.now)
    assert len(core.last_words) <= MOST_WORDS
    assert far not in {word for words in core.last_words.values() for word in words}
    voter = next(peer for peer in held.voters if peer != node.me)
    core.keep_words(voter, (held.described(),))
    assert core.last_words[voter]
    assert len(node.machine.peers._health) <= 3


def test_who_closes_without_a_training_thread_waits_for_no_round_that_has_not_begun() -> None:
    """A proposal to which this peer brings nothing, as its thread comes no more, keeps it for no moment; one
    that has begun does.
    """
    calm = Calm(2)
    calm.epochs(2)
    closing = next(node for node in calm.nodes if node is not calm.leader)
    core = closing.machine.core

    def proposed() -> bool:
        return core.holding is not None and core.holding.wait == 0 and not core.holding.begun

    closing.hung = True
    calm.run(20.0, proposed)
    assert proposed()
    assert core.holding is not None
    core.holding.begun = True
    closing.feed(ev.Leave(5.0))
    assert not closing.machine.departure.left
    core.holding.begun = False
    closing.feed(ev.Discard("closed"))
    assert closing.machine.departure.left
