"""What a peer knows of its links: who is company, and who lacks one to whom: somebody between them leads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.actions import Send
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.machine.rules.camps import BELIEVED_S, LinkedPeers, ends, gaps
from p2pavg.rounds.machine.rules.deadlines import LINKS_TOLD
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.messages import Progress
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node

A, B, C = (letter * 20 for letter in (b"a", b"b", b"c"))


def view(**apart: dict[bytes, float]) -> LinkedPeers:
    """Of peers a and b, who say to whom they get no link, and since when."""
    made = LinkedPeers()
    for name in ("a", "b"):
        peer = name.encode() * 20
        made.up(ev.PeerUp(peer, 0, b"l" * 32))
        facts = made.get(peer)
        assert facts is not None
        facts.apart = apart.get(name, {})
        if facts.apart:
            made.claims[peer] = facts
    return made


def test_one_sides_word_is_believed_for_a_while() -> None:
    """A gap that only one side tells of counts for seconds; one that both tell of counts on."""
    alone, both = view(a={B: 0.0}), view(a={B: 0.0}, b={A: 1.0})
    assert gaps(alone, C, (), BELIEVED_S - 0.1) == [(A, B)]
    assert gaps(alone, C, (), BELIEVED_S + 0.1) == []
    assert len(gaps(both, C, (), 100.0)) == 2
    assert ends(gaps(both, C, (), 100.0)) == {A, B}


def test_nobody_talks_this_peer_out_of_a_link_that_it_has() -> None:
    """Who says over a link to this peer that it gets no link to it is not believed."""
    assert gaps(view(a={C: 0.0}), C, (), 0.1) == []


def test_only_gaps_within_the_group_cost_ownership() -> None:
    """A peer that lacks a link to somebody outside the group may own a part."""
    pairs = [(A, B), (A, b"d" * 20)]
    assert ends(pairs, {A, C}) == set()
    assert ends(pairs, {A, B, C}) == {A, B}


def test_a_peer_is_company_once_it_has_told_that_it_has_joined() -> None:
    """A link alone makes no company, nor does a peer that joins: rounds wait for neither, and who waited for
    them would step alone.
    """
    linked = LinkedPeers()
    linked.up(ev.PeerUp(A, 0, b"l" * 32))
    assert linked.company() == 0
    facts = linked.get(A)
    assert facts is not None
    for joining in (True, False):
        linked.stands(facts, 0, b"l" * 32, joining=joining)
        facts.heard = True
        assert linked.company() == (0 if joining else 1)
    linked.hears(facts, silent=True)
    assert linked.company() == 0


class Triangle(Calm):
    """Three peers, of which two never get a link to each other."""

    def __init__(self, blocked: tuple[int, int], told: tuple[int, ...] = (0, 1), at: float = 0.1) -> None:
        """told: which of the blocked find out that the other lives; at: when, in virtual seconds."""
        super().__init__(3)
        swarm, link = self.swarm, self.swarm.link
        self.blocked = [self.nodes[number] for number in blocked]

        def unless_blocked(a: Node, b: Node) -> None:
            if a not in self.blocked or b not in self.blocked:
                link(a, b)

        swarm.link = unless_blocked  # type: ignore[method-assign]
        for number in told:
            node, other = self.blocked[number], self.blocked[1 - number]
            apart = ev.Apart(frozenset({other.me}))
            swarm.world.after(at, lambda node=node, apart=apart: node.feed(apart))

    def contributors(self, since: int) -> set[int]:
        """How many peers contributed to the averages from this epoch on."""
        begun = [trace for _, _, trace in self.traced if trace.kind == "begun"]
        return {trace.fields["contributors"] for trace in begun if trace.fields["epoch"] >= since}


@pytest.mark.parametrize("blocked", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("told", [(0, 1), (0,), (1,)], ids=["both", "one", "other"])
def test_three_average_though_two_of_them_are_apart(blocked: tuple[int, int], told: tuple[int, ...]) -> None:
    """Two that get no link to each other, and a third between them: whoever leads at first, from the second
    epoch on all three contribute, as often as undisturbed. One side's word is enough for seconds.
    """
    swarm, calm = Triangle(blocked, told), Calm(3)
    swarm.run(BELIEVED_S)
    calm.run(BELIEVED_S)
    epochs = min(node.parameters.epoch for node in swarm.nodes)
    assert epochs >= 0.8 * min(node.parameters.epoch for node in calm.nodes)
    assert swarm.contributors(since=2) == {3}


def test_two_refusals_that_name_each_other_are_word_enough() -> None:
    """Where the third one leads, before anybody has said that there is a gap: all three contribute."""
    swarm = Triangle((0, 1), told=())
    swarm.run(BELIEVED_S)
    assert swarm.contributors(since=2) == {3}
    void = [trace for _, _, trace in swarm.traced if trace.kind == "aborted" and trace.fields["epoch"] >= 2]
    assert not any(trace.fields["why"] == "unlinked" for trace in void)


def test_links_that_come_up_late_are_waited_for() -> None:
    """Two members meet half a second after their leader has met both, as newcomers over a long path do: the
    first round is of all three, none of them without a part.
    """
    swarm = Triangle((0, 1), told=())
    a, b = swarm.blocked

    def meet() -> None:
        del swarm.swarm.link  # type: ignore[method-assign]
        swarm.swarm.link(a, b)

    swarm.swarm.world.after(0.5, meet)
    swarm.epochs(2)
    assert swarm.contributors(since=0) == {3}
    assert not any(node.machine.refusals.parted() for node in swarm.nodes)


def test_without_a_word_a_leader_goes_on_without_whom_it_has_no_link_to() -> None:
    """What the words are for: when nobody says that there is a gap, the leader's other end is left out."""
    swarm = Triangle((0, 2), told=())
    swarm.run(BELIEVED_S)
    assert swarm.contributors(since=2) != {3}


