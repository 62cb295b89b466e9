"""What a monitor makes of records, links and messages; time is a parameter."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from p2pavg.identity import short_id
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.monitor import heard
from p2pavg.monitor.picture import KEPT_S, Picture
from p2pavg.monitor.screen import screen
from p2pavg.monitor.shown import Shown, figures_line, gradients_line, run_line
from p2pavg.report.compact import CompactReport
from p2pavg.report.distance import Distance
from p2pavg.report.prices import PriceTable
from p2pavg.report.status import Status
from p2pavg.transport.links import handshake
from p2pavg.transport.links.handshake import Refusal
from tests.unit.report.reports import link, report

A, B, C = b"a" * 20, b"b" * 20, b"c" * 20
PRICES = PriceTable({"default": 0.5, "eu": 1.0}, {Distance.WORLD: 0.1})


def status(**changes: Any) -> dict[str, Any]:
    return {
        "t": "status",
        "epoch": 4,
        "target": 1000,
        "samples": 100,
        "counted": None,
        "rate": 50.0,
        "state": "computing",
        "leader": A,
        "total": 4000,
        "region": "eu-west-1",
        "relayed": 0,
        "peers": [],
        "links": [],
        "version": "0.1.0",
        "reach": "direct",
        "memory": 10**9,
        "device_memory": 0,
        "loss": None,
        "passes": 0.0,
        "blocks_consumed": 0,
        "plan": "",
        "bytes_by_stage": [],
        "egress_dollars": 0.0,
        "egress_dollars_flat": 0.0,
        **changes,
    }


def sees(*peers: bytes) -> list[list[Any]]:
    return [[peer, 4, 100, 50.0, False] for peer in peers]


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": "event", "kind": kind, "fields": {"epoch": 4, **fields}}


def told_of(epoch: int, **changes: Any) -> dict[str, Any]:
    return {"t": "report", "report": CompactReport.of(report(epoch=epoch, **changes)).encode()}


def three(prices: PriceTable | None = None) -> Picture:
    """Three linked members at time 0; A leads."""
    picture = Picture("run", prices)
    records = {p: PeerInfo(p, (("h", 1),), region="eu-west-1", epoch=4, incarnation=1) for p in (A, B, C)}
    picture.listed(records, 0.0)
    for peer in (A, B, C):
        picture.linked(peer, 0.0)
    picture.told(A, status(counted=300, peers=sees(B, C)), 0.0)
    picture.told(B, status(peers=sees(A, C)), 0.0)
    picture.told(C, status(peers=sees(A, B)), 0.0)
    return picture


def states(shown: Shown) -> dict[bytes, str]:
    return {bytes.fromhex(peer.peer): peer.state for peer in shown.peers}


def events(shown: Shown) -> list[str]:
    return [words for _, _, words in shown.events]


def test_progress_moves_on_from_what_the_leader_counted() -> None:
    """The bar is the leader's count, moved on at the peers' rates, never beyond the target."""
    picture = three()
    assert picture.show(0.0).samples == 300
    shown = picture.show(1.0)
    assert (shown.epoch, shown.samples, shown.target) == (4, 450, 1000)
    assert shown.eta_s == pytest.approx(550 / 150)
    assert shown.leader == A.hex()
    picture.told(A, status(counted=990, peers=sees(B, C)), 1.0)
    assert picture.show(2.0).samples == 1000


def test_samples_per_second_are_those_of_whole_epochs() -> None:
    """The run's rate is samples over wall clock of whole epochs; a peer's likewise."""
    picture = three()
    for epoch in range(5):
        for peer in (A, B):
            picture.told(
                peer, told_of(epoch, samples=1000, local_samples=400, seconds_total=8.0), 8.0 * epoch
            )
    picture.told(A, status(counted=0, peers=sees(B, C)), 33.0)
    shown = picture.show(33.0)
    assert shown.samples_per_second == pytest.approx(125.0)
    rows = {bytes.fromhex(peer.peer): peer for peer in shown.peers}
    assert rows[A].samples_per_second == pytest.approx(50.0)
    assert shown.granularity == pytest.approx(8.0 / 1.6)


def test_a_stalled_run_slows_down_on_the_screen() -> None:
    """When epochs no longer end, the rate falls instead of showing the last one for ever."""
    picture = three()
    picture.told(A, told_of(3, samples=1000, seconds_total=10.0), 0.0)
    for now in (1.0, 100.0):
        picture.told(A, status(counted=300, peers=sees(B, C)), now)
    assert picture.show(1.0).samples_per_second == pytest.approx(100.0)
    assert picture.show(100.0).samples_per_second < 15.0


def test_a_killed_peer_shows_at_once_and_is_said_once() -> None:
    """When its link closes it is gone, though every member tells of it; the next round is named."""
    picture = three()
    picture.unlinked(C, "closed by the other side", 1.0)
    assert states(picture.show(1.0))[C] == "gone"
    for member in (A, B):
        picture.told(member, event("down", peer=C, why="closed by the other side"), 1.1)
        picture.told(member, event("begun", attempt=2, contributors=2), 1.2)
    name = short_id(C)
    assert events(picture.show(2.0)) == [
        f"peer {name} was lost in epoch 4 (closed by the other side); round held with 2"
    ]
    assert C in states(picture.show(1.0 + KEPT_S))
    assert C not in states(picture.show(1.1 + KEPT_S))


def test_a_failed_attempt_and_its_retry_are_one_sentence() -> None:
    """An attempt that failed, and the round that followed it with fewer."""
    picture = three()
    picture.told(A, event("aborted", attempt=1, why="no heartbeat", final=False), 1.0)
    picture.told(A, event("begun", attempt=2, contributors=3), 1.5)
    assert events(picture.show(2.0)) == ["an attempt of epoch 4 failed (no heartbeat); round retried with 3"]


def test_a_stopped_member_that_catches_up_rewrites_nothing() -> None:
    """What a peer tells of rounds and leaders that the others left behind counts for nothing."""
    picture = three()
    picture.told(A, event("leader", leader=A), 0.5)
    picture.told(A, event("begun", attempt=0, contributors=3), 0.5)
    picture.told(A, event("excluded", peer=C, why="no heartbeat"), 1.0)
    picture.told(A, event("begun", attempt=1, contributors=2), 1.1)
    picture.told(B, event("begun", attempt=0, contributors=3), 1.2)
    picture.told(
        A, {"t": "event", "kind": "begun", "fields": {"epoch": 5, "attempt": 0, "contributors": 2}}, 2.0
    )
    picture.told(C, event("begun", attempt=0, contributors=3), 5.0)
    picture.told(C, event("leader", leader=B), 5.0)
    assert events(picture.show(5.0)) == [
        f"peer {short_id(C)} is left out of epoch 4 (no heartbeat); round retried with 2"
    ]


def test_progress_starts_anew_when_an_epoch_ends() -> None:
    """Between two statuses of the leader its report says that the next epoch began."""
    picture = three()
    picture.told(A, told_of(4, samples=1000, seconds_total=10.0), 0.6)
    shown = picture.show(0.8)
    assert (shown.epoch, shown.samples) == (5, 30)


def test_a_peer_that_others_still_hear_is_not_gone() -> None:
    """Only our own link to it broke: members that told since then see it."""
    picture = three()
    picture.unlinked(C, "timed out", 1.0)
    picture.told(A, status(counted=300, peers=sees(B, C)), 3.0)
    assert states(picture.show(3.0))[C] == "training"
    picture.told(A, status(counted=300, peers=sees(B)), 4.0)
    assert states(picture.show(4.0))[C] == "gone"


def test_a_peer_that_cannot_be_linked_is_shown_as_others_see_it() -> None:
    """Nobody can connect to it, the watcher neither: members tell where it stands, and its end."""
    picture, hidden = three(), b"d" * 20
    records = {p: PeerInfo(p, (("h", 1),), epoch=4, incarnation=1) for p in (A, B, C)}
    away = PeerInfo(hidden, (), client_only=True, epoch=3, incarnation=1, samples_per_second=20.0)
    picture.listed({**records, hidden: away}, 0.5)
    assert states(picture.show(0.5))[hidden] == "no link"
    picture.told(A, status(counted=300, peers=[*sees(B, C), [hidden, 4, 70, 25.0, False]]), 1.0)
    shown = picture.show(1.0)
    (row,) = (peer for peer in shown.peers if peer.peer == hidden.hex())
    assert (row.state, row.epoch, row.samples, row.rate) == ("training", 4, 70, 25.0)
    picture.told(A, event("down", peer=hidden, why="closed by the other side"), 1.5)
    assert states(picture.show(1.6))[hidden] == "gone"


def test_a_silent_peer_shows() -> None:
    """A peer that tells nothing any more is silent, by our own clock or by a member's word."""
    picture = three()
    for now in (1.0, 2.0, 3.0):
        picture.told(A, status(counted=300, peers=sees(B, C)), now)
        picture.told(B, status(peers=sees(A, C)), now)
    assert states(picture.show(3.0)) == {A: "computing", B: "computing", C: "silent"}
    picture.told(A, event("silent", peer=B, why="no heartbeat"), 3.0)
    assert states(picture.show(3.0))[B] == "silent"
    picture.told(A, event("heard again", peer=B), 3.1)
    assert states(picture.show(3.2))[B] == "computing"


