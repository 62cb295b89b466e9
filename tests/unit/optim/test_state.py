from __future__ import annotations

from collections import Counter

import msgpack
import numpy as np
import pytest
import torch
from torch import nn

from p2pavg.errors import StateError
from p2pavg.optim.modules import owning_modules, persistent_buffers
from p2pavg.optim.resume import load_extras
from p2pavg.optim.training_state import TrainingState, outline, schema
from p2pavg.optim.tree import TreeWriter, unpack
from p2pavg.rounds.training import copied

SCHEDULERS = {
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [3],
    ),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


def round_trip(value: object) -> object:
    writer = TreeWriter()
    meta = msgpack.unpackb(msgpack.packb(writer.pack(value)), strict_map_key=True)
    return unpack(meta, writer.bytes())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object = None) -> None:
    generator = torch.Generator().manual_seed(7)
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()  # type: ignore[attr-defined]


def test_plain_values_survive() -> None:
    """None, numbers, infinities, strings, bytes, containers and counters come back with their types."""
    value = {
        1: [None, True, -3, 2.5, float("inf"), "x", b"y"],
        "two": (1, (2, [3])),
        "counter": Counter({2: 1, 4: 2}),
        "numpy": np.float64(0.1),
    }
    assert round_trip(value) == value
    assert isinstance(round_trip(Counter({2: 1})), Counter)
    assert isinstance(round_trip((1,)), tuple)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_survive_to_the_bit(dtype: torch.dtype) -> None:
    """Scalars, empty and strided tensors of any dtype come back equal."""
    full = torch.arange(24).reshape(4, 6).to(dtype)
    for tensor in (full, full.t(), full[::2, 1:], full[0, 0], full[:0]):
        back = round_trip([tensor])
        assert isinstance(back, list)
        assert back[0].dtype == dtype
        assert torch.equal(back[0], tensor)


def test_what_cannot_travel_is_named() -> None:
    """A function or a sparse tensor in the state raises StateError with its type."""
    with pytest.raises(StateError, match="function"):
        TreeWriter().pack({"f": lambda: None})
    with pytest.raises(StateError, match="sparse"):
        TreeWriter().pack(torch.eye(2).to_sparse())


@pytest.mark.parametrize(
    "bad",
    [
        {"tensor": ["float32", [2], 1000]},
        {"tensor": ["float32", [-2], 0]},
        {"tensor": ["float32", [1 << 62, 16], 0]},
        {"tensor": ["object", [1], 0]},
        {"tensor": 5},
        {"dict": [[{"list": []}, 1]]},
        {"unknown": 1},
        {"list": 3},
        [1, 2],
    ],
)
def test_malformed_state_is_refused(bad: object) -> None:
    """Whatever a broken donor sends raises StateError and nothing else."""
    with pytest.raises(StateError):
        unpack(bad, np.zeros(64, dtype=np.uint8))


def test_deep_nesting_is_refused() -> None:
    """A bomb of nested lists does not exhaust the stack."""
    bomb: object = 1
    for _ in range(100):
        bomb = {"list": [bomb]}
    with pytest.raises(StateError):
        unpack(bomb, np.zeros(0, dtype=np.uint8))


@pytest.mark.parametrize(
    ("part", "bad"),
    [
        ("parameters", None),
        ("parameters", [1]),
        ("buffers", {}),
        ("options", None),
        ("options", [3]),
        ("options", [{"params": []}]),
        ("optimizer", [[]]),
        ("optimizer", {}),
        ("scheduler", [1]),
        ("extras", None),
    ],
)
def test_a_state_of_another_form_changes_nothing(part: str, bad: object) -> None:
    """A part that is not what a snapshot has there is a StateError before anything was loaded."""
    donor, here = net(), net()
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in (donor, here)]
    step(donor, optimizers[0])
    states = [
        TrainingState(optimizer, None, lambda model=model: persistent_buffers([model]))
        for model, optimizer in zip((donor, here), optimizers, strict=True)
    ]
    meta, buffers = copied(states[0].snapshot())
    before, digest = here.state_dict()["0.weight"].clone(), states[1].initial_digest()
    with pytest.raises(StateError):
        states[1].load({**meta, part: TreeWriter().pack(bad)}, buffers)
    assert torch.equal(here.state_dict()["0.weight"], before)
    assert states[1].initial_digest() == digest
    states[1].load(meta, buffers)
    assert states[1].initial_digest() == states[0].initial_digest()


def test_a_scheduler_of_another_kind_is_named() -> None:
    """What a scheduler raises for a state that is not its own comes as a StateError."""
    models = net(), net()
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    schedulers = SCHEDULERS["multistep"](optimizers[0]), SCHEDULERS["sequential"](optimizers[1])
    states = [TrainingState(o, s, list) for o, s in zip(optimizers, schedulers, strict=True)]
    with pytest.raises(StateError, match="does not fit the scheduler"):
        states[1].load(*copied(states[0].snapshot()))


