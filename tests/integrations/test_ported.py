"""Scripts of others' style, with two lines added: in lockstep they train as they did in one process."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Iterator

import pytest

from tests.swarm.scripts import Script, Terminal

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]


@pytest.fixture
def start() -> Iterator[Terminal]:
    with Terminal() as terminal:
        yield terminal


TRIES = 4  # a part that gets no processor for two seconds counts in the next epoch, as it should


LAUNCHED = {  # by what starts the first part, and the second one
    "ddp_tutorial": (("-m", "torch.distributed.run", "--nproc-per-node", "1"), ()),
    "accelerate_loop": ((), ("-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu")),
}


@pytest.mark.parametrize("name", ["nanogpt", "ppo", "imagenet", "accelerate_loop", "ddp_tutorial"])
def test_a_ported_script_trains_as_it_did_alone(start: Terminal, name: str) -> None:
    """Two parts, the second of which the printed line starts, end with equal bits; losses, learning rates and
    steps are those of the script alone with the batches of both, and no warning is drawn, whatever starts
    them.
    """
    if name == "accelerate_loop" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    script = f"examples/ported/{name}.py"
    alone = _told(start(script, "--alone"))
    by = LAUNCHED.get(name, ((), ()))
    for _ in range(TRIES):
        first = start(*by[0], script)
        printed = shlex.split(first.line_with("join with").split(": ", 1)[1])
        assert printed[:2] == ["python", script]
        second = start(*by[1], *printed[1:])
        one, other = _told(first), _told(second)
        if one["counted"] == other["counted"]:
            break
    assert one["digest"] == other["digest"]
    assert one["rates"] == other["rates"] == pytest.approx(alone["rates"], rel=1e-12)
    means = [(a + b) / 2 for a, b in zip(one["losses"], other["losses"], strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-5, abs=1e-6)
    assert one["norm"] == pytest.approx(alone["norm"], rel=1e-6)
    said = [line for made in (first, second) for line in made.lines]
    assert not [line for line in said if "learning rate" in line or "samples" in line]


def _told(script: Script) -> dict:
    found: dict = json.loads(script.end().splitlines()[-1])
    return found
