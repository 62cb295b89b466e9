"""The outer step and the vector that it moves."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from p2pavg import native
from p2pavg.errors import ConfigurationError, StateError
from p2pavg.optim.outer.fragments import fragments_of
from p2pavg.optim.outer.reference import KeptReference, Reference, outer_step
from p2pavg.optim.outer.settings import Outer, outer_of

HARD = np.array([0.0, -0.0, 1e-45, -1e-39, 2.0**-101, -(2.0**-100), 1e-20, 3.4e38, -1.5, 7e-3], np.float32)


def vectors(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    theta, velocity, delta = (random.standard_normal(n).astype(np.float32) for _ in range(3))
    velocity *= np.float32(10) ** random.integers(-44, 2, n).astype(np.float32)
    velocity[: len(HARD)] = HARD
    delta[len(HARD) : 2 * len(HARD)] = HARD
    theta[2 * len(HARD) : 3 * len(HARD)] = HARD
    return theta, velocity, delta


@pytest.mark.parametrize("settings", [Outer(), Outer(nesterov=False), Outer(momentum=0.0), Outer(0.4, 0.6)])
def test_native_and_portable_steps_agree_to_the_bit(settings: Outer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without C++, and in a thread that flushes denormals, the step has the same bits."""
    found = []
    for way in ("native", "portable", "flushing", "portable flushing"):
        monkeypatch.setattr(native, "available", lambda way=way: way in ("native", "flushing"))
        theta, velocity, delta = vectors(200_003, 5)
        torch.set_flush_denormal("flushing" in way)
        try:
            with np.errstate(over="ignore"):
                for _ in range(3):
                    outer_step(theta, velocity if settings.momentum else None, delta, settings)
        finally:
            torch.set_flush_denormal(False)
        found.append(theta.tobytes() + velocity.tobytes())
    assert found[0] == found[1] == found[2] == found[3]


def test_a_step_is_that_of_torch_sgd() -> None:
    """Three steps on the same pseudo-gradients move θ_ref as torch.optim.SGD with Nesterov momentum does."""
    theta, _, delta = vectors(1000, 1)
    delta = np.clip(delta, -1, 1)
    theta = np.clip(theta, -1, 1)
    param = nn.Parameter(torch.from_numpy(theta.copy()))
    sgd = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=True)
    velocity = np.zeros_like(theta)
    for _ in range(3):
        param.grad = torch.from_numpy(delta.copy())
        sgd.step()
        outer_step(theta, velocity, delta, Outer())
    assert np.allclose(theta, param.detach().numpy(), rtol=1e-5, atol=1e-6)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)).to(
        memory_format=torch.channels_last
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_moves_stay_on_top_of_an_outer_step(dtype: torch.dtype) -> None:
    """A displacement is 0 where nothing moved, also in bfloat16. What an outer step does not hold stays on
    top of it, or the share of it that is kept.
    """
    net = model().to(dtype)
    params = list(net.parameters())
    reference = Reference(params, fragments_of([p.numel() for p in params], 1), Outer())
    moved = np.ones(len(reference.theta), np.float32)
    reference.theta += np.float32(1e-4)  # between two numbers of bfloat16
    reference.publish()
    reference.displacement(moved)
    assert all(not view.any() for view in reference.views(moved))
    with torch.no_grad():
        for param in params:
            param.sub_(0.25)
    there = [param.detach().clone() for param in params]
    reference.displacement(moved)
    room, after = np.empty_like(moved), reference.stepped(np.zeros_like(moved))
    reference.shift(room, after, None, 1.0)
    reference.move(reference.views(room), after.of, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(there, params, strict=True))
    after.theta[:] += np.float32(0.5)
    reference.shift(room, after, moved, 0.5)
    with torch.no_grad():
        for param in params:
            param.add_(1.0)  # after it was handed in
    reference.move(reference.views(room), after.of, 0.5)
    reference.adopt(after)
    for param, start in zip(params, reference.views(reference.theta), strict=True):
        assert torch.allclose(param.float(), start + 0.5, atol=2e-2 if dtype == torch.bfloat16 else 1e-6)


def test_the_digest_is_of_the_values_alone() -> None:
    """Two references of the same values have the same digest, and one bit more changes it."""
    one, other = (list(model().parameters()) for _ in range(2))
    layout = fragments_of([p.numel() for p in one], 1)
    first, second = Reference(one, layout, Outer()), Reference(other, layout, Outer())
    second.theta[layout.offsets[-1] - 1] = 5  # between two parameters
    assert first.digest() == second.digest()
    view = second.views(second.theta)[0]
    view[0] = torch.nextafter(view[0], torch.tensor(9.0))
    assert first.digest() != second.digest()


def test_a_state_of_another_model_is_refused() -> None:
    """What was kept of a reference fits the same model with the same settings alone."""
    params = list(model().parameters())
    layout = fragments_of([p.numel() for p in params], 1)
    kept = KeptReference(Reference(params, layout, Outer()), whole=True)
    state = kept.state_dict()
    kept.load_state_dict(state)
    with pytest.raises(StateError, match="velocity"):
        kept.load_state_dict({**state, "velocity": torch.zeros(3)})
    with pytest.raises(StateError, match="reference"):
        kept.load_state_dict({"velocity": state["velocity"]})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lr": 0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"keep_local": 1.5}, "keep_local"),
        ({"overlap": -1}, "overlap"),
        ({"accumulate": 0}, "accumulate"),
        ({"accumulate": True}, "accumulate"),
        ({"schedule": "weekly"}, "schedule"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, object], said: str) -> None:
    """Each mistake is one sentence that names the setting."""
    with pytest.raises(ConfigurationError, match=said):
        Outer(**wrong)  # type: ignore[arg-type]


def test_presets_and_what_is_none() -> None:
    """outer= takes settings, a preset's name, or nothing."""
    assert outer_of(None) is None
    assert outer_of("diloco") == Outer()
    with pytest.raises(ConfigurationError, match="diloco"):
        outer_of("adam")


def test_the_step_needs_no_gil() -> None:
    """Settings can be named without loading PyTorch's optimizers first."""
    code = "from p2pavg.optim.outer.settings import Outer; print(Outer().terms())"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.startswith("lr=0.7")