def test_joining_and_leaving_are_said() -> None:
    """Who comes later than the first look joined; whose record is withdrawn left."""
    picture = three()
    records = {p: PeerInfo(p, (("h", 1),), epoch=4, incarnation=1) for p in (A, B, C)}
    new = b"d" * 20
    picture.listed({**records, new: PeerInfo(new, (("h", 1),), epoch=4, incarnation=1)}, 10.0)
    picture.listed(records, 11.0)
    assert events(picture.show(11.0)) == [
        f"peer {short_id(new)} joined in epoch 4",
        f"peer {short_id(new)} left in epoch 4",
    ]


def test_a_newcomer_joins_where_the_run_is() -> None:
    """A newcomer's record says epoch 0 until it has the state: it joined in the epoch of the others. Who
    comes into view where nobody trains began the run, or goes on from a checkpoint.
    """
    picture = three()
    records = {p: PeerInfo(p, (("h", 1),), epoch=4, incarnation=1) for p in (A, B, C)}
    new = b"d" * 20
    picture.listed({**records, new: PeerInfo(new, (("h", 1),), incarnation=1, joining=True)}, 10.0)
    assert events(picture.show(10.0)) == [f"peer {short_id(new)} joined in epoch 4"]
    for epoch, told in ((0, "began the run in epoch 0"), (7, "goes on from epoch 7")):
        picture = Picture("run")
        door = PeerInfo(b"e" * 20, (("h", 2),), incarnation=1, role="watcher")
        picture.listed({door.peer_id: door}, 0.0)
        found = {door.peer_id: door, A: PeerInfo(A, (("h", 1),), epoch=epoch, incarnation=1)}
        picture.listed(found, 60.0)
        assert events(picture.show(60.0)) == [f"peer {short_id(A)} {told}"]


