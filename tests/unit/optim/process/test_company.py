"""Peers that a launcher starts together begin together."""

from __future__ import annotations

import logging

import pytest

from p2pavg.errors import ConfigurationError
from p2pavg.optim.process import company


def test_who_comes_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """For as many others as there are beside this one; nothing is said when they come."""
    asked: list[tuple[int, float]] = []

    def wait(count: int, seconds: float) -> int:
        asked.append((count, seconds))
        return count

    company.await_company(3, wait)
    assert asked == [(2, company.WAIT_S)]
    company.await_company(1, wait)
    assert len(asked) == 1
    assert not caplog.records


def test_who_does_not_come_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A warning, which is shown where no logging is set up, too."""
    with caplog.at_level(logging.WARNING):
        company.await_company(3, lambda count, seconds: 0)
    assert "only 1 peer is there of the 3 that were started together" in caplog.text


def test_a_number_that_is_none_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is named; without it nobody is waited for."""
    monkeypatch.delenv(company.VARIABLE, raising=False)
    assert company.wanted() == 1
    for wrong in ("0", "-1", "many", ""):
        monkeypatch.setenv(company.VARIABLE, wrong)
        with pytest.raises(ConfigurationError, match="P2PAVG_PEERS must be a whole number"):
            company.wanted()