def test_an_extra_that_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An empty state of an extra is no missing one, and is not loaded: a GradScaler refuses it."""
    kept = torch.amp.GradScaler("cpu")
    load_extras({"scaler": kept}, {"scaler": {}})
    assert not caplog.records
    load_extras({"scaler": kept}, {})
    assert "has no 'scaler' among its extras" in caplog.text


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_loaded_state_trains_on_like_the_donor(optimizer: str, scheduler: str) -> None:
    """After loading a snapshot, further steps give the donor's bits."""
    if optimizer in ("adafactor", "rprop", "asgd") and scheduler in ("cyclic", "onecycle"):
        pytest.skip("these schedulers cycle momentum")
    models = net(), net()
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in models]
    schedulers = [SCHEDULERS[scheduler](o) for o in optimizers]
    states = [
        TrainingState(o, s, lambda m=m: persistent_buffers([m]))
        for m, o, s in zip(models, optimizers, schedulers, strict=True)
    ]
    for _ in range(3):
        step(models[0], optimizers[0], schedulers[0])
    meta, buffers = copied(states[0].snapshot())
    states[1].load(msgpack.unpackb(msgpack.packb(meta)), buffers)
    for _ in range(3):
        for triple in zip(models, optimizers, schedulers, strict=True):
            step(*triple)
    for key, value in models[0].state_dict().items():
        assert torch.equal(models[1].state_dict()[key], value)


def test_a_state_of_another_model_changes_nothing() -> None:
    """A snapshot that does not fit raises StateError before a weight is touched."""
    donor, model = nn.Linear(3, 3), net()
    source = TrainingState(OPTIMIZERS["sgd"](donor.parameters()), None, list)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    target = TrainingState(optimizer, None, lambda: persistent_buffers([model]))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(StateError):
        target.load(*copied(source.snapshot()))
    meta, buffers = copied(target.snapshot())
    with pytest.raises(StateError):
        target.load({}, buffers)
    with pytest.raises(StateError):
        target.load(
            meta,
            {name: blob[:-1] for name, blob in buffers.items() if len(blob)}
            | {"scheduler": buffers["scheduler"]},
        )
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_a_snapshot_is_a_copy() -> None:
    """Training on does not change a snapshot that was taken."""
    model = net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    state = TrainingState(optimizer, None, lambda: persistent_buffers([model]))
    step(model, optimizer)
    _, buffers = copied(state.snapshot())
    copies = {name: blob.copy() for name, blob in buffers.items()}
    step(model, optimizer)
    assert all(np.array_equal(buffers[name], blob) for name, blob in copies.items())


def test_digest_and_schema_tell_differences() -> None:
    """Weights, buffers and rates change the digest; shapes, formats, dtypes and class the schema."""

    def digest(change: object = None) -> bytes:
        model = net()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        if callable(change):
            with torch.no_grad():
                change(model, optimizer)
        return TrainingState(optimizer, None, lambda: persistent_buffers([model])).initial_digest()

    def weight(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        next(model.parameters()).view(-1)[0] += 1e-6

    def buffer(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        next(model.buffers()).add_(1)

    def rate(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.2

    assert digest() == digest()
    assert len(digest()) == 32
    assert len({digest(), digest(weight), digest(buffer), digest(rate)}) == 4

    def of(model: nn.Module, make: str = "adam") -> bytes:
        return schema(outline(OPTIMIZERS[make](model.parameters()), persistent_buffers([model])))

    conv = nn.Conv2d(4, 4, 3)
    schemas = [of(net()), of(net(), "sgd"), of(nn.Linear(4, 4)), of(nn.Linear(4, 4).double()), of(conv)]
    schemas.append(of(conv.to(memory_format=torch.channels_last)))
    schemas.append(of(nn.Sequential(net(), nn.BatchNorm1d(4, affine=False))))
    assert len(set(schemas)) == len(schemas)
    assert of(net()) == of(net())


def test_modules_are_found_by_their_parameters() -> None:
    """The largest modules whose trainable parameters are all the optimizer's; buffers once, in order."""
    generator, critic = net(), net()
    both = nn.ModuleDict({"g": generator, "c": critic})
    assert owning_modules(list(generator.parameters())) == [generator]
    assert owning_modules(list(both.parameters())) == [both]
    frozen = net()
    frozen[0].requires_grad_(False)
    assert owning_modules([p for p in frozen.parameters() if p.requires_grad]) == [frozen]
    assert len(persistent_buffers([both])) == 6
    assert persistent_buffers(owning_modules([nn.Parameter(torch.zeros(1))])) == []


class Raising:
    """An object of a user's whose state_dict() raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, object]:
        raise self.error

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Nothing."""


@pytest.mark.parametrize("error", [KeyError("momentum"), StopIteration()], ids=["key", "stop"])
def test_whose_state_dict_raises_is_named(error: Exception) -> None:
    """A scheduler's or an extra's exception becomes a StateError that names it, which threads hand on."""
    optimizer = OPTIMIZERS["sgd"](net().parameters())
    held = Raising(error)
    for scheduler, extras, name in ((held, {}, "the scheduler"), (None, {"mine": held}, r"extras\['mine'\]")):
        state = TrainingState(optimizer, scheduler, list, extras)  # type: ignore[arg-type]
        with pytest.raises(
            StateError, match=rf"state_dict\(\) of {name}, which raised {type(error).__name__}"
        ):
            state.snapshot()
