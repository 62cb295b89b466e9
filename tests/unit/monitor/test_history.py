"""A run's reports read back: what is wrong with a file, and what a run's reports say together."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from p2pavg import cli
from p2pavg.errors import ConfigurationError
from p2pavg.monitor import history
from p2pavg.peer.publishing import Publisher
from p2pavg.report import AttemptReport, RoundReport, reading
from p2pavg.report.distance import Distance
from p2pavg.report.prices import PriceTable
from tests.unit.report.reports import link, report


def run_of(epochs: int, **changes: Any) -> list[RoundReport]:
    """Two peers' reports of epochs of 10 s."""
    return [
        report(
            epoch=epoch,
            peer=peer * 20,
            finished_at=1000.0 + 10 * (epoch + 1),
            bytes_sent=10**6,
            links=(link(10**6, Distance.WORLD),),
            extra={"loss": 5.0 - epoch},
            **changes,
        )
        for epoch in range(epochs)
        for peer in ("aa", "bb")
    ]


def write(path: Path, reports: list[RoundReport], tail: str = "") -> Path:
    path.write_text("".join(made.to_json() + "\n" for made in reports) + tail)
    return path


def test_a_report_comes_back_from_its_json() -> None:
    """Everything that a report says survives a line of JSON."""
    made = report(
        links=(link(5, Distance.ZONE),),
        failed_attempts=(AttemptReport(1, "aa", ("aa", "bb"), 0.5, "lost"),),
        causes=("lost",),
        discarded_why=("healed",),
        discarded_samples=(7,),
        extra={"loss": 1.5},
    )
    assert RoundReport.from_dict(json.loads(made.to_json())) == made


def test_reports_of_other_versions() -> None:
    """A field that a later minor version added is left out; another report version is refused by number."""
    data = report().to_dict()
    assert RoundReport.from_dict({**data, "invented_later": [1]}) == report()
    with pytest.raises(ConfigurationError, match=r"version 2.*version 1"):
        RoundReport.from_dict({**data, "version": 2})


def test_the_summary_adds_up(tmp_path: Path) -> None:
    """Samples count once per epoch, seconds are wall clock, bytes and dollars are all peers'."""
    run = reading.load([write(tmp_path / "r.jsonl", run_of(3))])
    made = history.summary(run, PriceTable({"default": 1.0}, {Distance.WORLD: 1000.0}))
    assert (made["peers"], made["epochs"], made["samples"]) == (2, 3, 3000)
    assert made["seconds"] == pytest.approx(30.0)
    assert made["samples_per_second"] == pytest.approx(100.0)
    assert made["wire_bytes_sent_by_distance"] == {"world": 6 * 10**6}
    assert sum(made["share"].values()) == pytest.approx(1.0)
    assert made["dollars"] == pytest.approx(6 * (10 / 3600 + 1.0))
    assert (made["loss_first"], made["loss_last"]) == (5.0, 3.0)
    said = "\n".join(history.words(made))
    for part in (
        "3 epochs (0 to 2)",
        "3000 samples, 100 per second",
        "calculation 80.0%",
        "6 MB world",
        "loss 5 to 3",
    ):
        assert part in said


def test_stages_of_plans_add_up(tmp_path: Path) -> None:
    """Bytes are told by stage of the plans, and how many rounds had which."""
    stages = {"contributions": 3 * 10**6, "results": 10**6}
    reports = [replace(one, plan="two-level", bytes_by_stage=stages) for one in run_of(3)]
    made = history.summary(reading.load([write(tmp_path / "r.jsonl", reports)]))
    assert made["bytes_by_stage"] == {"contributions": 18 * 10**6, "results": 6 * 10**6}
    said = "by stage: 18 MB of contributions, 6 MB of results (3 rounds two-level)"
    assert said in history.words(made)


def test_failures_are_told_in_words(tmp_path: Path) -> None:
    """Failed attempts with their causes, discarded samples with why, and lineages that parted."""
    reports = run_of(2)
    fields = {"attempts": 2, "causes": ("abc: no heartbeat",), "samples_discarded": 5, "lineage": "dd" * 32}
    values = {"discarded_why": ("healed",), "discarded_samples": (5,)}
    values |= {"samples_lost": {"ee" * 20: 144}}
    for peer in ("cc" * 20, "dd" * 20):  # both tell of the one that died
        reports.append(report(**{**fields, **values, "epoch": 1, "peer": peer, "finished_at": 1020.0}))
    said = "\n".join(history.words(history.summary(reading.load([write(tmp_path / "r.jsonl", reports)]))))
    assert "1 attempt failed and had to be made again: abc: no heartbeat (2)" in said
    assert "discarded 10 samples: 10 healed" in said
    assert "144 samples of peers that died or were cut off" in said
    assert "averaged apart" in said


