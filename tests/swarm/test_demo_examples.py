"""The examples, as a person starts them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from tests.swarm.scripts import LM, Terminal, write_shards

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
    words = ("--run-id", "waits", *LM, "--epochs", "100000")
    reading, keys = os.pipe()
    with os.fdopen(reading) as stdin:
        first = start("examples/train_lm.py", *words, stdin=stdin.fileno())
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
    node = start("-m", "p2pavg", "bootstrap", "--listen", "127.0.0.1:0")
    address = node.line_with("127.0.0.1:")
    scripts = [start("examples/digits.py", "--epochs", "150", "--initial-peers", address) for _ in range(2)]
    for script in scripts:
        assert "--initial-peers" in script.line_with("join with")
        script.line_with("peers: 2")
    for script in scripts:
        last = script.end().splitlines()[-1]
        assert float(last.split(": ")[1].split("%")[0]) > 85


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--epochs", "0"), "error: argument --epochs: '0' is not a whole number of at least 1"),
        (("--text", "no-such-folder"), "there is no folder 'no-such-folder'"),
        (("--log", "no-such-folder/log"), "cannot write 'no-such-folder/log'"),
    ],
)
def test_wrong_values_are_one_line(start, words, said):
    """What cannot be trained for, read or written is said without a traceback."""
    script = start("examples/train_lm.py", "--alone", *words)
    out = script.rest()
    assert script.process.returncode != 0
    assert said in out.splitlines()[-1]
    assert "Traceback" not in out


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


def test_images_are_shared_out(start, tmp_path):
    """One peer serves a folder of shards; another one fetches what it trains on into a cache."""
    pytest.importorskip("PIL")
    folder, cache = tmp_path / "shards", tmp_path / "cache"
    folder.mkdir()
    write_shards(folder, "train", 4)
    more = (*TOY, "--epochs", "100000", "--cache", str(cache))
    first = start("examples/images.py", "--serve", str(folder), "--http-port", "0", *more)
    printed = shlex.split(first.line_with("4 shards; join with").split("join with ")[1])
    assert printed[:2] == ["python", "examples/images.py"]
    second = start(*printed[1:], "--batch-size", "8", "--listen", "127.0.0.1:0", "--cache", str(cache))
    second.line_with(" 2 peers, pass")
    first.line_with(" 2 peers, pass")
    assert 1 <= len(list(cache.glob("*.shard"))) <= 4


def test_images_are_learnt(start, tmp_path):
    """The classifier tells three colours apart in pictures of a shard that nobody trained on."""
    pytest.importorskip("PIL")
    write_shards(tmp_path, "some", 2)
    words = (
        "--serve",
        str(tmp_path),
        "--http-port",
        "0",
        "--validation",
        "1",
        "--cache",
        str(tmp_path / "c"),
    )
    last = start("examples/images.py", *words, *TOY, "--epochs", "40").end().splitlines()[-1]
    assert float(last.split(": ")[1].split("%")[0]) > 90


def test_a_folder_without_shards_is_one_line(start, tmp_path):
    """--serve of a folder without any or of none, and a list that nobody serves, are one sentence."""
    pytest.importorskip("PIL")
    for words, said in (
        (("--serve", str(tmp_path)), "holds no .tar file"),
        (("--serve", str(tmp_path / "gone")), "there is no folder"),
        (("--index", "http://127.0.0.1:9/index.json"), "cannot be read"),
    ):
        script = start("examples/images.py", *words, "--cache", str(tmp_path / "cache"))
        out = script.rest()
        assert script.process.returncode == 1
        assert out.startswith("images: ")
        assert said in out
        assert len(out.strip().splitlines()) == 1
