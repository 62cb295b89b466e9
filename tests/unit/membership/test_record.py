from __future__ import annotations

import pytest

from p2pavg.identity import Identity
from p2pavg.membership.table.record import (
    CHAIN_LENGTH,
    MAX_RECORD_BYTES,
    MAX_VALUE_BYTES,
    Chain,
    Refresh,
    SignedRecord,
    has_valid_signature,
    parse_record,
    sign_record,
)
from p2pavg.membership.table.wire import MAX_BODY

KEY = b"k" * 20


def make(value: bytes = b"value", lifetime: float = 15.0, chain: Chain | None = None) -> SignedRecord:
    anchor = (chain or Chain()).anchor
    return sign_record(
        Identity.generate(), KEY, value, incarnation=3, sequence=4, lifetime=lifetime, anchor=anchor
    )


def test_a_record_survives_its_encoding() -> None:
    """What is parsed is what was signed, and its signature is valid."""
    record = make()
    parsed = parse_record(record.encoded)
    assert parsed == record
    assert has_valid_signature(record)
    assert parsed.version == (3, 4)


def test_the_largest_record_fits_one_datagram() -> None:
    """A value of the largest size travels in one unfragmented datagram; a larger one is refused."""
    record = make(b"x" * MAX_VALUE_BYTES)
    assert len(record.encoded) == MAX_RECORD_BYTES
    assert len(record.encoded) + 40 <= MAX_BODY
    with pytest.raises(ValueError, match="840 bytes"):
        make(b"x" * (MAX_VALUE_BYTES + 1))


def test_every_changed_byte_is_noticed() -> None:
    """Flipping any byte of a record makes it malformed or its signature invalid."""
    record = make()
    for at in range(len(record.encoded)):
        changed = bytearray(record.encoded)
        changed[at] ^= 0x40
        parsed = parse_record(bytes(changed))
        assert parsed is None or not has_valid_signature(parsed)


def test_truncated_and_padded_records_are_malformed() -> None:
    """Only the exact bytes are a record."""
    encoded = make().encoded
    assert parse_record(encoded[:-1]) is None
    assert parse_record(encoded + b"\x00") is None
    assert parse_record(b"") is None


def test_lifetimes_are_capped() -> None:
    """A lifetime beyond 300 s is clipped by the publisher and refused by everybody else."""
    assert make(lifetime=1e9).lifetime == 300.0
    forged = bytearray(make().encoded)
    forged[65:69] = (400_000).to_bytes(4, "big")
    assert parse_record(bytes(forged)) is None


def test_only_the_publisher_can_refresh() -> None:
    """Each revealed link extends the record once, in order, over gaps; nothing else does."""
    chain = Chain()
    record = make(chain=chain)
    start = chain.last
    assert start == Refresh(0, record.anchor)
    first = chain.reveal()
    assert first is not None
    chain.reveal()
    third = chain.reveal()
    assert third is not None
    assert record.accepts(start, first)
    assert record.accepts(start, third)
    assert record.accepts(first, third)
    assert not record.accepts(third, first)
    assert not record.accepts(first, first)
    assert not record.accepts(start, Refresh(1, third.link))
    assert not record.accepts(start, Refresh(CHAIN_LENGTH + 1, third.link))
    assert not record.accepts(start, Refresh(2, b""))


def test_a_chain_ends() -> None:
    """After 255 refreshes there is no next link: the record must be signed again."""
    chain = Chain()
    steps = [chain.reveal() for _ in range(CHAIN_LENGTH)]
    assert all(steps)
    assert chain.reveal() is None
