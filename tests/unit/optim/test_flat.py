from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from p2pavg.errors import ConfigurationError
from p2pavg.optim.gradients.flat import FlatGradients
from p2pavg.optim.gradients.vectors import all_finite


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def reference(model: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """What plain PyTorch accumulates."""
    for x in inputs:
        model(x).square().sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def slices(flat: FlatGradients) -> list[torch.Tensor]:
    vector = flat.total(1.0)
    assert vector is not None
    return [
        torch.from_numpy(vector[offset : offset + size].copy())
        for offset, size in zip(flat.layout.offsets, flat.layout.sizes, strict=True)
    ]


def marks(flat: FlatGradients) -> list[float]:
    vector = flat.total(1.0)
    assert vector is not None
    return vector[flat.layout.marks :][: len(flat.params)].tolist()


def assert_sums(flat: FlatGradients, expected: list[torch.Tensor | None]) -> None:
    for got, want in zip(slices(flat), expected, strict=True):
        assert want is not None
        assert torch.equal(got, want.to(torch.float32).flatten())


def test_sums_are_those_of_plain_pytorch() -> None:
    """Accumulating into flat views gives the bits that plain accumulation gives."""
    model, twin = net(), net()
    flat = FlatGradients(list(model.parameters()))
    for x in batches():
        model(x).square().sum().backward()
        flat.tick()
    assert_sums(flat, reference(twin, batches()))


def test_float32_on_the_cpu_is_exchanged_without_a_copy() -> None:
    """The vector handed to the rounds is the memory that backward() accumulates into, sliced at 64 bytes."""
    model = net()
    flat = FlatGradients(list(model.parameters()))
    vector = flat.total(1.0)
    assert vector is not None
    assert vector.dtype == np.float32
    for param, offset in zip(flat.params, flat.layout.offsets, strict=True):
        assert param.grad is not None
        assert param.grad.data_ptr() == vector.ctypes.data + 4 * offset
        assert param.grad.data_ptr() % 64 == 0
    assert flat.layout.offsets[-1] == 0  # reverse order: the last parameter's gradient comes first


def test_zero_grad_of_the_model_keeps_the_sum() -> None:
    """model.zero_grad() drops the views; the next backward adds to what was accumulated before."""
    model, twin = net(), net()
    flat = FlatGradients(list(model.parameters()))
    for x in batches():
        model(x).square().sum().backward()
        flat.tick()
        model.zero_grad()
    assert_sums(flat, reference(twin, batches()))


def test_clearing_an_uncounted_backward_is_refused() -> None:
    """A model.zero_grad() between backward() and step() would mix counted and dropped samples: it raises."""
    model = net()
    _flat = FlatGradients(list(model.parameters()))
    first, second, _ = batches()
    model(first).sum().backward()
    model.zero_grad()
    with pytest.raises(ConfigurationError, match="discard"):
        model(second).sum().backward()


def test_create_graph_accumulates_out_of_place_and_is_taken_back() -> None:
    """backward(create_graph=True) replaces .grad by new tensors; their sums end up in the flat buffer."""
    model, twin = net(), net()
    flat = FlatGradients(list(model.parameters()))
    for x in batches():
        model(x).square().sum().backward(create_graph=True)
        flat.tick()
    assert_sums(flat, reference(twin, batches()))


def test_create_graph_after_zero_grad_keeps_the_sum() -> None:
    """A fresh gradient with a graph is added, also for a parameter whose gradient is constant."""
    model, twin = net(), net()
    flat = FlatGradients(list(model.parameters()))
    for x in batches():
        model(x).sum().backward(create_graph=True)
        flat.tick()
        model.zero_grad()
    for x in batches():
        twin(x).sum().backward()
    assert_sums(flat, [p.grad for p in twin.parameters()])


def test_an_assigned_gradient_replaces_the_sum() -> None:
    """p.grad = p.grad * 0.5 means what it says: later microbatches add to the halved sum."""
    model, twin = net(), net()
    flat = FlatGradients(list(model.parameters()))
    for module in (model, twin):
        for x in batches():
            module(x).square().sum().backward()
            for p in module.parameters():
                assert p.grad is not None
                p.grad = p.grad * 0.5
        if module is model:
            flat.tick()
    assert_sums(flat, [p.grad for p in twin.parameters()])


def test_the_model_may_change_its_dtype() -> None:
    """model.double() swaps the data of gradients and parameters; the sum goes on in new buffers."""
    model, twin = net(), net()
    flat = FlatGradients(list(model.parameters()))
    for module in (model, twin):
        first, second, third = batches()
        module(first).square().sum().backward()
        if module is model:
            flat.tick()
        module.double()
        for x in (second, third):
            module(x.double()).square().sum().backward()
            if module is model:
                flat.tick()
    assert_sums(flat, [p.grad for p in twin.parameters()])
    assert flat.params[0].grad is not None
    assert flat.params[0].grad.dtype == torch.float64


def test_channels_last_before_and_after() -> None:
    """Gradients have the strides of their parameters, and a later change of memory format loses nothing."""
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    torch.manual_seed(0)
    twin = nn.Conv2d(4, 6, 3)
    flat = FlatGradients(list(model.parameters()))
    assert model.weight.grad is not None
    assert model.weight.grad.stride() == model.weight.stride()
    x = torch.randn(2, 4, 8, 8)
    model(x).square().sum().backward()
    flat.tick()
    model.to(memory_format=torch.contiguous_format)
    model(x).square().sum().backward()
    flat.tick()
    flat.total(1.0)
    for _ in range(2):
        twin(x).square().sum().backward()
    assert twin.weight.grad is not None
    assert twin.bias.grad is not None
    torch.testing.assert_close(model.weight.grad, twin.weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.bias.grad, twin.bias.grad, rtol=1e-5, atol=1e-5)


def test_tied_parameters_accumulate_once() -> None:
    """A parameter used twice gets the sum of both uses, as in plain PyTorch."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    params = list({id(p): p for p in [*first.parameters(), *second.parameters()]}.values())
    flat = FlatGradients(params)
    x = torch.randn(3, 4)
    second(first(x)).square().sum().backward()
    got = slices(flat)
    flat.close()
    second(first(x)).square().sum().backward()
    for vector, param in zip(got, params, strict=True):
        assert param.grad is not None
        assert torch.equal(vector, param.grad.flatten())
    with pytest.raises(ConfigurationError, match="twice"):
        FlatGradients([first.weight, second.weight])


def test_frozen_and_later_unfrozen() -> None:
    """A frozen parameter has no gradient for the step; unfrozen in mid-epoch, its gradients count."""
    model = net()
    model[0].weight.requires_grad_(False)
    flat = FlatGradients(list(model.parameters()))
    first, second, _ = batches()
    model(first).square().sum().backward()
    flat.tick()
    assert marks(flat) == [0, 1, 1, 1]
    vector = flat.total(1.0)
    assert vector is not None
    with flat.averaged(lambda out: None, keep=False):
        assert model[0].weight.grad is None
        assert model[0].bias.grad is not None
    model[0].weight.requires_grad_(True)
    for x in (first, second):
        model(x).square().sum().backward()
        flat.tick()
    twin = net()
    assert_sums(flat, reference(twin, [first, second]))
    assert marks(flat) == [1, 1, 1, 1]


def test_an_unused_parameter_rests_unless_another_peer_used_it() -> None:
    """.grad is None for the step exactly when mark and slice of the average are zero."""
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    flat = FlatGradients([used, unused])
    (used * 0).sum().backward()
    assert marks(flat) == [1, 0]
    with flat.averaged(lambda out: None, keep=False):
        assert used.grad is not None  # touched, with a gradient of exactly zero
        assert unused.grad is None
    (used * 2).sum().backward()

    def from_elsewhere(out: np.ndarray) -> None:
        out[flat.layout.marks + 1] = 0.25

    with flat.averaged(from_elsewhere, keep=False):
        assert unused.grad is not None
        assert torch.equal(unused.grad, torch.zeros(3))


def test_autograd_grad_does_not_count_as_a_backward() -> None:
    """torch.autograd.grad over the parameters leaves sums, marks and the pending flag alone."""
    model = net()
    flat = FlatGradients(list(model.parameters()))
    torch.autograd.grad(model(batches()[0]).sum(), list(model.parameters()))
    assert not flat.pending
    assert marks(flat) == [0, 0, 0, 0]


def test_a_late_average_leaves_the_sums() -> None:
    """With keep=True the average is seen through .grad during the step, and the peer's own sums survive."""
    model, twin = net(), net()
    flat = FlatGradients(list(model.parameters()))
    first, second, _ = batches()
    model(first).square().sum().backward()
    flat.tick()

    def ones(out: np.ndarray) -> None:
        out[:] = 1

    with flat.averaged(ones, keep=True):
        assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    model(second).square().sum().backward()
    flat.tick()
    assert_sums(flat, reference(twin, [first, second]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_parameters_can_accumulate_in_float32(dtype: torch.dtype) -> None:
    """grad_dtype=float32: the buffer is exchanged as it is, the step sees the parameter's dtype."""
    p = nn.Parameter(torch.ones(8, dtype=dtype))
    flat = FlatGradients([p], grad_dtype=torch.float32)
    for _ in range(300):
        (p * torch.full((8,), 0.25, dtype=dtype)).sum().backward()
        flat.tick()
    assert torch.equal(slices(flat)[0], torch.full((8,), 75.0))
    assert p.grad is not None
    assert p.grad.dtype == torch.float32
    with flat.averaged(lambda out: None, keep=False):
        assert p.grad is not None
        assert p.grad.dtype == dtype
    assert p.grad is not None
    assert p.grad.dtype == torch.float32
    flat.close()
    p.sum().backward()
    assert p.grad.dtype == dtype


def test_mixed_dtypes_go_through_a_staging_vector() -> None:
    """bfloat16 and float32 parameters meet in one float32 vector; each gets the average in its dtype."""
    a, b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    flat = FlatGradients([a, b])
    ((a * 3).sum() + (b * 2).sum().float()).backward()
    got = slices(flat)
    assert torch.equal(got[0], torch.full((5,), 3.0))
    assert torch.equal(got[1], torch.full((40,), 2.0))

    def halve(out: np.ndarray) -> None:
        out *= 0.5

    with flat.averaged(halve, keep=False):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, torch.full((5,), 1.5))
        assert torch.equal(b.grad, torch.ones(40, dtype=torch.bfloat16))
    assert a.grad is not None
    assert not a.grad.any()


def test_non_finite_sums_are_not_handed_out() -> None:
    """A NaN or an infinity anywhere makes the total None; large finite values do not."""
    p = nn.Parameter(torch.ones(70_000))
    flat = FlatGradients([p])
    p.sum().backward()
    assert flat.total(1.0) is not None
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert p.grad is not None
        p.grad[69_999] = bad
        assert flat.total(1.0) is None
    assert p.grad is not None
    p.grad.fill_(3e38)
    assert flat.total(1.0) is not None
    assert all_finite(np.zeros(0, dtype=np.float32))


def test_sparse_gradients_are_refused() -> None:
    """An embedding with sparse=True fails in its first backward, with the fix named."""
    embedding = nn.Embedding(10, 4, sparse=True)
    flat = FlatGradients(list(embedding.parameters()))  # its hooks end with it
    with pytest.raises(ConfigurationError, match="sparse=False"):
        embedding(torch.tensor([1, 2])).sum().backward()
    assert flat.total(1.0) is not None


def test_complex_parameters_are_refused() -> None:
    """A dtype that cannot be averaged is named."""
    with pytest.raises(ConfigurationError, match="complex64"):
        FlatGradients([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


def test_activation_checkpointing_and_autocast() -> None:
    """Recomputed activations and autocast change nothing about accumulation."""
    model, twin = net(), net()
    flat = FlatGradients(list(model.parameters()))
    for module in (model, twin):
        for x in batches():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = checkpoint(module, x, use_reentrant=False)
            y.float().square().sum().backward()
    assert_sums(flat, [p.grad for p in twin.parameters()])


def test_close_gives_ordinary_parameters_back() -> None:
    """After close() backward works as if nothing had been there."""
    model, twin = net(), net()
    flat = FlatGradients(list(model.parameters()))
    flat.close()
    model.zero_grad()
    expected = reference(twin, batches())
    for got, want in zip(reference(model, batches()), expected, strict=True):
        assert got is not None
        assert want is not None
        assert torch.equal(got, want)


def test_empty_and_scalar_parameters() -> None:
    """Parameters without elements or without dimensions take part without harm."""
    empty, scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(2.0))
    flat = FlatGradients([empty, scalar])
    (empty.sum() + scalar * 3).backward()
    flat.tick()
    assert slices(flat)[1].item() == 3.0
    with flat.averaged(lambda out: None, keep=False):
        assert empty.grad is None
        assert scalar.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taken_sums_leave_and_come_back(dtype: torch.dtype) -> None:
    """After take() accumulation starts from zero elsewhere; merge() adds what was taken, marks included."""
    a, b = nn.Parameter(torch.ones(5, dtype=dtype)), nn.Parameter(torch.ones(40, dtype=dtype))
    flat = FlatGradients([a, b])
    (a * 3).sum().backward()
    flat.tick()
    taken = flat.take(1.0)
    assert taken is not None
    assert taken.touched == [True, False]
    assert marks(flat) == [0, 0]
    (b * 2).sum().backward()
    flat.tick()
    assert taken.vector[flat.layout.offsets[0]] == 3.0  # untouched by the backward since
    assert [float(s.sum()) for s in slices(flat)] == [0.0, 80.0]
    flat.merge(taken)
    assert [float(s.sum()) for s in slices(flat)] == [15.0, 80.0]
    assert marks(flat) == [1, 1]
    again = flat.take(1.0)
    assert again is not None
    flat.recycle(again)
    assert [float(s.sum()) for s in slices(flat)] == [0.0, 0.0]
    assert marks(flat) == [0, 0]
