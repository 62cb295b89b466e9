"""One download from several donors: every chunk comes once, from someone who has it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.errors import StateError
from p2pavg.identity import Identity
from p2pavg.rounds.state.fetching import Fetching, allowance, choose
from p2pavg.rounds.state.manifest import CHUNK_BYTES, HASH_BYTES, Manifest

ALLOWED = 40


def manifest(chunks: int, *, epoch: int = 3, differs: frozenset[int] = frozenset()) -> Manifest:
    """Chunk i has the hash i, or another one where it differs."""
    hashes = b"".join((i + (10**6 if i in differs else 0)).to_bytes(HASH_BYTES, "big") for i in range(chunks))
    return Manifest(epoch, b"l" * 32, 0, chunks * CHUNK_BYTES, hashes)


@given(st.integers(1, 400), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_donors_that_die_do_not_stop_a_download(chunks: int, count: int, seed: int) -> None:
    """While one donor with everything lives, all chunks are verified, each asked of one donor at a time."""
    rng = random.Random(seed)
    names = [bytes([i]) * 20 for i in range(count)]
    differing = {n: frozenset(rng.sample(range(chunks), chunks // 3)) for n in names[1:]}
    offers = {n: manifest(chunks, differs=d) for n, d in differing.items()}
    primary = manifest(chunks)
    fetching = Fetching(primary, {names[0]: primary, **offers})
    coming: dict[bytes, list[int]] = {name: [] for name in names}
    for _ in range(100_000):
        if not fetching.left:
            break
        for donor in fetching.donors:
            asked = fetching.ask(donor, ALLOWED)
            have = offers.get(donor, primary).hashes
            assert all(have[c * 16 :][:16] == primary.hashes[c * 16 :][:16] for c in asked)
            assert not set(asked) & {c for others in coming.values() for c in others}
            coming[donor] += asked
            assert fetching.coming(donor) <= ALLOWED
        if len(fetching.donors) > 1 and rng.random() < 0.05:
            lost = rng.choice([d for d in fetching.donors if d != names[0]])
            fetching.drop(lost)
            coming[lost] = []
        for donor in fetching.donors:
            for _ in range(rng.randrange(8)):
                if coming[donor]:
                    fetching.verified(coming[donor].pop(0))
    assert fetching.left == 0
    assert not fetching.stuck()


def test_a_far_donor_has_more_on_its_way() -> None:
    """What may be on its way fills a link of 100 MB/s, whatever its round trip, and is no more."""
    for rtt in (0.0, 0.001, 0.02, 0.3):
        assert allowance(rtt) * CHUNK_BYTES >= 100e6 * rtt + 8 * CHUNK_BYTES - CHUNK_BYTES
        assert allowance(rtt) <= 8 + 100 * rtt


def test_without_the_primary_only_shared_chunks_can_come() -> None:
    """When the only donor that has a chunk is gone, the download says that it is stuck."""
    primary, other = manifest(5), manifest(5, differs=frozenset({2}))
    fetching = Fetching(primary, {b"a": primary, b"b": other})
    assert not fetching.stuck()
    fetching.drop(b"a")
    assert fetching.stuck()


def test_a_wrong_chunk_is_asked_for_again() -> None:
    """After a restart everything that was not verified is asked for anew, from those that are left."""
    primary = manifest(10)
    fetching = Fetching(primary, {b"a": primary, b"b": primary})
    asked = fetching.ask(b"a", 5)
    fetching.verified(asked[0])
    assert fetching.wrong(asked[1]) == b"a"
    fetching.drop(b"a")
    fetching.restart()
    assert sorted(fetching.ask(b"b", 20)) == sorted(set(range(10)) - {asked[0]})


def test_the_newest_and_most_shared_manifest_is_chosen() -> None:
    """Of the newest epoch, the manifest that most donors share is the primary."""
    old, shared, odd = manifest(4, epoch=2), manifest(4), manifest(4, differs=frozenset({1}))
    chosen = choose({b"a": old, b"b": odd, b"c": shared, b"d": shared, b"e": old})
    assert chosen in (b"c", b"d")


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