def test_what_a_departing_peer_tells_counts_as_discarded_only(tmp_path: Path) -> None:
    """The last report of a peer that leaves, without a round, changes no rate, and names its samples."""
    fields = {
        "members": (),
        "samples": 0,
        "local_samples": 0,
        "attempts": 0,
        "epoch": 3,
        "finished_at": 1040.0,
    }
    left = report(**fields, samples_discarded=9, discarded_why=("left",), discarded_samples=(9,))
    alone, both = ([*run_of(3), *more] for more in ([], [left]))
    before = history.summary(reading.load([write(tmp_path / "a.jsonl", alone)]))
    after = history.summary(reading.load([write(tmp_path / "b.jsonl", both)]))
    assert after == {**before, "samples_discarded": 9, "discarded_why": {"left": 9}}
    with pytest.raises(ConfigurationError, match="no epoch of run"):
        reading.load([write(tmp_path / "c.jsonl", [left])])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("nonsense\n", "line 1 of"),
        ("[1]\n", "line 1 of"),
        ('{"a": 1}\n', "no report of an epoch"),
        (json.dumps({**asdict(report()), "version": 1, "epoch": "x"}) + "\n", "no report of an epoch"),
        ("[" * 100_000, "line 1 of"),
        *(
            (json.dumps({**report().to_dict(), name: value}) + "\n", "no report of an epoch")
            for name, value in [
                ("seconds_total", float("nan")),
                ("finished_at", 10**400),
                ("extra", 3),
                ("causes", [["why"]]),
                ("discarded_samples", ["many"]),
            ]
        ),
        (json.dumps({"version": 9}) + "\n", "version 9"),
        (report().to_json() + "\ngarbage\n" + report().to_json() + "\n", "line 2 of"),
        (report().to_json() + "\n" + report(run_id="other").to_json() + "\n", "--run"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_line(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing, empty, corrupt or mixed file ends the command with code 1 and one line that says where."""
    path = tmp_path / "r.jsonl"
    if text is not None:
        path.write_text(text)
    assert cli.main(["report", str(path)]) == 1
    errors = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    """A binary file is no report."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not text"):
        reading.load([path])


def test_prices_of_regions_where_nobody_is_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A price table whose regions no peer has is said in the output of `report` and `predict`, once each."""
    path = write(tmp_path / "r.jsonl", run_of(2, region="eu-west-1"))
    table = tmp_path / "prices.toml"
    for regions, told in (('"us-east" = 1.0\n[egress."eu"]\n"us" = 0.1', 1), ('"eu" = 1.0', 0)):
        table.write_text(f"[peer_hour]\ndefault = 0.5\n{regions}\n")
        for verb in (["report", str(path)], ["predict", "--from", str(path)]):
            assert cli.main([*verb, "--prices", str(table)]) == 0
            said = "begins as the price table says, with 'us-east': their regions are 'eu-west-1'; "
            assert capsys.readouterr().out.count(said) == told


def test_a_line_cut_by_a_kill_is_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The last line of a peer that was killed while it wrote does not hide the others, nor those of the peer
    that goes on in the same file: each verb that reads them warns once, on stderr.
    """
    path = write(tmp_path / "r.jsonl", run_of(2), tail=report().to_json()[:100])
    for verb in (["report", str(path)], ["predict", "--from", str(path)]):
        caplog.clear()
        assert cli.main([*verb, "--json", "-"]) == 0
        (told,) = [record.getMessage() for record in caplog.records]
        assert told == f"line 5 of {str(path)!r}: not whole, and left out, as a peer was ended while it wrote"
        json.loads(capsys.readouterr().out)
    publisher = Publisher(str(path), None)
    publisher.check()
    publisher.check()
    publisher.publish(report(epoch=2, finished_at=1020.0))
    made = history.summary(reading.load([path]))
    assert (made["epochs"], made["cut"]) == (3, [str(path)])


def test_the_command_draws_a_page_and_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`p2pavg report` prints the summary and draws one page, with and without loss and overlap."""
    pytest.importorskip("matplotlib")
    one = write(tmp_path / "one.jsonl", run_of(4, overlapped=True, seconds_overlapped=1.0))
    two = write(tmp_path / "two.jsonl", [report(epoch=4, peer="cc" * 20, attempts=2, finished_at=1050.0)])
    assert cli.main(["report", str(one), str(two)]) == 0
    assert "5 epochs" in capsys.readouterr().out
    assert (tmp_path / "one.jsonl.png").stat().st_size > 10_000
    assert cli.main(["report", str(two), "--plot", str(tmp_path / "x.svg"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == 1
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_without_matplotlib_the_words_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture that nobody asked for by name is no failure; one that was is, with what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = write(tmp_path / "r.jsonl", run_of(2))
    assert cli.main(["report", str(path)]) == 0
    said = capsys.readouterr().out
    assert "2 epochs" in said
    assert "pip install 'matplotlib" in said
    with pytest.raises(SystemExit):
        cli.main(["report", str(path), "--plot", "x.png"])
    assert "pip install 'matplotlib" in capsys.readouterr().err


def test_a_summary_tells_what_plans_spared_and_a_limit_stretched() -> None:
    """By the reports of the leaders; where nobody knew prices, not a word."""
    reports = run_of(3)
    leads = [
        replace(each, egress_dollars=0.02, egress_dollars_flat=0.05, seconds_stretched=30.0)
        if each.peer.startswith("aa")
        else each
        for each in reports
    ]
    told = "\n".join(history.words(history.summary(reading.Run("r", tuple(leads)))))
    assert "gradients cost $ 0.06 by the plans of the rounds, $ 0.09 less than flat plans would have" in told
    assert "longer in all than their samples needed, to keep to max_egress_usd_per_hour" in told
    plain = "\n".join(history.words(history.summary(reading.Run("r", tuple(reports)))))
    assert "flat plans" not in plain
    assert "max_egress" not in plain
