"""One download from several donors: every chunk comes once, from someone who has it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.errors import StateError
from p2pavg.identity import Identity
from p2pavg.rounds.state.fetching import AHEAD_S, LEAST, MOST_TIMES, DonorSource, Fetching, choose, same
from p2pavg.rounds.state.manifest import HASH_BYTES, LEAST_CHUNK_BYTES, Manifest


def manifest(chunks: int, *, epoch: int = 3, differs: frozenset[int] = frozenset()) -> Manifest:
    """Chunk i has the hash i, or another one where it differs."""
    hashes = b"".join((i + (10**6 if i in differs else 0)).to_bytes(HASH_BYTES, "big") for i in range(chunks))
    return Manifest(epoch, b"l" * 32, 0, chunks * LEAST_CHUNK_BYTES, hashes)


@given(st.integers(1, 400), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_donors_that_die_do_not_stop_a_download(chunks: int, count: int, seed: int) -> None:
    """While one donor with everything lives, all chunks are verified, each asked of two donors at most."""
    rng = random.Random(seed)
    names = [bytes([i]) * 20 for i in range(count)]
    cans = {name: bytearray(b"\1" * chunks) for name in names}
    for name in names[1:]:
        for missing in rng.sample(range(chunks), chunks // 3):
            cans[name][missing] = 0
    fetching = Fetching(chunks, LEAST_CHUNK_BYTES, cans)
    coming: dict[bytes, list[int]] = {name: [] for name in names}
    now = 0.0
    for _ in range(100_000):
        if not fetching.left:
            break
        now += 0.1
        for donor in fetching.donors:
            asked = fetching.ask(donor, 0.05, now)
            assert all(cans[donor][chunk] for chunk in asked)
            assert not set(asked) & set(coming[donor])
            coming[donor] += asked
        assert (
            max(Counter(c for owed in coming.values() for c in set(owed)).values(), default=0) <= MOST_TIMES
        )
        if len(fetching.donors) > 1 and rng.random() < 0.05:
            lost = rng.choice([d for d in fetching.donors if d != names[0]])
            fetching.drop(lost)
            coming[lost] = []
        for donor in fetching.donors:
            for _ in range(rng.randrange(8)):
                if coming[donor]:
                    chunk = coming[donor].pop(0)
                    fetching.verified(chunk, now)
                    for owed in coming.values():
                        if chunk in owed:
                            owed.remove(chunk)
    assert fetching.left == 0
    assert not fetching.stuck()


def everything(chunks: int) -> bytearray:
    return bytearray(b"\1" * chunks)


def test_what_is_asked_of_a_donor_follows_its_rate() -> None:
    """Ten times the rate means about ten times as much on its way, and over a longer trip still more."""
    found = {}
    for name, per_s, rtt in (("slow", 10, 0.0), ("fast", 100, 0.0), ("far", 100, 0.5)):
        source = DonorSource(everything(1000))
        for n in range(1 + per_s):
            source.arrived(n / per_s)
        found[name] = source.allowance(rtt, 1 << 30)
    assert found["slow"] == pytest.approx(10 * AHEAD_S + 1, abs=1)
    assert found["fast"] == pytest.approx(100 * AHEAD_S + 1, abs=1)
    assert found["far"] == pytest.approx(100 * (AHEAD_S + 1.0) + 1, abs=1)


def test_the_last_chunks_of_a_slow_donor_are_asked_of_a_fast_one() -> None:
    """Who has nothing else to do takes over what the other still owes; whoever is first serves."""
    fetching = Fetching(6, LEAST_CHUNK_BYTES, {b"slow": everything(6), b"fast": everything(6)})
    owed = fetching.ask(b"slow", 0.0, 0.0)
    mine = fetching.ask(b"fast", 0.0, 0.0)
    assert len(owed) == LEAST
    for n, chunk in enumerate(mine):
        fetching.verified(chunk, n * 0.01)
    taken = fetching.ask(b"fast", 0.0, 0.1)
    assert taken
    assert set(taken) <= set(owed)
    assert fetching.ask(b"fast", 0.0, 0.1) == []
    for chunk in taken:
        fetching.verified(chunk, 0.2)
    assert fetching.coming(b"slow") == len(owed) - len(taken)
    assert fetching.left == len(owed) - len(taken)


def test_what_comes_soon_is_not_asked_for_twice() -> None:
    """Two donors sent 100 chunks/s, and what the one owes last is zeros: the other could be asked for all
    of its work of half a second, too.
    Once nothing came of it for that long, the other takes over.
    """
    fetching = Fetching(200, LEAST_CHUNK_BYTES, {b"busy": everything(200), b"idle": everything(200)})
    now = 0.0
    while fetching.left > 40:
        now += 0.01
        for donor in (b"busy", b"idle"):
            fetching.ask(donor, 0.0, now)
            for chunk in list(fetching._sources[donor].coming)[:1]:
                fetching.verified(chunk, now)
    while fetching.coming(b"idle"):
        now += 0.001
        fetching.verified(next(iter(fetching._sources[b"idle"].coming)), now)
    owed = fetching.coming(b"busy")
    assert owed > LEAST
    assert fetching.ask(b"idle", 0.0, now) == []
    assert fetching.ask(b"idle", 0.0, now + AHEAD_S + 0.01)


def test_what_is_here_already_is_not_asked_for() -> None:
    """A download that goes on where it was asks for the rest only."""
    fetching = Fetching(5, LEAST_CHUNK_BYTES, {b"a": everything(5)}, bytes([1, 0, 1, 0, 1]))
    assert fetching.left == 2
    assert sorted(fetching.ask(b"a", 0.0, 0.0)) == [1, 3]


def test_without_the_primary_only_shared_chunks_can_come() -> None:
    """When the only donor that has a chunk is gone, the download says that it is stuck."""
    primary, other = manifest(5), manifest(5, differs=frozenset({2}))
    fetching = Fetching(5, LEAST_CHUNK_BYTES, {b"a": same(primary, primary), b"b": same(primary, other)})
    assert not fetching.stuck()
    fetching.drop(b"a")
    assert fetching.stuck()


def test_a_wrong_chunk_is_asked_for_again() -> None:
    """After a restart everything that was not verified is asked for anew, from those that are left."""
    fetching = Fetching(10, LEAST_CHUNK_BYTES, {b"a": everything(10), b"b": everything(10)})
    asked = fetching.ask(b"a", 0.0, 0.0)
    fetching.verified(asked[0], 0.0)
    assert fetching.owing(asked[1]) == [b"a"]
    fetching.drop(b"a")
    fetching.restart()
    got: list[int] = []
    while more := fetching.ask(b"b", 0.0, 1.0):
        got += more
        for chunk in more:
            fetching.verified(chunk, 1.0)
    assert sorted(got) == sorted(set(range(10)) - {asked[0]})


def test_the_most_shared_and_newest_manifest_is_chosen() -> None:
    """More donors are faster than a newer state, because the results since come in any case."""
    old, odd, new = manifest(4, epoch=2), manifest(4, differs=frozenset({1})), manifest(4)
    offered = {b"a": old, b"b": odd, b"c": new, b"e": old}
    assert choose(offered, lambda donor: 0) in (b"a", b"e")
    assert choose({b"a": old, b"b": new}, lambda donor: 0) == b"b"
    assert choose(offered, lambda donor: donor in (b"a", b"c", b"e")) == b"b"


def test_a_manifest_is_bound_to_its_donor() -> None:
    """A manifest that was changed, or signed by another key, is refused."""
    donor, other = Identity.generate(), Identity.generate()
    signed = manifest(3).signed(donor.sign)
    signed.check(donor.public_key)
    with pytest.raises(StateError):
        signed.check(other.public_key)
    message = {**signed.to_message(), "epoch": 4}
    with pytest.raises(StateError):
        Manifest.from_message(message).check(donor.public_key)