def test_prices_of_regions_where_nobody_is_are_said_once() -> None:
    """A price table whose regions no peer has: one event, once the peers of the run are found."""
    picture = three(PriceTable({"default": 1.0, "us": 2.0}, {}))
    assert events(picture.show(0.5)) == []
    told = "no peer is in a region that begins as the price table says, with 'us': their regions are "
    for now in (5.0, 6.0):
        (said,) = events(picture.show(now))
        assert said.startswith(told + "'eu-west-1'; ")
    assert events(three(PRICES).show(5.0)) == []


def test_dollars_come_from_the_price_table() -> None:
    """Every peer's hour and what it sends, by region and class of link; per million at the run's pace."""
    picture = three(PRICES)
    sent = (link(10**9, Distance.WORLD),)
    for peer in (A, B, C):
        picture.told(peer, told_of(3, samples=1000, seconds_total=10.0, links=sent), 0.0)
    shown = picture.show(0.5)
    assert shown.dollars_per_hour == pytest.approx(3 * (1.0 + 0.1 * 360))
    assert shown.dollars_per_million_samples == pytest.approx(3 * 37.0 / 3600 / 100 * 1e6)


def test_traffic_is_told_by_class_of_link_and_priced_by_region() -> None:
    """[egress] prices what goes to a region that it names; the bytes of a class are shared out over regions
    as those of the last epoch were.
    """
    picture = three(PriceTable({}, {Distance.WORLD: 0.1}, {"eu": {"ap": 0.02, "us": 0.05}}))
    for peer, region in ((B, "ap-south-1"), (C, "us-east-1")):
        picture.told(peer, status(region=region), 0.0)
    sent = (link(3 * 10**9, Distance.WORLD), link(10**9, Distance.ZONE))
    picture.told(A, told_of(3, seconds_total=10.0, links=sent), 0.0)
    world = list(Distance).index(Distance.WORLD)
    links = [[B, world, 0.1, 1, 1e6, 2 * 10**6, 0], [C, world, 0.1, 1, 1e6, 10**6, 0]]
    picture.told(A, status(links=links), 0.1)
    shown = picture.show(0.5)
    assert shown.dollars_per_hour == pytest.approx(360 * (2 * 0.02 + 0.05))
    assert shown.egress_by_distance == {"zone": 360e9, "world": 3 * 360e9}
    assert "egress 1.44 TB/h (360 GB zone, 1.08 TB world)" in figures_line(shown)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=24),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=20,
    ),
    st.sampled_from(sorted(status())),
    st.sampled_from(["status", "event", "report"]),
)
def test_whatever_a_member_tells_does_no_harm(value: Any, field: str, kind: str) -> None:
    """Messages with arbitrary fields are understood or ignored; the picture can be shown all the same."""
    picture = three()
    picture.told(A, {**status(counted=1), field: value, "t": kind}, 1.0)
    picture.told(A, {"t": kind, "kind": value, "fields": value, "report": value}, 1.0)
    assert set(states(picture.show(1.0))) >= {A, B, C}


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 1e308, 10**400, True, "1"])
def test_impossible_numbers_are_no_status(value: Any) -> None:
    """A rate that no machine has does not spoil the sums of the others."""
    picture = three()
    picture.told(B, status(rate=value), 1.0)
    assert Status.from_message(status(rate=value)) is None
    assert picture.show(1.0).eta_s == pytest.approx(550 / 150)


