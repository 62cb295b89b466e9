"""How many peers a run takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.peer.advice import check_room
from p2pavg.peer.entering import first_links
from p2pavg.peer.refusals import LinkRefusals
from p2pavg.peer.settings import Settings
from p2pavg.plan import MOST_FLAT, MOST_GATHERED, MOST_MEMBERS

TWO = ["us-east-1", "eu-west-3"]


def room(trainers: int, regions: list[str] | None = None, **options: Any) -> None:
    named = (regions or [""]) * (trainers + 1)
    check_room(Settings("big", **options), named[: trainers + 1])


def test_a_full_run_over_regions_refuses_clearly() -> None:
    """The 65th peer hears how many there are and what to do; the 64th enters."""
    room(MOST_MEMBERS - 1, TWO)
    with pytest.raises(ConfigurationError, match=r"run 'big' has 64 peers, and more than 64.*another run_id"):
        room(MOST_MEMBERS, TWO)


@pytest.mark.parametrize(
    ("regions", "plan"),
    [
        ([""], "auto"),  # who names none may be near all others
        (["us-east-1"], "auto"),
        ([f"eu/r{k}/z" for k in range(33)], "auto"),  # nobody adds up for anybody
        (TWO, "flat"),
    ],
    ids=["unnamed", "one", "each its own", "flat"],
)
def test_a_flat_run_is_full_sooner(regions: list[str], plan: str) -> None:
    """Where no two levels are to be had, the 33rd is refused, and hears of regions and of the way out."""
    room(MOST_FLAT - 1, regions, plan=plan)
    with pytest.raises(
        ConfigurationError, match=r"has 32 peers, and more than 32 .*region=.*P2PAVG_MOST_PEERS"
    ):
        room(MOST_FLAT, regions, plan=plan)


def test_a_sparse_run_is_full_soonest() -> None:
    """Where each peer sends its contribution to all others, the 13th hears why it is one too many."""
    room(MOST_GATHERED - 1, compression="sparse-64")
    with pytest.raises(
        ConfigurationError, match=r"run 'big' has 12 peers, and Outer\(density=\) takes at most 12"
    ):
        room(MOST_GATHERED, compression="sparse-64")


def test_who_insists_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment lets a newcomer in beyond what is tested, or keeps a run small; a typo is an error."""
    monkeypatch.setenv("P2PAVG_MOST_PEERS", "100")
    room(99)
    with pytest.raises(ConfigurationError, match="has 100 peers, and P2PAVG_MOST_PEERS is 100"):
        room(100)
    for typo in ("0", "many", "-3", "1e3"):
        monkeypatch.setenv("P2PAVG_MOST_PEERS", typo)
        with pytest.raises(ConfigurationError, match="whole number"):
            Settings("big")


@pytest.mark.parametrize("role", ["trainer", "watcher"])
async def test_a_newcomer_counts_those_that_train(role: str) -> None:
    """Whom a newcomer finds training it counts before it takes part; who looks on takes no room."""
    infos = {bytes([k]): SimpleNamespace(role=role, region="") for k in range(MOST_FLAT)}
    view: Any = SimpleNamespace(peers=infos)
    endpoint: Any = SimpleNamespace(links=dict.fromkeys(infos))

    async def dial(done: Any) -> None:
        return None

    dialler: Any = SimpleNamespace(first_links=dial)
    refusals = LinkRefusals(set, lambda: 0, lambda error: None, proven=True)
    entering = first_links(dialler, refusals, endpoint, view, Settings("big", initial_peers=["127.0.0.1:9"]))
    if role == "watcher":
        await entering
    else:
        with pytest.raises(ConfigurationError, match="has 32 peers"):
            await entering
