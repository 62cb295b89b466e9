"""The examples, as a person starts them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from tests.swarm.scripts import LM, Terminal, free_port, served, write_shards

pytestmark = pytest.mark.timeout(300)  # several processes import PyTorch, each for seconds


@pytest.fixture
def start() -> Iterator[Terminal]:
    """Starts Python with these words; whatever still runs at the end is killed."""
    with Terminal() as terminal:
        yield terminal


def test_the_printed_line_joins_the_run(start):
    """What train_lm.py prints can be pasted as it is; both peers end with equal parameters."""
    first = start("examples/train_lm.py", "--run-id", "by-hand", *LM)
    printed = shlex.split(first.line_with("--initial-peers"))
    assert printed[:2] == ["python", "examples/train_lm.py"]
    second = start("examples/train_lm.py", *printed[2:], *LM)
    first.line_with(" 2 peers")
    ends = [script.end().splitlines()[-1].split("parameters ")[1] for script in (first, second)]
    assert ends[0] == ends[1]


def test_the_first_waits_until_somebody_is_there(start):
    """The first peer prints the line to paste and waits for Enter or a peer; Ctrl-C then leaves the run with
    the shell's code and no traceback.
    """
    reading, keys = os.pipe()
    with os.fdopen(reading) as stdin:
        first = start("examples/train_lm.py", "--run-id", "waits", *LM, stdin=stdin.fileno())
    first.line_with("Training begins when somebody joins")
    with pytest.raises(subprocess.TimeoutExpired):
        first.process.wait(2.0)
    assert not any(line.startswith("epoch") for line in first.lines)
    os.write(keys, b"\n")
    first.line_with("epoch 1:")
    said = first.interrupt()
    os.close(keys)
    assert first.process.returncode == 130
    assert "Traceback" not in said


def test_digits_in_two_terminals(start):
    """The README's own example trains in two terminals and reads digits."""
    node = start("-m", "p2pavg", "bootstrap", "--listen", f"127.0.0.1:{free_port()}")
    address = node.line_with("127.0.0.1:")
    scripts = [start("examples/digits.py", "--epochs", "300", "--initial-peers", address) for _ in range(2)]
    for script in scripts:
        assert "--initial-peers" in script.line_with("join with")
        script.line_with("peers: 2")
    for script in scripts:
        last = script.end().splitlines()[-1]
        assert float(last.split(": ")[1].split("%")[0]) > 85


def test_a_wrong_address_is_one_line(start):
    """A peer whose initial peer does not answer ends with one line that names the address."""
    script = start("examples/train_lm.py", "--initial-peers", "127.0.0.1:9", *LM)
    out = script.rest()
    assert script.process.returncode == 1
    assert out.startswith("train_lm: ")
    assert "127.0.0.1:9" in out
    assert len(out.strip().splitlines()) == 1


def test_own_text(start, tmp_path):
    """--text trains on one's own files, alone and without a network."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps. " * 20)
    words = ("--text", str(tmp_path), "--suffix", ".txt", "--target-batch-size", "32", "--epochs", "30")
    out = start("examples/train_lm.py", "--alone", *words).end()
    assert float(out.splitlines()[-1].split("validation loss ")[1].split(",")[0]) < 3.0


def test_own_text_together(start, tmp_path):
    """Two peers train on shards of one's own files, and the printed command names them."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps. " * 20)
    words = ("--text", str(tmp_path), "--suffix", ".txt", *LM)
    first = start("examples/train_lm.py", "--run-id", "text", *words, "--shard", "1/2")
    printed = shlex.split(first.line_with("--initial-peers"))[2:]
    assert printed[printed.index("--text") + 1] == str(tmp_path)
    second = start("examples/train_lm.py", *printed, *LM, "--shard", "2/2")
    ends = [script.end().splitlines()[-1].split("parameters ")[1] for script in (first, second)]
    assert ends[0] == ends[1]


TOY = (
    "--classes",
    "3",
    "--size",
    "8",
    "--batch-size",
    "8",
    "--target-batch-size",
    "32",
    "--listen",
    "127.0.0.1:0",
)


def test_images_from_a_folder_and_over_http(start, tmp_path):
    """Two peers train together, one with shards in a folder and one over HTTP."""
    pytest.importorskip("webdataset")
    write_shards(tmp_path, "train", 4)
    pattern = "train-{000..003}.tar"
    with served(tmp_path) as url:
        local = ("--shards", str(tmp_path / pattern), "--part", "1/2", "--epochs", "100000")
        first = start("examples/images.py", *local, *TOY)
        address = first.line_with("2 shards are mine; join with").split()[-1]
        remote = ("--shards", f"{url}/{pattern}", "--part", "2/2", "--epochs", "100000")
        second = start("examples/images.py", *remote, "--initial-peers", address, *TOY)
        assert "2 shards are mine" in second.line_with("join with")
        second.line_with(" 2 peers")


def test_images_are_learnt(start, tmp_path):
    """The classifier tells three colours apart in pictures that it has not seen."""
    pytest.importorskip("webdataset")
    write_shards(tmp_path, "some", 2)
    shards = ("--shards", str(tmp_path / "some-000.tar"), "--validation", str(tmp_path / "some-001.tar"))
    last = start("examples/images.py", *shards, *TOY, "--epochs", "40").end().splitlines()[-1]
    assert float(last.split(": ")[1].split("%")[0]) > 90
