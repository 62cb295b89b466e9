"""Whom a newcomer asks for the state, and how long it waits for those that are not heard any more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.errors import StateError
from p2pavg.identity import Identity
from p2pavg.rounds.state import downloader as module
from p2pavg.rounds.state import manifest as state
from p2pavg.rounds.state.downloader import MAX_DONORS, Downloader
from p2pavg.rounds.state.trust import patience
from p2pavg.rounds.state.trust.record import ABSENT


class Member:
    """A link to one; `answers` at once, or when it is set."""

    rtt_min = 0.0

    def __init__(
        self, *, quiet_s: float = 0.0, answers: bool = False, results: int | None = None, busy: bool = False
    ) -> None:
        """results: it has what follows on the newcomer's own state, so many; None: only its whole state.
        busy: it says so for ever, and gets no further.
        """
        self.busy = busy
        self.questions = 0
        self.identity = Identity.generate()
        self.hello = {"key": self.identity.public_key}
        self.quiet_s = quiet_s
        self.results = results
        self.answers = asyncio.Event()
        self.asked = asyncio.Event()
        if answers:
            self.answers.set()

    async def request(self, message: Any, timeout: float) -> dict[str, object]:
        self.asked.set()
        self.questions += 1
        if self.busy:
            return {"busy": True, "bytes": 1 << 40, "done": 7, "rest": 0.0}
        async with asyncio.timeout(timeout):
            await self.answers.wait()
        if self.results is not None:
            return {"results": True, "count": self.results, "epoch_s": 0.5}
        made = state.Manifest(3, bytes(32), 0, 64, bytes(state.HASH_BYTES)).signed(self.identity.sign)
        return {**made.to_message(), "epoch_s": 0.5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "NOBODY_S", 0.05)


def asking(members: dict[bytes, Member], fetching: Downloader | None = None) -> asyncio.Task[Any]:
    links: Any = members
    fetching = fetching or Downloader(None, None, 4)  # type: ignore[arg-type]
    return asyncio.ensure_future(fetching.offers(lambda: list(members), links, None))


async def test_who_is_heard_is_asked_first() -> None:
    """Members that stopped, or were cut off, stand behind those that can answer."""
    members = {bytes([n]) * 20: Member(quiet_s=9.0) for n in range(MAX_DONORS)}
    members[b"z" * 20] = Member(answers=True)
    async with asyncio.timeout(10):
        offers = await asking(members)
    assert offers.donors == (b"z" * 20,)
    assert offers.epoch_s == 0.5


async def test_others_are_asked_when_those_asked_are_not_heard_any_more() -> None:
    """All that were asked fall silent; somebody comes, is asked, and answers."""
    members = {bytes([n]) * 20: Member() for n in range(MAX_DONORS)}
    offers = asking(members)
    async with asyncio.timeout(10):
        await asyncio.gather(*(member.asked.wait() for member in members.values()))
        for member in members.values():
            member.quiet_s = 9.0
        members[b"z" * 20] = Member(answers=True)
        assert (await offers).donors == (b"z" * 20,)


async def test_who_is_heard_may_take_its_time() -> None:
    """Members that copy a large state are waited for, and only so many have to copy."""
    members = {bytes([n]) * 20: Member() for n in range(MAX_DONORS)}
    offers = asking(members)
    async with asyncio.timeout(10):
        await asyncio.gather(*(member.asked.wait() for member in members.values()))
        other = members[b"z" * 20] = Member()
        done, _ = await asyncio.wait((offers,), timeout=4 * module.NOBODY_S)
        assert not done
        members[bytes(20)].answers.set()
        assert (await offers).donors == (bytes(20),)
    assert not other.asked.is_set()


async def test_who_comes_while_few_are_asked_is_asked_too() -> None:
    """A newcomer whose first link is the slow one of a swarm does not wait for it alone."""
    members = {b"a" * 20: Member()}
    offers = asking(members)
    async with asyncio.timeout(10):
        await members[b"a" * 20].asked.wait()
        members[b"z" * 20] = Member(answers=True)
        assert (await offers).donors == (b"z" * 20,)


async def test_one_that_does_not_answer_keeps_nobody_from_whoever_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first answer comes after a hundred seconds, from a member that was asked just then: the one that
    was asked at the start gets no hundred seconds more.
    """
    clock = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock))
    members = {b"a" * 20: Member()}
    offers = asking(members)
    async with asyncio.timeout(10):
        await members[b"a" * 20].asked.wait()
        clock = 100.0
        members[b"z" * 20] = Member(answers=True)
        assert (await offers).donors == (b"z" * 20,)


