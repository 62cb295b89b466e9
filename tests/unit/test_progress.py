from __future__ import annotations

from tests.progress import QUICK_S, Progress, seconds


def test_the_percentage_is_of_the_time() -> None:
    """A slow test moves the percentage by what it takes; repeats of a test count once; the end is 100%."""
    slow, quick = "tests/swarm/test_a.py::test", [f"tests/unit/test_b.py::test[{n}]" for n in range(100)]
    progress = Progress()
    assert progress.message() == " [100%]"  # nothing to do
    progress.collected([slow, *quick])
    assert progress.message() == " [  0%]"
    for _ in range(3):
        progress.over(slow)
    assert progress.message() == " [ 50%]"
    for nodeid in quick:
        progress.over(nodeid)
    assert progress.message() == " [100%]"


def test_an_unknown_folder_is_quick() -> None:
    """A test of no slow folder counts as a quick one, wherever it is."""
    assert seconds("tests/unit/rounds/test_b.py::test") == seconds("elsewhere/test_c.py::test") == QUICK_S
