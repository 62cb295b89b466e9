"""`p2pavg predict` and `p2pavg plan` as a person runs them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from p2pavg.cli import main
from p2pavg.forecast import fit
from p2pavg.forecast.evidence import from_reports
from p2pavg.forecast.inventory import EXAMPLE
from p2pavg.launch import swarm_file
from p2pavg.report import MemoryReport
from p2pavg.report.distance import Distance
from tests.forecast.swarms import report, reports

OFFERS = """
[job]
target_batch_size = 800
values = 34_000_000
[[offer]]
type = "T4"
region = "eu"
count = 6
samples_per_second = 20
dollars_per_hour = 0.2
[[offer]]
type = "A100"
region = "aus"
count = 2
samples_per_second = 200
dollars_per_hour = 3
[[link]]
between = ["eu", "eu"]
rtt_ms = 1
rate_mbps = 5000
[[link]]
between = ["eu", "us"]
rtt_ms = 100
rate_mbps = 1000
dollars_per_gb = 0.02
[[link]]
between = ["eu", "aus"]
rtt_ms = 270
rate_mbps = 70
dollars_per_gb = 0.15
[[link]]
between = ["us", "aus"]
rtt_ms = 180
rate_mbps = 120
dollars_per_gb = 0.15
[[link]]
between = ["aus", "aus"]
rtt_ms = 1
rate_mbps = 5000
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    told, offers = tmp_path / "reports.jsonl", tmp_path / "offers.toml"
    told.write_text("".join(one.to_json() + "\n" for one in reports(10, 4)))
    offers.write_text(OFFERS)
    return str(told), str(offers)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    code, out, err = run(capsys, *words, "--json", "-")
    assert code == 0, err
    found: dict = json.loads(out)
    return found


