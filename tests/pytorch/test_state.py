"""What runs during a capture leaves modules as they were, hooks and all, or is refused."""

from __future__ import annotations

import random
import time
from collections import OrderedDict, UserDict
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from torch.nn.utils import parametrize  # noqa: E402

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import differing, keep_all  # noqa: E402
from kit.rotation import quick  # noqa: E402
from kit.traced_models import Through, rows  # noqa: E402
from kit.traced_steps import run_eager, run_units  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

nn = torch.nn
pytestmark = pytest.mark.torch


class Ready(nn.Module):
    """Changes itself in its first forward pass, and notes that it did."""

    def __init__(self, change: Callable[[Any], object], *, late: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.spare = nn.ReLU()
        self.ready = False
        self.change = change
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        if not self.ready and not self.late:
            self.change(self)
            self.ready = True
        y = self.inner(x)
        if not self.ready and self.late:
            self.change(self)
            self.ready = True
        return self.act(y)


def doubled(_: Any, __: Any, output: Any) -> Any:
    """Double an output."""
    return output * 2


def halved(_: Any, inputs: Any) -> Any:
    """Halve the inputs."""
    return tuple(value / 2 for value in inputs)


def scaled(_: Any, into: Any, __: Any) -> Any:
    """Scale gradients."""
    return tuple(None if g is None else g * 3 for g in into)


def scaled_out(_: Any, out: Any) -> Any:
    """Scale gradients of outputs."""
    return tuple(None if g is None else g * 3 for g in out)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the parameter is used as."""
        return 2 * x


HOOKS: dict[str, Callable[[Any], object]] = {
    "forward": lambda m: m.inner.register_forward_hook(doubled),
    "forward with keywords": lambda m: m.inner.register_forward_hook(
        lambda _m, _i, _k, output: output * 2, with_kwargs=True
    ),
    "forward, always": lambda m: m.inner.register_forward_hook(doubled, always_call=True),
    "before forward": lambda m: m.inner.register_forward_pre_hook(halved),
    "before forward, first": lambda m: m.inner.register_forward_pre_hook(halved, prepend=True),
    "before forward with keywords": lambda m: m.inner.register_forward_pre_hook(
        lambda _m, i, k: (halved(_m, i), k), with_kwargs=True
    ),
    "backward": lambda m: m.inner.register_full_backward_hook(scaled),
    "before backward": lambda m: m.inner.register_full_backward_pre_hook(scaled_out),
}

OTHERS: dict[str, Callable[[Any], object]] = {
    "state dict": lambda m: m.register_state_dict_post_hook(nothing),
    "before state dict": lambda m: m.inner.register_state_dict_pre_hook(nothing),
    "before loading": lambda m: m.register_load_state_dict_pre_hook(nothing),
    "after loading": lambda m: m.inner.register_load_state_dict_post_hook(nothing),
    "mode": lambda m: m.inner.eval(),
    "module added": lambda m: m.add_module("new", nn.Tanh()),
    "module replaced": lambda m: setattr(m, "act", nn.Tanh()),
    "module taken away": lambda m: delattr(m, "spare"),
    "global hook": lambda _: nn.modules.module.register_module_forward_hook(nothing),
    "nested container": lambda m: m.notes["a"][0].append(1),
    "mapping": lambda m: m.user.update(b=2),
    "object": lambda m: setattr(m.object, "count", 7),
    "module in a list": lambda m: m.hidden[0].eval(),
    "flag of a weight": lambda m: m.frozen[0].requires_grad_(False),
    "class": lambda m: setattr(m.act, "__class__", nn.Tanh),
}


class Notes:
    """An object of a user."""

    def __init__(self) -> None:
        self.count = 0


def step_of(change: Callable[[Any], object], **options: Any) -> Any:
    """Return a step of two modules that change themselves."""
    torch.manual_seed(1)
    model, loss_fn, inputs = rows(Ready(change, **options), Ready(change, **options))
    for module in model:
        module.notes = {"a": [[]]}
        module.user = UserDict(a=1)
        module.object = Notes()
        module.hidden = [nn.Dropout(0.0)]
        module.frozen = [module.unused.weight]
    return model, loss_fn, inputs


def state_of(model: Any) -> Any:
    """Return everything that can be said of the modules of a model, as identities and values."""
    hooks = vars(nn.Module())
    return [
        (
            name,
            type(module),
            {key: [*map(id, getattr(module, key))] for key in hooks if key.endswith("hooks")},
            {key: list(getattr(module, key)) for key in hooks if isinstance(hooks[key], dict)},
            [*map(id, module._modules.values())],
            [(id(p), p.requires_grad, p._backward_hooks) for p in module.parameters(recurse=False)],
            [(id(b), b.tolist()) for b in module.buffers(recurse=False)],
            module.training,
            sorted(vars(module)),
            repr(vars(module).get("notes")),
            dict(vars(module).get("user", {})),
            vars(vars(module).get("object", Notes())),
            [part.training for part in vars(module).get("hidden", ())],
            len(nn.modules.module._global_forward_hooks),
        )
        for name, module in model.named_modules()
    ]


FIRING = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@FIRING
@pytest.mark.parametrize(
    "kind",
    quick(
        HOOKS | OTHERS,
        ("before forward with keywords", "backward", "mode", "module replaced", "global hook",
         "nested container", "object", "class"),
    ),
)  # fmt: skip
def test_a_capture_leaves_modules_as_they_were(kind: str) -> None:
    """Compiling and verifying change nothing, and the step computes what eager's first does."""
    own = step_of((HOOKS | OTHERS)[kind])
    before = state_of(own[0])
    step = keep_all(*own, time_limit=5)
    assert state_of(own[0]) == before
    assert step.verify().equal
    assert state_of(own[0]) == before
    assert differing(step, *own) == []
    nn.modules.module._global_forward_hooks.clear()
    assert state_of(own[0]) == before


@FIRING
@pytest.mark.parametrize("kind", quick(HOOKS, ("forward", "backward")))
def test_hooks_of_the_first_pass_are_captured_once(kind: str) -> None:
    """However often PyTorch runs the model meanwhile."""
    own = step_of(HOOKS[kind])
    found = run_units(pmt.trace(*own, measure_workspace=False))
    expected, plain = run_eager(*own), run_eager(*step_of(nothing))
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    assert not all(torch.equal(value, plain[key]) for key, value in expected.items())


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "new": (
        lambda m: setattr(m, "scale", nn.Parameter(torch.ones(4))),
        "parameter 'scale' of module '0' is new after forward",
    ),
    "layer": (
        lambda m: setattr(m, "layer", nn.Linear(4, 4)), r"'bias' of module '0\.layer' is new"
    ),
    "replaced": (
        lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(4, 4))),
        r"parameter 'weight' of module '0\.inner' is assigned in forward",
    ),
    "taken": (
        lambda m: delattr(m.unused, "weight"), r"'weight' of module '0\.unused' is taken"
    ),
    "parametrized": (
        lambda m: parametrize.register_parametrization(m.inner, "weight", Doubled()),
        r"module '0\.inner.*' is",
    ),
    "hooked": (
        lambda m: m.inner.weight.register_hook(lambda g: g * 2),
        r"'weight' of module '0\.inner' gets a hook",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parameters_that_forward_changes_are_refused(kind: str, late: bool) -> None:
    """The parameter is named; the modules are as they were."""
    change, words = REFUSED[kind]
    own = step_of(change, late=late)
    before = state_of(own[0])
    with pytest.raises(pmt.CaptureError, match=words):
        keep_all(*own)
    assert state_of(own[0]) == before


def doubled_gradient(_: Any, gradients: Any, __: Any) -> Any:
    """Return twice the gradient."""
    return tuple(2 * gradient for gradient in gradients)


def test_what_acts_from_the_second_step_on_is_refused() -> None:
    """A hook that a module puts on itself in forward acts in the next step: so would eager's."""
    own = step_of(lambda m: m.register_forward_hook(doubled))
    before = state_of(own[0])
    with pytest.raises(pmt.CaptureError, match="gives other results when the step runs again"):
        keep_all(*own)
    assert state_of(own[0]) == before


def test_what_acts_on_gradients_from_the_second_step_on_is_refused() -> None:
    """The loss does not tell: what forward left behind makes the backward pass run again too."""
    change = partial(nn.Module.register_full_backward_hook, hook=doubled_gradient)
    own = rows(nn.Linear(4, 4), Ready(change))
    with pytest.raises(pmt.CaptureError, match=r"again from .*: gradient of "):
        keep_all(*own)


def count(module: Any) -> float:
    """Count calls."""
    module.calls += 1
    return float(module.calls)


CONSTANTS: dict[str, Callable[[Any], float]] = {
    # The time since the last full second, which a float32 tells apart on any host.
    "clock": lambda _: time.perf_counter() % 1,
    "count": count,
    "system": lambda _: random.SystemRandom().random(),
    "fresh generator": lambda _: random.Random().random(),  # noqa: S311
}


@pytest.mark.parametrize("kind", quick(CONSTANTS, ("count", "system")))
def test_what_is_another_constant_each_time_is_refused(kind: str) -> None:
    """Eager runs twice at compile: a clock, a count and other random numbers show."""
    model, loss_fn, inputs = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) * CONSTANTS[kind](model))
    model.calls = 0
    with pytest.raises(pmt.CaptureError, match=r"loss .*would be frozen: make it an input"):
        keep_all(model, loss_fn, inputs)
    assert model.calls == 0