def test_a_rate_of_next_to_nothing_is_none_at_all() -> None:
    """Dividing by it would give infinity, which JSON does not have."""
    picture = three()
    for peer in (A, B, C):
        picture.told(peer, status(rate=1e-310), 1.0)
    assert picture.show(1.0).eta_s is None


def test_text_of_members_cannot_move_the_cursor() -> None:
    """Control characters in what a member tells, or says of itself, do not reach the terminal."""
    told = heard.event(event("down", peer=B, why="\x1b[2Jgone\n"))
    assert told is not None
    assert told.why == " [2Jgone "
    listed = PeerInfo.decode(PeerInfo(B, region="\x1b[2J").encode(), B, 1)
    assert listed is not None
    assert listed.region == " [2J"
    assert PeerInfo.decode(PeerInfo(B, (("\x1b[2J", 1),)).encode(), B, 1) is None
    with pytest.raises(Refusal) as refused:
        handshake.raise_refusal({"refuse": "run", "why": "\x1b[2J"})
    assert refused.value.text == " [2J"


def named(peer: bytes, name: str, **changes: Any) -> PeerInfo:
    return PeerInfo(peer, (("198.51.100.7", 31330),), epoch=4, incarnation=1, name=name, **changes)


def test_peers_have_names() -> None:
    """A peer is called by its name; where two have the same, their ids tell them apart."""
    picture = Picture("run")
    picture.listed({A: named(A, "ada"), B: named(B, "box"), C: named(C, "box")}, 0.0)
    for peer in (A, B, C):
        picture.linked(peer, 0.0)
    shown = picture.show(0.5)
    assert [peer.name for peer in shown.peers] == ["ada", f"box {short_id(B)}", f"box {short_id(C)}"]
    picture.unlinked(A, "timed out", 1.0)
    assert events(picture.show(1.0)) == ["ada was lost in epoch 4 (timed out)"]


def test_the_run_line_tells_the_pass_over_the_data() -> None:
    """With a sampler of the swarm: in which pass the run is, and how much of it is consumed."""
    picture = three(PRICES)
    assert "pass" not in run_line(picture.show(0.5))
    picture.told(A, status(passes=1.25, blocks_consumed=9), 0.3)
    assert "  pass 2, 25%  " in run_line(picture.show(0.5))


def test_the_monitor_tells_bytes_by_stage_and_dollars_spared() -> None:
    """What all peers sent in the last round by stage of its plan, and how much less than flat the leader says
    that it cost, are in a line of their own; without a round there is no such line.
    """
    picture = three(PRICES)
    assert gradients_line(picture.show(0.5)) == ""
    for peer, sent in ((A, 3 * 10**6), (B, 5 * 10**6)):
        stages = [["contributions", sent], ["partial means", 10**6]]
        picture.told(peer, status(plan="two-level", bytes_by_stage=stages), 0.3)
    shown = picture.show(0.5)
    assert gradients_line(shown) == "two-level: 8 MB contributions, 2 MB partial means"
    costs = {"egress_dollars": 0.02, "egress_dollars_flat": 0.05}
    picture.told(C, status(plan="two-level", **costs), 0.3)
    shown = picture.show(0.5)
    assert gradients_line(shown).endswith("partial means; $ 0.02, 0.03 less than flat")
    assert shown.to_dict(1e9)["bytes_by_stage"] == {"contributions": 8 * 10**6, "partial means": 2 * 10**6}
    terminal = io.StringIO()
    Console(width=80, height=24, file=terminal).print(screen(shown, 80, 24))
    assert "two-level: 8 MB contributions" in terminal.getvalue()


def test_who_downloads_is_not_counted() -> None:
    """A peer that has no state yet brings nothing: it is shown, and not counted among those that train."""
    picture = Picture("run")
    picture.listed({A: named(A, "ada"), B: named(B, "new", joining=True)}, 0.0)
    picture.linked(A, 0.0)
    picture.told(A, status(peers=sees(B)), 0.4)
    line = run_line(picture.show(0.5))
    assert line.endswith("1 peer and 1 downloading")


@pytest.mark.parametrize("tells", [status(plan="flat"), told_of(4)])
def test_what_is_logged_is_not_known_before_a_member_has_told_of_an_epoch(tells: dict[str, Any]) -> None:
    """`told` says whether a missing loss or sampler means anything yet, which the page's tiles ask."""
    picture = three()
    assert not picture.show(0.1).told
    picture.told(A, tells, 0.2)
    assert picture.show(0.3).told
