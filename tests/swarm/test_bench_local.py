from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from p2pavg.bench.__main__ import main
from p2pavg.bench.options import codec_of
from p2pavg.errors import ConfigurationError
from tests.swarm.pictures import check_picture

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
def test_accumulate_compares_with_plain_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`bench accumulate` reports, and draws, throughput with and without the optimizer, and step() times."""
    pytest.importorskip("matplotlib")
    argv = [
        "accumulate",
        "--params",
        "300000",
        "--batch",
        "4",
        "--microbatches",
        "4",
        "--pairs",
        "3",
    ]
    assert main([*argv, "--json", "-", "--plot", str(tmp_path / "result.svg")]) == 0
    check_picture(tmp_path / "result.svg")
    result = json.loads(capsys.readouterr().out)
    for key in ("plain_sps", "local_sps", "ratio_median", "ratio_low95", "control_ratio", "step_us_median"):
        assert result[key] > 0
    assert len(result["ratios"]) == len(result["controls"]) == 3
    assert result["epoch_end_seconds"] > 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("delay", [False, True])
def test_penalty_reports_local_and_global_throughput(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], delay: bool
) -> None:
    """`bench penalty` trains a real swarm, relates its throughput to that of one process, and draws both."""
    pytest.importorskip("matplotlib")
    argv = ["penalty", "--peers", "2", "--params", "300000", "--steps", "5", "--step-seconds", "0.02"]
    argv += ["--epochs", "3", "--json", "-", "--plot", str(tmp_path / "result.svg")]
    assert main([*argv, *(["--delay"] if delay else [])]) == 0
    check_picture(tmp_path / "result.svg")
    result = json.loads(capsys.readouterr().out)
    assert len(result["epoch_seconds"]) == 3
    assert len(result["local_sps"]) == 2
    assert result["baseline_sps"] > 0
    assert 0 < result["global_over_local"] <= 1.01


@pytest.mark.timeout(240)
def test_outer_compares_with_data_parallel_training(capsys: pytest.CaptureFixture[str]) -> None:
    """`bench outer` trains both ways on the same tokens: losses, bytes near their formulas, equal bits."""
    argv = ["outer", "--peers", "2", "--params", "60000", "--inner-steps", "6", "--outer-steps", "3"]
    assert main([*argv, "--batch", "4", "--compression", "int4", "--fragments", "2", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bit_identical"]
    assert result["tokens"] == 2 * 4 * 6 * 3 * 64
    assert 2 < result["loss"] < 5.6
    assert 2 < result["loss_data_parallel"] < 5.6
    assert 0 < result["utilisation"] < 1
    assert result["bytes_per_peer"] < 0.2 * result["bytes_of_data_parallel"]
    assert result["bytes_per_peer"] > 0.9 * result["bytes_expected"]


@pytest.mark.parametrize("verb", ["penalty", "accumulate"])
def test_a_device_that_is_not_there_is_one_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both say which device they cannot use, and end with 1."""
    assert main([verb, "--device", "cuda:99"]) == 1
    assert "Cannot use the device 'cuda:99'" in capsys.readouterr().err


def test_a_codec_of_ones_own_can_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bench allreduce --compression MODULE:NAME` averages with that class, and draws that; what is not
    there is one line.
    """
    pytest.importorskip("matplotlib")
    page = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text()
    found = re.search(r"<!-- test: codec -->\n```python\n(.*?)```", page, re.DOTALL)
    assert found
    (tmp_path / "mycodecs.py").write_text(found[1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    argv = ["allreduce", "--peers", "2", "--numel", "30000", "--rounds", "1", "--compression"]
    assert main([*argv, "mycodecs:Float8", "--json", "-", "--plot", str(tmp_path / "result.svg")]) == 0
    check_picture(tmp_path / "result.svg")
    result = json.loads(capsys.readouterr().out)
    assert result["bit_identical"]
    assert 0 < result["max_abs_error"] < 0.5
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="Cannot make the codec 'mycodecs:Float4'"):
        codec_of("mycodecs:Float4")
    with pytest.raises(SystemExit, match="2"):
        main([*argv, "fp8"])