def test_eager_that_fails_is_told_in_a_sentence() -> None:
    """What a backward pass needs was changed in place."""

    def spoiled(parts: Any, x: Any) -> Any:
        return parts[0](x).relu().mul_(0.5)

    with pytest.raises(pmt.CaptureError, match=r"Through: .*modified by an inplace"):
        keep_all(*rows(nn.Linear(4, 4), by=spoiled))


LARGE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "program": (
        lambda p, x: p[0](x) + torch.empty(2**50).expand(3, 4, 2**50)[..., 0],
        r"aten\.empty\S* fails .*memory",
    ),
    # Made for nothing: it is not in the graph.
    "eager": (
        lambda p, x: (torch.empty(2**50), p[0](x))[1],
        "one step of PyTorch: there is not enough memory at .*smaller batch",
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_too_little_memory_is_told_in_a_sentence(kind: str) -> None:
    """For the program, and for the steps of PyTorch that it is compared with."""
    forward, words = LARGE[kind]
    own = rows(nn.Linear(4, 4), by=forward)
    before = state_of(own[0])
    with pytest.raises(pmt.CaptureError, match=words):
        keep_all(*own)
    assert state_of(own[0]) == before


class Recorded(nn.Module):
    """Returns what hooks of its layers recorded, which its first pass installs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.installed = False
        self.recorded: list[Any] = []

    def forward(self, x: torch.Tensor) -> OrderedDict[str, Any]:
        """Return the outputs of all layers."""
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda _m, _i, output: self.recorded.append(output))
            self.installed = True
        self.recorded.clear()
        y = self.layers(x)
        return OrderedDict(last=y, hidden=tuple(self.recorded))


def test_recorded_outputs_are_recorded_once() -> None:
    """Each layer's output is there once, and so is its gradient."""

    def loss_fn(out: Any, y: Any) -> Any:
        return sum((h * h).mean() for h in out["hidden"]) + (out["last"] - y).square().mean()

    torch.manual_seed(1)
    own = Recorded(), loss_fn, (torch.randn(3, 4), torch.randn(3, 4))
    step = keep_all(*own)
    assert step.verify().equal
    assert differing(step, *own) == []
    assert not own[0].installed
    assert not any(layer._forward_hooks for layer in own[0].layers)


# -- random numbers that are not PyTorch's -----------------------------------------------------


DRAWS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "python": (lambda p, x: p[0](x) * random.random(), "Python's random"),  # noqa: S311
    "numpy": (lambda p, x: p[0](x) * float(numpy.random.rand()), r"numpy\.random"),
    "a layer left out": (
        lambda p, x: p[0](x) if random.random() < 2 else x,  # noqa: S311
        "Python's random",
    ),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_that_are_not_of_pytorch_are_refused(kind: str) -> None:
    """The module is named, and the states are as before."""
    forward, told = DRAWS[kind]
    own = rows(nn.Sequential(Through(forward, nn.Linear(4, 4))))
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(pmt.CaptureError, match=rf"draws from {told} in module '0\.0' \(Through\)"):
        keep_all(*own)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def test_draws_of_a_loss_are_refused() -> None:
    """A function draws in no module."""
    model, _, inputs = rows(nn.Linear(4, 4))
    before = random.getstate()
    with pytest.raises(pmt.CaptureError, match="draws from Python's random"):
        pmt.capture(model, lambda y, t: (y - t).square().mean() * random.random(), inputs)  # noqa: S311
    assert random.getstate() == before


def replaced(parts: Any, x: Any) -> Any:
    """Put another module around the layer the first time, as BigBird does."""
    if type(parts[0]) is nn.ModuleList:
        new = nn.Sequential(nn.Linear(4, 4))
        new[0] = parts[0][0]
        parts[0] = new
    return nn.functional.dropout(parts[0](x), 0.5)


def test_modules_that_the_first_pass_makes_are_named() -> None:
    """Their initial values move the random generator once; called before, the model compiles."""
    own = rows(nn.ModuleList([nn.Linear(4, 4)]), by=replaced)
    with pytest.raises(pmt.CaptureError, match=r"\(the first is parts\.0\).*call the model once"):
        keep_all(*own)
    own[0](own[2][0])
    step = keep_all(*own)
    assert differing(step, *own) == []


def test_generators_without_a_state_may_be_held() -> None:
    """One of the operating system has none; its draws are seen where eager runs twice."""
    model, loss_fn, inputs = rows(
        nn.Linear(4, 4), by=lambda p, x: p[0](x) * (model.draws.random() if model.drawing else 1)
    )
    model.draws, model.drawing = random.SystemRandom(), False
    keep_all(model, loss_fn, inputs)
    model.drawing = True
    with pytest.raises(pmt.CaptureError, match="other results"):
        keep_all(model, loss_fn, inputs)


@pytest.mark.parametrize(
    "kind", quick(("random", "numpy generator", "numpy state"), ("random", "numpy generator"))
)
def test_draws_of_generators_that_modules_hold_are_refused(kind: str) -> None:
    """Also from an object that a module holds."""
    own = {
        "random": lambda: random.Random(1),  # noqa: S311
        "numpy generator": lambda: numpy.random.default_rng(1),
        "numpy state": lambda: numpy.random.RandomState(1),
    }[kind]()
    model, loss_fn, inputs = rows(
        nn.Linear(4, 4), by=lambda p, x: p[0](x) * float(model.draws.uniform(0, 1))
    )
    model.draws = own
    first = own.uniform(0, 1)
    with pytest.raises(pmt.CaptureError, match=r"draws from a .*[rR]andom"):
        keep_all(model, loss_fn, inputs)
    again = type(own)(1) if kind != "numpy generator" else numpy.random.default_rng(1)
    assert (again.uniform(0, 1), again.uniform(0, 1)) == (first, own.uniform(0, 1))
