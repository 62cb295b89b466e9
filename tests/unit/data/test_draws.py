"""Leases and consumption: whatever becomes of rounds and peers, no position is in two averages."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from p2pavg.data.draws import MOST_CLAIMED, Draws
from p2pavg.data.ledger import LAPSES_AFTER, MOST_LEASED_ROUNDS, PositionLedger
from p2pavg.data.notes import RoundNotes, Said, heard, name, understand
from p2pavg.data.runs import (
    Runs,
    by_pass,
    difference,
    first_piece,
    head,
    intersection,
    packed,
    size,
    union,
    unpacked,
)
from p2pavg.errors import ConfigurationError, StateError

LENGTH, BLOCK = 200, 8


class Member:
    """A peer of a modelled swarm: it draws, trains and contributes as an optimizer does."""

    def __init__(self, name: int, swarm: Swarm) -> None:
        self.id = name.to_bytes(32, "big")[::-1]
        self.draws = Draws(LENGTH, BLOCK)
        self.accumulated: list[int] = []
        self.draws.attach(self.id, swarm.others, lambda: swarm.told(self))

    def train(self, samples: int) -> None:
        while size(self.draws._out) < samples:
            self.draws.next_run(None, lambda first: min(3, LENGTH - first % LENGTH))
        positions = [p for run in head(self.draws._out, samples)[0] for p in range(*run)]
        self.draws.trained(samples)
        self.accumulated += positions

    def drop(self) -> None:
        self.draws.dropped()
        self.accumulated.clear()


class Swarm:
    """Peers and the rounds that they make; which samples each committed average really holds."""

    def __init__(self, seed: int, lonely: bool = False, whole: bool = False) -> None:
        self.rng = random.Random(seed)
        self.whole = whole  # nobody misses a round
        self.lonely = lonely  # nobody answers who asks what others hold: claims collide
        self.names = iter(range(1, 1 << 20))
        self.members: list[Member] = []
        self.members += [Member(next(self.names), self) for _ in range(self.rng.randint(1, 4))]
        self.epoch = 0
        self.averaged: Counter[int] = Counter()
        self.spoiled = 0

    def others(self) -> list[bytes]:
        return [] if self.lonely else [member.id for member in self.members]

    def told(self, who: Member) -> None:
        if not self.lonely:
            for member in self.members:
                if member is not who:
                    member.draws.heard(who.id, who.draws.claims())

    def met(self, newcomer: Member) -> None:
        if not self.lonely:
            for member in self.members:
                newcomer.draws.heard(member.id, member.draws.claims())

    def round(self, present: list[Member], ready: list[Member], commits: bool = True) -> None:
        notes = {}
        for member in ready:
            if member.draws.spoiled:
                self.spoiled += len(member.accumulated)
                member.drop()
            notes[member.id] = member.draws.say(b"inner", len(member.accumulated))
        leader = self.rng.choice(ready)
        note, refused = leader.draws.combine(notes, [m.id for m in present], leader.id)
        if not commits:
            return
        for member in present:
            counted = member in ready and member.id not in refused
            if counted:
                self.averaged.update(member.accumulated)
                member.accumulated.clear()
            member.draws.committed(note, self.epoch, counted)
        self.epoch += 1
        for member in self.members:
            if member not in present:  # it missed the round, and takes the swarm's state
                member.drop()
                member.draws.load_state_dict(present[0].draws.state_dict())

    def event(self) -> None:
        what = self.rng.random()
        for member in self.members:
            member.train(self.rng.randint(0, 6))
        if what < 0.6:
            self.round(self.members, self.some(), commits=self.rng.random() < 0.8)
        elif what < 0.7 and not self.whole:
            self.partial()
        elif what < 0.8 and len(self.members) < 6:
            newcomer = Member(next(self.names), self)
            newcomer.draws.load_state_dict(self.members[0].draws.state_dict())
            self.met(newcomer)
            self.members.append(newcomer)
        elif what < 0.86 and len(self.members) > 1:
            self.members.remove(self.rng.choice(self.members))  # killed
        elif what < 0.93 and len(self.members) > 1:
            self.leave()
        elif what < 0.97:
            self.rng.choice(self.members).drop()
        else:
            self.rng.choice(self.members).draws.begin()

    def some(self) -> list[Member]:
        return self.rng.sample(self.members, self.rng.randint(1, len(self.members)))

    def partial(self) -> None:
        """A round of some, which the others miss."""
        present = self.some()
        self.round(present, self.rng.sample(present, self.rng.randint(1, len(present))))

    def leave(self) -> None:
        departing, receiver = self.rng.sample(self.members, 2)
        if departing.draws.spoiled:
            departing.drop()
        if receiver.draws.inherited(departing.draws.say(b"", len(departing.accumulated))):
            receiver.accumulated += departing.accumulated
        self.members.remove(departing)


@pytest.mark.parametrize("lonely", [False, True])
def test_no_position_is_averaged_twice_and_none_is_forgotten(lonely: bool) -> None:
    """Random rounds, aborts, kills, joins, departures, discards: each position is averaged at most once."""
    for seed in range(60):
        swarm = Swarm(seed, lonely)
        for _ in range(60):
            swarm.event()
        states = [member.draws.state_dict() for member in swarm.members]
        assert all(state == states[0] for state in states), seed
        assert set(swarm.averaged.values()) <= {1}, seed
        consumed = swarm.members[0].draws.ledger.consumed
        assert {p for run in consumed for p in range(*run)} == set(swarm.averaged), seed
        for _ in range(4 * LENGTH):  # undisturbed: the pool of all that returned empties
            for member in swarm.members:
                member.train(2)
            swarm.round(swarm.members, swarm.members)
            if intersection(swarm.members[0].draws.ledger.consumed, ((0, LENGTH),)) == ((0, LENGTH),):
                break
        else:
            pytest.fail(f"positions of the first pass are never drawn again (seed {seed})")
        assert set(swarm.averaged.values()) == {1}, seed


def test_peers_that_know_each_other_spoil_little() -> None:
    """Where peers hear what others hold and nobody misses a round, next to nothing is drawn by two."""
    spoiled = averaged = 0
    for seed in range(30):
        swarm = Swarm(seed, whole=True)
        for _ in range(60):
            swarm.event()
        spoiled, averaged = spoiled + swarm.spoiled, averaged + sum(swarm.averaged.values())
    assert spoiled <= 0.01 * averaged, (spoiled, averaged)


def test_peers_that_know_different_others_draw_apart() -> None:
    """Peers that enter at once know some of the others, and have heard of no claims: next to nothing is drawn
    by two, and whoever knows nobody draws the lowest.
    """
    rng = random.Random(4)
    doubled = 0
    for _ in range(40):
        ids = [rng.randbytes(32) for _ in range(6)]
        drawn: list[Runs] = []
        for number, each in enumerate(ids):
            draws, known = Draws(200 * 64, 64), ids[: rng.randint(1, 6)] if number else []
            draws.attach(each, partial(list, known), lambda: None)
            drawn.append(union([run for _ in range(8) if (run := draws.next_run(None, lambda _: 8))]))
        assert drawn[0] == ((0, 64),)
        doubled += sum(map(size, drawn)) - size(union(*drawn))
    assert doubled < 0.08 * 40 * 6 * 64, doubled


def two_with_the_same() -> tuple[Draws, Draws]:
    """Neither knew of the other: both drew 0 .. 11, and the second trained on 8 of them."""
    one, other = Draws(LENGTH, BLOCK), Draws(LENGTH, BLOCK)
    for draws, letter in ((one, b"a"), (other, b"b")):
        draws.attach(letter * 20, list, lambda: None)
        for _ in range(3):
            draws.next_run(None, lambda _: 4)
    other.trained(8)
    return one, other


def test_the_larger_name_yields_as_soon_as_it_hears() -> None:
    """Of two peers with the same positions one drops what it trained on, and never names them; what its
    loader had fetched of them is dropped when it is trained. The other one notices nothing.
    """
    one, other = two_with_the_same()
    one.heard(b"b" * 20, other.claims())
    assert (one.yielded, one.spoiled) == (0, False)
    other.heard(b"a" * 20, one.claims())
    assert other.yielded == 8
    assert not intersection(unpacked(other.claims(), 9), ((0, 12),))
    other.dropped()
    assert other.yielded == 0
    other.next_run(None, lambda _: 4)
    other.trained(4)
    assert other.yielded == 4
    other.dropped()
    other.trained(4)
    assert (other.yielded, other.spoiled) == (0, False)
    assert heard(other.say(b"", 4)) == (b"", Said(((16, 20),), ((16, 24),), 8))


def test_what_is_handed_in_is_the_leaders_to_decide() -> None:
    """A claim that comes behind a contribution does not take from it what others may have counted."""
    one, other = two_with_the_same()
    other.say(b"", 8)
    other.heard(b"a" * 20, one.claims())
    assert other.yielded == 0
    other.trained(4)
    assert other.yielded == 4


def test_a_peer_yields_once_to_each_until_its_samples_count() -> None:
    """Who claims whatever others have costs them one accumulation, and no more before their next average."""
    one, other = two_with_the_same()
    for _ in range(2):
        other.heard(b"a" * 20, packed(((0, 1 << 20),)))
    other.begin()
    other.dropped()
    other.next_run(None, lambda _: 4)
    other.trained(4)
    other.heard(b"a" * 20, packed(((0, 1 << 40),)))
    assert other.yielded == 0
    note, refused = one.combine({b"b" * 20: other.say(b"", 4)}, [b"b" * 20], b"b" * 20)
    assert not refused
    other.committed(note, 0, True)
    lease = other.ledger.leases[b"b" * 8]
    other.next_run(None, lambda _: 4)
    other.trained(4)
    other.heard(b"a" * 20, packed(((0, 1 << 40),)))
    assert other.yielded == 0, "what the ledger leased is nobody else's"
    assert intersection(union(other._trained), lease)


def test_a_lease_of_a_peer_that_is_gone_returns() -> None:
    """What a killed peer held is drawn by others after it was missing from two rounds."""
    swarm = Swarm(0)
    swarm.members = [Member(1, swarm), Member(2, swarm)]
    for member in swarm.members:
        member.train(5)
    swarm.round(swarm.members, swarm.members)
    gone = swarm.members.pop()
    lease = gone.draws.ledger.leases[gone.id[:8]]
    (left,) = swarm.members
    for missed in range(LAPSES_AFTER):
        assert gone.id[:8] in left.draws.ledger.leases, missed
        left.train(3)
        swarm.round([left], [left])
    assert gone.id[:8] not in left.draws.ledger.leases
    for _ in range(30):
        left.train(3)
        swarm.round([left], [left])
    assert difference(lease, left.draws.ledger.consumed) == ()


def test_what_is_drawn_while_the_first_round_is_under_way_is_nobody_elses() -> None:
    """Without leases peers go on claiming while they average: that is told before, and leased to them."""
    swarm = Swarm(0)
    swarm.members = members = [Member(number, swarm) for number in (1, 2, 3)]
    for member in members:
        member.train(24)
    notes = {member.id: member.draws.say(b"", 24) for member in members}
    for member in members:
        member.train(12)
    note, refused = members[0].draws.combine(notes, [member.id for member in members], members[0].id)
    assert not refused
    for member in members:
        member.draws.committed(note, 0, True)
    assert not any(member.draws.spoiled for member in members)


def cut_off() -> tuple[Swarm, Member, Member]:
    """A peer that stays, and one that claimed, trained, and then missed a round that others grew in."""
    swarm = Swarm(0)
    stays = Member(1, swarm)
    away = Member(2, swarm)
    swarm.members = [stays, away]
    swarm.told(away)
    stays.train(5)
    away.train(7)
    swarm.members = [stays]
    for _ in range(LAPSES_AFTER - 1):
        swarm.round([stays], [stays])
        stays.train(20)
    return swarm, stays, away


def test_what_a_peer_claimed_is_its_own_while_it_is_cut_off() -> None:
    """Its samples count when it comes back, though nobody had leased their positions to it."""
    swarm, stays, away = cut_off()
    away.draws.load_state_dict(stays.draws.state_dict())
    assert not away.draws.spoiled
    swarm.members.append(away)
    swarm.round(swarm.members, swarm.members)
    assert sum(swarm.averaged.values()) == 5 + 20 + 7


def test_what_a_peer_claimed_returns_when_it_is_gone() -> None:
    """After two rounds without it; those who were told of the claims forget them."""
    swarm, stays, away = cut_off()
    for _ in range(30):
        swarm.round([stays], [stays])
        stays.train(8)
    assert difference(union(away.draws._trained), stays.draws.ledger.consumed) == ()


def test_a_straggler_keeps_its_lease() -> None:
    """A member that computes on for many rounds keeps what it drew."""
    swarm = Swarm(0)
    slow, fast = swarm.members = [Member(1, swarm), Member(2, swarm)]
    slow.train(7)
    for _ in range(10):
        fast.train(4)
        swarm.round(swarm.members, [fast])
    assert not slow.draws.spoiled
    swarm.round(swarm.members, [slow, fast])
    assert sum(swarm.averaged.values()) == 47


def test_a_contribution_costs_few_bytes() -> None:
    """What a contribution says of its samples has at most 100 bytes per run of positions."""
    swarm = Swarm(3)
    for _ in range(40):
        swarm.event()
    for member in swarm.members:
        member.train(4)
        said = member.draws.say(b"", len(member.accumulated))
        drawn = union(*[((p, p + 1),) for p in member.accumulated])
        runs = len(drawn) + len(unpacked(member.draws.claims(), 4096))
        assert len(said) <= 100 * max(1, runs)


def test_blocks_of_one_sample_are_claimed_together() -> None:
    """A long first epoch over single samples, without a lease: the contribution names few runs, and is
    understood.
    """
    draws = Draws(1_000_000, 1)
    draws.attach(b"a" * 20, lambda: [b"b" * 20], lambda: None)
    while size(draws._out) < 40_000:
        draws.next_run(None, lambda _: 16)
    draws.trained(40_000)
    understood = heard(draws.say(b"", 40_000))
    assert understood is not None
    assert size(understood[1].drawn) == 40_000
    assert len(understood[1].drawn) < 20


def test_prefetched_samples_are_given_out_again() -> None:
    """What a loader was given and no step() counted comes first when a loader begins anew."""
    swarm = Swarm(0)
    member = Member(1, swarm)
    given = member.draws.next_run(None, lambda _: 4)
    member.draws.trained(2)
    member.draws.begin()
    assert given is not None
    assert member.draws.next_run(None, lambda _: 2) == (given[0] + 2, given[1])


def test_what_is_inherited_is_not_drawn_once_more() -> None:
    """Positions of a peer that left may be leased to the one that takes its samples, by then: they are
    accumulated already, and the loader gets others.
    """
    swarm = Swarm(0)
    swarm.members = receiver, giver = [Member(1, swarm), Member(2, swarm)]
    receiver.train(3)
    giver.train(4)
    note = giver.draws.say(b"", 4)
    given = union(giver.draws._trained)
    swarm.members.remove(giver)
    for samples in (*(1,) * (LAPSES_AFTER + 1), 6):  # what it wants grows when the lease has lapsed
        receiver.train(samples)
        swarm.round([receiver], [receiver])
        if intersection(receiver.draws._ready, given) == given:
            break
    assert intersection(receiver.draws._ready, given) == given, "the positions are not this peer's to draw"
    assert receiver.draws.inherited(note)
    receiver.train(20)
    assert size(receiver.draws._trained) == size(union(receiver.draws._trained)) == 24


def test_counting_what_was_not_given_out_is_refused() -> None:
    """step() with more samples than the sampler gave out names both numbers."""
    member = Member(1, Swarm(0))
    member.draws.next_run(None, lambda _: 4)
    with pytest.raises(ConfigurationError, match="counts 5 samples, but the sampler gave out only 4"):
        member.draws.trained(5)


def test_a_note_that_is_none_tells_nothing() -> None:
    """Whatever bytes a leader sends, they are understood or tell nothing; nobody's peer ends."""
    rng = random.Random(1)
    for _ in range(2000):
        inner, told = understand(rng.randbytes(rng.randint(0, 40)))
        assert isinstance(inner, bytes)
        assert told.consumed == () or told.said