def test_a_prediction_has_what_scripts_rely_on(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples/s with an interval, the epoch's parts, granularity, what binds, shares by region, and smallest
    targets.
    """
    found = figures(capsys, "predict", "--from", files[0])
    assert found["parts"] == pytest.approx({"us": 0.5, "eu": 0.5}, abs=0.001)
    assert found["epoch_s"] == pytest.approx(8.0, rel=0.03)
    assert found["interval"][0] < found["samples_per_second"] < found["interval"][1]
    assert found["granularity"] == pytest.approx(found["calculation_s"] / found["communication_s"])
    assert found["dollars_per_million"] is None
    assert set(found["smallest_target_batch"]) == {"0.8", "0.9", "0.95"}
    speed = 400 / found["calculation_s"]
    assert found["smallest_target_batch_delayed"] == pytest.approx(speed * found["communication_s"])
    code, out, _ = run(capsys, "predict", "--from", files[0])
    assert code == 0
    assert "samples/s" in out
    assert f"granularity {found['granularity']:.2f}" in out
    assert "Parts: us 50%, eu 50%" in out
    assert "Without eu" in out


def test_peers_across_the_world_do_not_pay_and_near_ones_do(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Near peers raise samples/s, those over a thin link lower them, and leaving them out is advised."""
    base = figures(capsys, "predict", "--from", files[0], "--inventory", files[1])
    near = figures(capsys, "predict", "--from", files[0], "--inventory", files[1], "--add", "4xT4@eu")
    far = figures(capsys, "predict", "--from", files[0], "--inventory", files[1], "--add", "1x5@aus")
    assert near["samples_per_second"] > base["samples_per_second"] > far["samples_per_second"]
    without = {row["region"]: row for row in far["without"]}
    assert without["aus"]["samples_per_second"] > 0
    fewer = figures(
        capsys, "predict", "--from", files[0], "--inventory", files[1], "--add", "1x5@aus", "--without", "aus"
    )
    assert fewer["samples_per_second"] == pytest.approx(base["samples_per_second"])


def test_rates_of_rounds_come_before_those_of_an_inventory(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newcomer's links between regions that rounds crossed are what rounds got, whatever offers promise."""
    faster = tmp_path / "faster.toml"
    faster.write_text(OFFERS.replace("rate_mbps = 1000\n", "rate_mbps = 9000\n").replace("5000", "9000"))
    told = [
        figures(capsys, "predict", "--from", files[0], "--inventory", path, "--add", "1xT4@eu")
        for path in (files[1], str(faster))
    ]
    assert told[0]["communication_s"] == told[1]["communication_s"]


def test_a_newcomer_has_the_middle_link_between_two_regions(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever ids the two peers have whose link is slower than those of others."""
    found = []
    for slow in ({0, 1}, {4, 5}):
        told = [
            replace(
                one,
                links=tuple(
                    replace(link, rate_bps=1e8) if {int(one.peer, 16), int(link.peer, 16)} == slow else link
                    for link in one.links
                ),
            )
            for one in reports(10, 6)
        ]
        path = tmp_path / "slow.jsonl"
        path.write_text("".join(one.to_json() + "\n" for one in told))
        found.append(figures(capsys, "predict", "--from", str(path), "--add", "1x20@eu")["communication_s"])
    assert found[0] == pytest.approx(found[1], rel=0.001)


def test_traffic_is_told_by_class_of_link_with_its_dollars(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes and dollars of a million samples add up to those of an epoch; [egress] comes before [gb]."""
    table = tmp_path / "prices.toml"
    table.write_text("[gb]\nworld = 0.5\nregion = 0.25\n[egress.us]\neu = 0.125\n")
    found = figures(capsys, "predict", "--from", files[0], "--prices", str(table))
    sent = found["bytes_between_regions"]
    traffic = found["traffic_per_million"]
    total = sum(of["bytes"] for of in traffic.values())
    assert total == pytest.approx(sum(sent.values()) * 1e6 / 400)
    assert sum(of["dollars"] for of in traffic.values()) == pytest.approx(found["dollars_per_million"])
    dearest = 1e6 / 400 / 1e9 * (0.125 * sent["us to eu"] + 0.5 * sent["eu to us"])
    assert traffic["world"]["dollars"] == pytest.approx(dearest)


def test_traffic_on_one_host_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Peers of one machine mostly name no region, and their packets do not leave it: as in the report."""
    told = tmp_path / "host.jsonl"
    rows = [
        replace(one, region="", links=tuple(replace(link, distance=Distance.HOST) for link in one.links))
        for one in reports(10)
    ]
    told.write_text("".join(one.to_json() + "\n" for one in rows))
    table = tmp_path / "prices.toml"
    table.write_text("[gb]\nworld = 0.5\ncontinent = 0.5\nregion = 0.5\nzone = 0.5\n")
    found = figures(capsys, "predict", "--from", str(told), "--prices", str(table))
    assert found["traffic_per_million"].keys() == {"host"}
    assert found["dollars_per_million"] == 0.0


def test_a_type_that_reports_name_needs_no_speed(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--add` and an inventory's offers take the samples/s of a device that peers reported."""
    told = tmp_path / "t4.jsonl"
    told.write_text("".join(replace(one, device="Tesla T4").to_json() + "\n" for one in reports(10, 4)))
    base = figures(capsys, "predict", "--from", str(told))
    more = figures(capsys, "predict", "--from", str(told), "--add", "1xT4@eu")
    assert more["calculation_s"] == pytest.approx(base["calculation_s"] * 4 / 5)
    offers = tmp_path / "offers.toml"
    offers.write_text(OFFERS.replace("samples_per_second = 20\n", ""))
    goal = ("--least-dollars", "--samples-per-second", "20")
    found = figures(capsys, "plan", str(offers), *goal, "--from", str(told))
    assert found["peers"] == {"T4@eu": 2}  # 100 samples in 6 s each
    code, _, err = run(capsys, "plan", str(offers), *goal)
    assert code == 2
    assert "'T4' was never measured" in err


def test_whether_the_model_fits_is_told(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What peers took and have, by device; a type that is added takes at least as much as the least of these
    took, of the memory that an inventory tells.
    """
    base = figures(capsys, "predict", "--from", files[0])["memory"]
    peaks = {"device_peak": 11e9, "device": 15.8e9, "host_peak": 6.1e9, "host": 16.7e9}
    assert base == [{"type": "", **peaks, "fits": True}]
    offers = tmp_path / "small.toml"
    offers.write_text(OFFERS.replace('type = "A100"', 'type = "A100"\nmemory_gb = 10.5'))
    added = ("predict", "--from", files[0], "--inventory", str(offers), "--add", "1xA100@aus", "1xT4@eu")
    rows = {row["type"]: row for row in figures(capsys, *added)["memory"]}
    assert (rows["A100@aus"]["device"], rows["A100@aus"]["fits"]) == (10.5e9, False)
    assert (rows["T4@eu"]["device"], rows["T4@eu"]["fits"]) == (0, None)
    _, out, _ = run(capsys, *added)
    assert "Whether the model fits T4@eu is unknown: a peer takes at most 11.0 GB of its accelerator" in out
    assert "The model DOES NOT FIT A100@aus: a peer takes at most 11.0 of 10.5 GB of its accelerator" in out


def test_what_delay_and_outer_steps_take_of_memory_is_added(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second copy of parameters and sums where the model is, and three vectors of the machine's memory; a
    run that did so has them in its peaks.
    """
    plain, delayed, outer = (
        figures(capsys, "predict", "--from", files[0], *words)["memory"][0]
        for words in ((), ("--delay",), ("--outer", "30"))
    )
    values = from_reports(reports(10, 4)).job.values
    assert delayed["device_peak"] - plain["device_peak"] == pytest.approx(8 * values, abs=1)
    assert delayed["host_peak"] == plain["host_peak"]
    assert outer["host_peak"] - plain["host_peak"] == pytest.approx(12 * values, abs=1)
    told = tmp_path / "outer.jsonl"
    did = [replace(one, overlapped=True, extra={"theta_sha256_low": 1.0}) for one in reports(10, 4)]
    told.write_text("".join(one.to_json() + "\n" for one in did))
    assert figures(capsys, "predict", "--from", str(told), "--outer", "30", "--delay")["memory"] == [plain]


def test_reports_without_memory_say_nothing_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no report tells, whether the model fits is unknown, and no offer is left out for it."""
    told = tmp_path / "reports.jsonl"
    told.write_text("".join(replace(one, memory=MemoryReport()).to_json() + "\n" for one in reports(10)))
    row = figures(capsys, "predict", "--from", str(told), "--delay")["memory"][0]
    assert (row["fits"], row["device_peak"], row["host_peak"]) == (None, 0, 0)
    assert "fits is unknown: no report tells" in run(capsys, "predict", "--from", str(told))[1]
    offers = tmp_path / "offers.toml"
    offers.write_text(OFFERS.replace('type = "T4"', 'type = "T4"\nmemory_gb = 1'))
    goal = ("--least-dollars", "--samples-per-second", "60")
    assert figures(capsys, "plan", str(offers), *goal, "--from", str(told))["peers"] == {"T4@eu": 4}


def test_a_type_that_does_not_hold_the_model_is_in_no_plan(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The peaks of the reports decide, unless [job] memory_gb tells what a peer takes."""
    offers = tmp_path / "offers.toml"
    goal = ("--least-dollars", "--samples-per-second", "60")
    small = OFFERS.replace('type = "T4"', 'type = "T4"\nmemory_gb = 10.5')
    offers.write_text(small)
    found = figures(capsys, "plan", str(offers), *goal, "--from", files[0])
    assert found["peers"] == {"A100@aus": 1}
    assert found["left_out"]["T4@eu"] == "it does not hold the model: a peer takes 11.0 GB, and it has 10.5"
    offers.write_text(small.replace("[job]", "[job]\nmemory_gb = 9"))
    assert figures(capsys, "plan", str(offers), *goal, "--from", files[0])["peers"] == {"T4@eu": 4}
    offers.write_text(OFFERS.replace("region", "memory_gb = 10.5\nregion"))
    code, _, err = run(capsys, "plan", str(offers), *goal, "--from", files[0])
    assert (code, "no offer holds the model: a peer takes 11.0 GB" in err) == (2, True)


def test_hiding_and_outer_steps_change_the_epoch(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """--delay hides communication, --outer makes it rare, a larger target makes it small."""
    plain = figures(capsys, "predict", "--from", files[0])
    assert figures(capsys, "predict", "--from", files[0], "--delay")["hidden_s"] > 0
    outer = figures(capsys, "predict", "--from", files[0], "--outer", "30:int8")
    assert outer["granularity"] > 20 * plain["granularity"]
    larger = figures(capsys, "predict", "--from", files[0], "--target-batch-size", "4000")
    assert larger["calculation_s"] == pytest.approx(10 * plain["calculation_s"])


def test_a_target_that_averages_may_exceed_is_told(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Another target than the reports': by how much whole steps of all peers may exceed it."""
    plain = figures(capsys, "predict", "--from", files[0])
    assert plain["overshoot_at_most"] == 0.0
    told = figures(capsys, "predict", "--from", files[0], "--target-batch-size", "4000")
    assert told["overshoot_at_most"] == steps_of(files[0])
    _, out, _ = run(capsys, "predict", "--from", files[0], "--target-batch-size", "4000")
    assert f"up to {4000 + steps_of(files[0]):,} samples where 4,000 are asked" in out


def steps_of(path: str) -> int:
    """Samples of a step of every peer together: the largest number that divides what each counted."""
    counted: dict[str, list[int]] = {}
    for line in Path(path).read_text().splitlines():
        for member in json.loads(line)["members"]:
            counted.setdefault(member["peer"], []).append(member["samples"])
    return sum(math.gcd(*found) for found in counted.values())


def test_a_plan_says_what_to_rent_and_what_not(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Within the budget, with its prediction, why offers were left out, and the front of best plans."""
    found = figures(capsys, "plan", files[1], "--most-samples-per-second", "--dollars-per-hour", "1.3")
    assert found["peers"] == {"T4@eu": 6}
    assert found["dollars_per_hour"] <= 1.3
    assert "A100@aus" in found["left_out"]
    assert [row["samples_per_second"] for row in found["front"]] == sorted(
        row["samples_per_second"] for row in found["front"]
    )
    cheap = figures(capsys, "plan", files[1], "--least-dollars", "--samples-per-second", "60")
    assert cheap["samples_per_second"] >= 60
    assert cheap["peers"] == {"T4@eu": 4}


def test_a_plan_is_input_for_launch(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--swarm writes one machine for each peer, with what a cloud is asked for, as launch reads them."""
    path = tmp_path / "swarm.toml"
    goal = ("--least-dollars", "--samples-per-second", "250")
    found = figures(capsys, "plan", files[1], *goal, "--swarm", str(path))
    machines = swarm_file.load(path).machines
    assert len(machines) == sum(found["peers"].values()) > 1
    asked = [f"{one.resources['accelerators']}@{one.resources['region']}" for one in machines]
    assert {name: asked.count(name) for name in asked} == found["peers"]
    code, _, err = run(capsys, "plan", files[1], *goal, "--swarm", str(tmp_path / "none" / "swarm.toml"))
    assert (code, "cannot write" in err) == (2, True)


def test_a_plan_can_be_drawn(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--plot writes a picture."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plans.png"
    goal = ("--most-samples-per-second", "--dollars-per-hour", "2")
    assert run(capsys, "plan", files[1], *goal, "--plot", str(picture))[0] == 0
    assert picture.stat().st_size > 5000


def test_the_example_of_the_help_is_an_inventory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --help shows can be pasted into a file and planned with."""
    path = tmp_path / "example.toml"
    path.write_text(EXAMPLE)
    found = figures(capsys, "plan", str(path), "--most-samples-per-second", "--dollars-per-hour", "5")
    assert found["peers"]["T4@us-central1"] >= 1


def test_a_run_without_regions_is_told_in_words(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where peers told no region: whose parts they are, and why a link to a newcomer is not known."""
    told = tmp_path / "nowhere.jsonl"
    dumped = [one.to_json() for one in reports(10, 4)]
    told.write_text("".join(f"{one}\n" for one in dumped).replace('"eu"', '""').replace('"us"', '""'))
    code, out, _ = run(capsys, "predict", "--from", str(told), "--delay")
    assert code == 0
    assert "Parts: peers without region= 100%." in out
    code, _, err = run(capsys, "predict", "--from", str(told), "--inventory", files[1], "--add", "2x50@aus")
    assert code == 2
    assert "told no region, so that their links to 'aus' are not known: start them with region=" in err


def test_nothing_calculated_and_one_change_read_well(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What rounds to 0.0 GB is left out, and one change costs."""
    rows: list[dict] = [{"type": "T4", "device_peak": 1e9, "device": 2e9, "fits": True}]
    rows[0] |= {"host_peak": 0, "host": 0}
    assert len(fit.told(rows, {"device": 49_000_000})) == 1
    assert "Up to 0.1 GB" in fit.told(rows, {"device": 51_000_000})[-1]
    trace = tmp_path / "trace.csv"
    trace.write_text("0,T4@eu,4\n3600,T4@eu,4\n")
    words = ("--most-samples-per-second", "--dollars-per-hour", "1", "--trace", str(trace))
    code, out, _ = run(capsys, "plan", files[1], *words)
    assert code == 0
    assert "; 1 change costs " in out


MOST = ("plan", "OFFERS", "--most-samples-per-second")
LEAST = ("plan", "OFFERS", "--least-dollars")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", "--from", "REPORTS", "--add", "T4"), "NxTYPE@REGION"),
        (("predict", "--from", "REPORTS", "--add", "2xV100@eu"), "never measured"),
        (("predict", "--from", "REPORTS", "--add", "2x50@mars"), "no link between"),
        (("predict", "--from", "REPORTS", "--without", "mars"), "no peer of these reports"),
        (("predict", "--from", "REPORTS", "--without", "us", "eu"), "nobody is left"),
        (("predict", "--from", "REPORTS", "--outer", "30:"), "H or H:CODEC"),
        (("predict", "--from", "REPORTS", "--outer", "often"), "H:CODEC"),
        (("predict", "--from", "REPORTS", "--outer", "9" * 20), "H:CODEC"),
        (("predict", "--from", "REPORTS", "--outer", ""), "H:CODEC"),
        (("predict", "--from", "REPORTS", "--add", "0xT4@eu"), "1 to 64 peers"),
        (("predict", "--from", "REPORTS", "--target-batch-size", "0"), "above 0"),
        (("predict", "--from", "/nowhere.jsonl"), "cannot read"),
        (("plan", "OFFERS"), "there is one goal"),
        (
            ("plan", "OFFERS", "--most-samples-per-second", "--least-dollars", "--dollars-per-hour", "3"),
            "there is one goal",
        ),
        ((*MOST, "--dollars-per-hour", "3", "--join-seconds", "nan"), "--join-seconds must"),
        (MOST, "goes with --dollars-per-hour"),
        ((*LEAST, "--dollars-per-hour", "3"), "goes with --samples-per-second"),
        (
            (*MOST, "--dollars-per-hour", "0.01"),
            r"the cheapest plan is \$0.20/h",
        ),
        (
            (*LEAST, "--samples-per-second", "100", "--dollars-per-hour", "0.3"),
            r"the cheapest that reaches 100 samples/s costs \$1.20/h",
        ),
        (
            (*MOST, "--dollars-per-hour", "0.3", "--samples-per-second", "100"),
            r"the cheapest that reaches 100 samples/s costs \$1.20/h",
        ),
        ((*LEAST, "--samples-per-second", "1e6"), "the most is"),
        ((*LEAST, "--samples-per-second", "nan"), "above 0"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: tuple[str, ...], said: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input is a usage error: one line that says what to do."""
    given = [{"REPORTS": files[0], "OFFERS": files[1]}.get(word, word) for word in words]
    code, _, err = run(capsys, *given)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert pytest.importorskip("re").search(said, err)


def test_reports_of_several_runs_need_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--run chooses; without it the names are listed."""
    told = tmp_path / "two.jsonl"
    rows = reports(6) + [report(e, 0, 2, run_id="other") for e in range(6)]
    told.write_text("".join(one.to_json() + "\n" for one in rows))
    code, _, err = run(capsys, "predict", "--from", str(told))
    assert code == 2
    assert "other, run" in err
    assert run(capsys, "predict", "--from", str(told), "--run", "run")[0] == 0