@pytest.mark.parametrize(("results", "chosen"), [(2, b"r"), (0, b"s"), (None, b"rs")])
async def test_who_stands_where_the_newcomer_does_gives_nothing(results: int | None, chosen: bytes) -> None:
    """Results on top of its own state are enough where somebody has some; a donor that is itself behind does
    not keep it from the state of one that is ahead.
    """
    members = {b"r" * 20: Member(answers=True, results=results), b"s" * 20: Member(answers=True)}
    async with asyncio.timeout(10):
        offers = await asking(members)
    wanted = {b"r" * 20, b"s" * 20} if results is None or results == 0 else {b"r" * 20}
    assert set(offers.donors) == wanted
    assert {donor[:1] for donor in offers.manifests} == {b"r": set(), b"s": {b"s"}, b"rs": {b"r", b"s"}}[
        chosen
    ]


async def test_a_newcomer_beside_peers_that_stand_where_it_does_waits_with_them() -> None:
    """All donors are as far as it is: there is no state to download, and results may come."""
    async with asyncio.timeout(10):
        offers = await asking({b"r" * 20: Member(answers=True, results=0)})
    assert (offers.donors, offers.manifests) == ((b"r" * 20,), {})


async def test_a_newcomer_that_hears_nobody_begins_anew() -> None:
    """It says so after a while, instead of waiting a minute for somebody who is gone."""
    async with asyncio.timeout(10):
        with pytest.raises(StateError, match="heard any more"):
            await asking({b"a" * 20: Member(quiet_s=9.0)})


@pytest.mark.parametrize("busy", [True, False])
async def test_members_that_give_nothing_keep_nobody_from_the_next(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are asked at once are mute, or busy without getting further, though they are heard: within
    seconds others are asked in their place. A busy one is not asked without a pause.
    """
    monkeypatch.setattr(patience, "ANSWER_S", 0.3)
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.1)
    members = {bytes([n]) * 20: Member(busy=busy) for n in range(MAX_DONORS)}
    members[b"z" * 20] = Member(answers=True)
    async with asyncio.timeout(10):
        assert (await asking(members)).donors == (b"z" * 20,)
    assert all(member.questions <= 8 for member in members.values())


@pytest.mark.parametrize("busy", [True, False])
async def test_a_download_from_members_that_give_nothing_is_over_within_seconds(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them there are."""
    monkeypatch.setattr(patience, "ANSWER_S", 0.1)
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.02)
    members = {bytes([n]) * 20: Member(busy=busy) for n in range(100)}
    async with asyncio.timeout(10):
        with pytest.raises(StateError, match="no answer"):
            await asking(members)
    assert sum(member.asked.is_set() for member in members.values()) == module.MOST_ASKED


async def test_who_offered_what_did_not_come_is_asked_after_the_others() -> None:
    """As many as are asked at once failed before: another one is asked first, and waited for though they
    answer at once. Alone they are asked all the same.
    """
    fetching = Downloader(None, None, 4)  # type: ignore[arg-type]
    members = {bytes([n]) * 20: Member(answers=True) for n in range(MAX_DONORS)}
    for liar in members:
        fetching.record.failed(liar, module.time.monotonic(), ABSENT)
    async with asyncio.timeout(10):
        assert set((await asking(members, fetching)).donors) == set(members)
        honest = members[b"z" * 20] = Member()
        offers = asking(members, fetching)
        await honest.asked.wait()
        done, _ = await asyncio.wait((offers,), timeout=2 * module.GRACE_S)
        assert not done
        honest.answers.set()
        made = await offers
    made = replace(made, histories={donor: [] for donor in made.donors})
    assert fetching.chosen(made)[0] is made.manifests[b"z" * 20]


async def test_results_that_did_not_come_do_not_crowd_out_a_state() -> None:
    """One says that it has the results that are lacking, and gives none: then those count that offer a
    state.
    """
    fetching = Downloader(None, None, 4)  # type: ignore[arg-type]
    members = {b"l" * 20: Member(answers=True, results=3), b"t" * 20: Member(answers=True)}
    async with asyncio.timeout(10):
        offers = await asking(members, fetching)
        assert (offers.donors, offers.promised) == ((b"l" * 20,), {b"l" * 20: 3})
        fetching.record.failed(b"l" * 20, module.time.monotonic(), ABSENT)
        assert set((await asking(members, fetching)).manifests) == {b"t" * 20}


async def test_who_does_not_answer_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mute donor, and one whose description is wrong."""
    monkeypatch.setattr(patience, "ANSWER_S", 0.1)
    fetching = Downloader(None, None, 4)  # type: ignore[arg-type]
    members = {b"m" * 20: Member(), b"w" * 20: Member(answers=True)}
    members[b"w" * 20].hello = {"key": Identity.generate().public_key}
    async with asyncio.timeout(10):
        with pytest.raises(StateError):
            await asking(members, fetching)
    assert all(fetching.doubts(donor) for donor in members)