def test_a_broken_ledger_is_refused() -> None:
    """load_state_dict() of something else raises StateError, and changes nothing."""
    member = Member(1, Swarm(0))
    before = member.draws.state_dict()
    for broken in (
        {},
        {**before, "consumed": [5]},
        {**before, "leases": {"zz": []}},
        {**before, "epoch": "x"},
    ):
        with pytest.raises(StateError, match="ledger"):
            member.draws.load_state_dict(broken)
    assert member.draws.state_dict() == before


def test_runs_are_sets() -> None:
    """union, difference, intersection and packing are those of sets of numbers."""
    rng = random.Random(2)

    def some() -> tuple[set[int], Runs]:
        numbers = {rng.randrange(60) for _ in range(rng.randrange(40))}
        return numbers, union((n, n + 1) for n in numbers)

    def numbers(runs: Runs) -> set[int]:
        return {n for run in runs for n in range(*run)}

    for _ in range(500):
        (one, a), (other, b) = some(), some()
        assert numbers(union(a, b)) == one | other
        assert numbers(difference(a, b)) == one - other
        assert numbers(intersection(a, b)) == one & other
        assert unpacked(packed(a), 60) == a
        assert sum(end - first for _, first, end in by_pass(a, 7)) == len(one)
        assert all(0 <= first < end <= 7 for _, first, end in by_pass(a, 7))