def test_a_gap_that_opens_in_the_middle_of_a_run() -> None:
    """A route that breaks between two members: the rounds of three go on within two epochs of their word."""
    swarm = Calm(3)
    swarm.epochs(5)
    a, b = (node for node in swarm.nodes if node is not swarm.leader)
    link = swarm.swarm.link
    swarm.swarm.link = lambda one, other: None if {one, other} == {a, b} else link(one, other)
    swarm.swarm.reset(a, b, "no route")
    for node, other in ((a, b), (b, a)):
        node.feed(ev.Apart(frozenset({other.me})))
    since = max(node.parameters.epoch for node in swarm.nodes) + 2
    swarm.epochs(since + 10)
    begun = [trace for _, _, trace in swarm.traced if trace.kind == "begun"]
    assert {t.fields["contributors"] for t in begun if t.fields["epoch"] >= since} == {3}


def relayed(swarm: Calm, pair: set[bytes]) -> None:
    """The link between two is carried by a third member."""
    for node in swarm.nodes:

        def feed(event: ev.Event, me: bytes = node.me, feed: Callable[[ev.Event], None] = node.feed) -> None:
            if isinstance(event, ev.PeerUp) and {event.peer, me} == pair:
                event = replace(event, relayed=True)
            feed(event)

        node.feed = feed  # type: ignore[method-assign]


@pytest.mark.parametrize(("peers", "carried"), [(3, (0, 1)), (3, (0, 2)), (3, (1, 2)), (2, (0, 1))])
def test_a_pair_whose_link_is_relayed_averages(peers: int, carried: tuple[int, int]) -> None:
    """Three of which two are linked by relay alone, and two that have nobody else: all contribute."""
    swarm = Calm(peers)
    relayed(swarm, {swarm.nodes[number].me for number in carried})
    swarm.epochs(12)
    begun = [trace.fields for _, _, trace in swarm.traced if trace.kind == "begun"]
    assert {fields["contributors"] for fields in begun if fields["epoch"] >= 2} == {peers}


@pytest.mark.parametrize("ways", [1, 2])
def test_nobody_begins_a_round_over_a_link_that_is_known_to_be_dead(ways: int) -> None:
    """Two members whose link is up and carries nothing, in one direction or in both, while their leader hears
    both: all three contribute, in rounds that take no longer than before.
    """
    swarm = Calm(3)
    swarm.epochs(5)
    usual = swarm.swarm.world.now / 5
    a, b = (node for node in swarm.nodes if node is not swarm.leader)
    for pair in ((a.me, b.me), (b.me, a.me))[:ways]:
        swarm.swarm.network.cut(*pair)
    swarm.run(5.0, lambda: bool(b.machine.silent))
    since, began = max(node.parameters.epoch for node in swarm.nodes) + 2, swarm.swarm.world.now
    swarm.epochs(since + 8)
    assert swarm.swarm.world.now - began < 1.5 * 10 * usual
    begun = [trace for _, _, trace in swarm.traced if trace.kind == "begun"]
    assert {t.fields["contributors"] for t in begun if t.fields["epoch"] >= since} == {3}


def test_a_leader_with_a_gap_leads_the_round_that_was_promised_to_it() -> None:
    """Members rather follow a leader that lacks no link; whoever promised the other's ballot waits for its
    end, or the round would have two leaders that take each other's members.
    """
    swarm = Calm(4)
    swarm.epochs(3)
    leader = swarm.leader
    member, other, _ = (node for node in swarm.nodes if node is not leader)
    core = member.machine.core
    for one, end in ((leader, other), (other, leader)):
        facts = core.linked.get(one.me)
        assert facts is not None
        facts.apart = {end.me: core.now}
        core.linked.claims[one.me] = facts
    core.linked.version += 1
    assert core.leader() not in (leader.me, other.me)
    core.promises.add(leader.machine.core.promises.next((core.here.epoch, core.here.lineage)))
    assert core.leader() == leader.me
    core.suspect(leader.me)
    assert core.leader() not in (leader.me, other.me)


@pytest.mark.parametrize("how", ["relayed", "apart"])
def test_many_links_that_change_are_told_in_two_words(how: str) -> None:
    """Forty links come by a relay, or are given up, within 40 ms: everybody hears of the first at once, and
    of all after a quarter of a second.
    """
    here, leader, others = b"h" * 32, b"l" * 20, [bytes([1 + number]) * 20 for number in range(40)]
    config = Config(
        me=b"m" * 20, run_id="r", epoch=0, lineage=here, target=12, plan=lambda _: Plan((Part(0, 0, 5),))
    )
    one, told, last = Machine(config, 0.0), Counter[PeerId](), dict[PeerId, Progress]()

    def feed(event: ev.Event, now: float) -> None:
        for action in one.handle(event, now):
            if isinstance(action, Send) and isinstance(action.message, Progress):
                told[action.peer] += 1
                last[action.peer] = action.message

    feed(ev.PeerUp(leader, 0, here, leader=leader), 0.1)
    told.clear()
    for number, peer in enumerate(others):
        up, apart = ev.PeerUp(peer, 0, here, relayed=True), ev.Apart(frozenset(others[: number + 1]))
        feed(up if how == "relayed" else apart, 1.0 + number / 1000)
    feed(ev.Tick(), 1.0 + LINKS_TOLD)
    assert last[leader].apart == tuple(others)
    assert max(told.values()) <= 3