def test_the_first_piece_is_that_of_a_search_through_all() -> None:
    """Of random sets: what going through the pieces one by one finds."""
    dice = random.Random(5)
    for _ in range(2000):
        cuts = [sorted(dice.sample(range(120), 2 * dice.randrange(0, 6))) for _ in range(2)]
        runs, taken = (union(*(((a, b),) for a, b in zip(c[::2], c[1::2], strict=True))) for c in cuts)
        free = (*runs, (150, 1 << 63))
        block, of = dice.randrange(1, 9), dice.randrange(1, 5)
        place = dice.randrange(of)
        pieces = [
            (at, min(at + block, stop))
            for first, stop in (*runs, (150, 400))
            for at in range(first, stop, block)
        ]
        left = (difference((piece,), taken) for piece in pieces[place::of])
        assert first_piece(free, taken, block, place, of) == next(each for each in left if each)


def test_who_claims_everything_holds_up_nobody() -> None:
    """The others draw at once, beyond what of it counts; a round leaves it a few rounds' worth."""
    one = Draws(10_000, 32)
    one.attach(b"a" * 20, lambda: [b"b" * 20], lambda: None)
    one.heard(b"b" * 20, packed(((0, 1 << 62),)))
    assert one.next_run(None, lambda first: 8) == (MOST_CLAIMED + 0, MOST_CLAIMED + 8)
    ledger = PositionLedger()
    said = {name(b"a" * 20): Said(((0, 8),), (), 0), name(b"b" * 20): Said((), ((0, 1 << 62),), 0)}
    ledger.commit(0, RoundNotes(said, {}, {}))
    assert size(ledger.leases[name(b"b" * 20)]) == MOST_LEASED_ROUNDS * 8


def test_of_two_that_claim_the_same_the_one_that_is_away_yields() -> None:
    """What a killed peer claimed last, a newcomer that never heard of it draws: the round leaves it that."""
    gone, new, leader = (name(letter * 20) for letter in (b"a", b"b", b"c"))
    ledger = PositionLedger()
    said = {leader: Said(((0, 8),), (), 0), new: Said((), ((8, 16),), 0)}
    ledger.commit(0, RoundNotes(said, {}, {gone: ((8, 24),)}))
    assert (ledger.leases[new], ledger.leases[gone]) == (((8, 16),), ((16, 24),))
