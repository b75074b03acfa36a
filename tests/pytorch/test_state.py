"""A capture leaves modules, and state of code outside of them, unchanged."""

import logging
import random
import sys
import time
from collections import OrderedDict, UserDict, deque
from importlib.util import find_spec, module_from_spec, spec_from_file_location

import pytest
import torch
from torch.nn.utils import parametrize

import poetmodel.torch as pmt
from kit.eager_steps import (
    check_replay,
    compile_keep_all,
    copy_outcome,
    find_differences,
    find_unequal,
)
from kit.networks import residual_step
from kit.optimizer_steps import OPTIMIZERS, Twins
from kit.rotation import mark_seeds_except
from kit.traced_models import FunctionModule, row_step
from poetmodel.torch import CaptureError, capture, compile

numpy = pytest.importorskip("numpy")
nn = torch.nn


class Ready(nn.Module):
    """Changes itself in its first forward pass, and notes that it did."""

    def __init__(self, change, *, late=False):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.spare = nn.ReLU()
        self.ready = False
        self.change = change
        self.late = late

    def forward(self, x):
        """Return the layer's output."""
        if not self.ready and not self.late:
            self.change(self)
            self.ready = True
        y = self.inner(x)
        if not self.ready and self.late:
            self.change(self)
            self.ready = True
        return self.act(y)


def doubled(_, __, output):
    """Double an output."""
    return output * 2


def halved(_, inputs):
    """Halve the inputs."""
    return tuple(value / 2 for value in inputs)


def scaled(_, into, __):
    """Scale gradients."""
    return tuple(None if g is None else g * 3 for g in into)


def nothing(*_, **__):
    """Do nothing."""


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x):
        """Return twice the parameter."""
        return 2 * x


HOOKS = {
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
    "state dict": lambda m: m.register_state_dict_post_hook(nothing),
    "before state dict": lambda m: m.inner.register_state_dict_pre_hook(nothing),
    "before loading": lambda m: m.register_load_state_dict_pre_hook(nothing),
    "after loading": lambda m: m.inner.register_load_state_dict_post_hook(nothing),
    "of all modules": lambda _: nn.modules.module.register_module_forward_hook(nothing),
    "class": lambda m: setattr(m.act, "__class__", nn.Tanh),
    "flag of a weight": lambda m: m.frozen[0].requires_grad_(False),
}
"""Changes that TorchDynamo refuses."""

OTHERS = {
    "mode": lambda m: m.inner.eval(),
    "module added": lambda m: m.add_module("new", nn.Tanh()),
    "module replaced": lambda m: setattr(m, "act", nn.Tanh()),
    "module taken away": lambda m: delattr(m, "spare"),
    "nested container": lambda m: m.notes["a"][0].append(1),
    "mapping": lambda m: m.user.update(b=2),
    "object": lambda m: setattr(m.object, "count", 7),
    "module in a list": lambda m: m.hidden[0].eval(),
}


class Notes:
    """An object of a user."""

    def __init__(self):
        self.count = 0


def step_of(change, **options):
    """Return a step of two modules that change themselves."""
    torch.manual_seed(1)
    model, loss_fn, inputs = row_step(Ready(change, **options), Ready(change, **options))
    for module in model:
        module.notes = {"a": [[]]}
        module.user = UserDict(a=1)
        module.object = Notes()
        module.hidden = [nn.Dropout(0.0)]
        module.frozen = [module.unused.weight]
    return model, loss_fn, inputs


def state_of(model):
    """Return all state of the modules of a model, as identities and values."""
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


DOORS = {
    "capture": lambda twins, _: capture(twins.model, twins.loss_fn, twins.inputs),
    "measure": lambda twins, folder: pmt.measure(twins.trace(), folder=folder, repeats=1),
    "verify": lambda twins, folder: compile_keep_all(
        twins.model, twins.loss_fn, twins.inputs, ram="80%", recompute=False, storage=folder
    ).verify(*twins.inputs),
    "updates": lambda twins, _: twins.compile().verify(),
}


@pytest.mark.parametrize(
    "door", mark_seeds_except(DOORS, {"measure"}, {"capture", "verify", "updates"})
)
def test_doors_leave_everything_as_it_was(door, tmp_path):
    """Parameters, buffers, moments, modes, hooks and random state; gradients are the same."""
    twins = Twins(residual_step(widths=(8,)), OPTIMIZERS["adam"])
    model, optimizer = twins.model, twins.optimizers[0]
    model[2].eval()
    modes = [module.training for module in model.modules()]

    def everything():
        moments = optimizer.state_dict()["state"].values()
        return copy_outcome(model, torch.zeros(())) | {
            f"{k}.{key}": v.clone() for k, kept in enumerate(moments) for key, v in kept.items()
        }

    for _ in range(2):
        before, gradients = everything(), [p.grad for p in model.parameters()]
        DOORS[door](twins, tmp_path)
        assert find_unequal(before, everything()) == []
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        assert [module.training for module in model.modules()] == modes
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        twins.run_both_eager()
        model[0].weight.grad = torch.ones_like(model[0].weight)


@pytest.mark.parametrize(
    "kind",
    mark_seeds_except(OTHERS, ("module replaced", "nested container"), ("mode", "object")),
)
def test_a_capture_leaves_modules_as_they_were(kind):
    """Compiling and verifying change nothing, and the step computes and sets eager's first one."""
    own = step_of(OTHERS[kind])
    before = state_of(own[0])
    step = compile_keep_all(*own, time_limit=5)
    assert state_of(own[0]) == before
    assert step.verify().equal
    assert state_of(own[0]) == before
    assert find_differences(step, *own) == []
    assert all(module.ready for module in own[0])


@pytest.mark.parametrize(
    "kind",
    mark_seeds_except(HOOKS, ("of all modules", "class"), ("before forward with keywords",)),
)
def test_what_only_a_first_pass_may_do_is_refused(kind):
    """Line and remedy are named, and modules are as they were; the remedy helps."""
    own = step_of(HOOKS[kind])
    before = state_of(own[0])
    with pytest.raises(pmt.CaptureError, match=r"at .*test_state\.py:\d+ .*call the model once"):
        compile_keep_all(*own)
    assert state_of(own[0]) == before
    try:
        own[0](own[2][0])
        step = compile_keep_all(*own, time_limit=5)
        assert step.verify().equal
        assert find_differences(step, *own) == []
    finally:
        nn.modules.module._global_forward_hooks.clear()
    if kind == "of all modules":
        with pytest.raises(pmt.CaptureError, match="hooks of all modules"):
            step(*own[2])


REFUSED = {
    "new": lambda m: setattr(m, "scale", nn.Parameter(torch.ones(4))),
    "layer": lambda m: setattr(m, "layer", nn.Linear(4, 4)),
    "replaced": lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(4, 4))),
    "taken": lambda m: delattr(m.unused, "weight"),
    "parametrized": lambda m: parametrize.register_parametrization(m.inner, "weight", Doubled()),
    "hooked": lambda m: m.inner.weight.register_hook(lambda g: g * 2),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.seeds)])
def test_parameters_that_forward_changes_are_refused(kind, late, told):
    """The parameter is named; the modules are as they were."""
    own = step_of(REFUSED[kind], late=late)
    before = state_of(own[0])
    with told.raises(pmt.CaptureError):
        compile_keep_all(*own)
    assert state_of(own[0]) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            lambda m: m.register_forward_hook(doubled),
            r"at .*test_state\.py",
            marks=pytest.mark.slow,  # test_dynamo_steps.py has one that records
        ),
        (lambda m: m.register_full_backward_hook(scaled), r"at .*test_state\.py"),
    ],
)
def test_what_acts_from_the_second_step_on_is_refused(change, words):
    """A hook that a module adds to itself in forward acts in the next step of eager.

    If the loss does not depend on it, the backward pass is repeated with the state after
    forward, too.
    """
    own = row_step(nn.Linear(4, 4), Ready(change))
    before = state_of(own[0])
    with pytest.raises(pmt.CaptureError, match=words):
        compile_keep_all(*own)
    assert state_of(own[0]) == before


FROZEN = r"loss .*would be frozen: make it an input"
FAILING = {
    "program": (lambda p, x: p[0](x) + torch.empty(2**50).expand(3, 4, 2**50)[..., 0],
        r"there is not enough memory at .*smaller batch"),
    # What the backward pass needs is changed in place.
    "in place": (
        lambda p, x: p[0](x).relu().mul_(0.5), r"FunctionModule: .*modified by an inplace"),
    # Made for nothing: it is not in the graph.
    "eager": (lambda p, x: (torch.empty(2**50), p[0](x))[1],
        "there is not enough memory at .*smaller batch"),
    # Another constant each time, such as the time since the last full second.
    "clock": (lambda p, x: p[0](x) * (time.perf_counter() % 1), FROZEN),
    "count": (
        lambda p, x: p[0](x) * len(p[0].notes["a"].append(1) or p[0].notes["a"]),
        r"forward changes .*parts.*notes",
    ),
    "system": (lambda p, x: p[0](x) * random.SystemRandom().random(), FROZEN),
    "fresh generator": (
        lambda p, x: p[0](x) * random.Random().random(),  # noqa: S311
        r"forward reads at .*test_state.py:\d+ .* Python computes anew .*make it an input"),
}  # fmt: skip


@pytest.mark.parametrize("kind", mark_seeds_except(FAILING, {*FAILING} - {"count"}, ("count",)))
def test_steps_that_fail_are_told_in_a_sentence(kind):
    """Those of the program, and those of PyTorch, which runs twice, that it is compared with."""
    forward, words = FAILING[kind]
    own = row_step(nn.Linear(4, 4), by=forward)
    own[0].parts[0].notes = {"a": []}
    before = state_of(own[0])
    with pytest.raises(pmt.CaptureError, match=words):
        compile_keep_all(*own)
    assert state_of(own[0]) == before


class Recorded(nn.Module):
    """Returns the records of its layers' hooks, which its first pass installs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.installed = False
        self.recorded = []

    def forward(self, x):
        """Return the outputs of all layers."""
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda _m, _i, output: self.recorded.append(output))
            self.installed = True
        self.recorded.clear()
        y = self.layers(x)
        return OrderedDict(last=y, hidden=tuple(self.recorded))


@pytest.mark.slow
def test_recorded_outputs_are_recorded_once():
    """Each layer's output is recorded once, and so is its gradient, once hooks are there."""

    def loss_fn(out, y):
        return sum((h * h).mean() for h in out["hidden"]) + (out["last"] - y).square().mean()

    own = Recorded(), loss_fn, (torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(pmt.CaptureError, match="call the model once"):
        compile_keep_all(*own)
    assert not own[0].installed
    assert not any(layer._forward_hooks for layer in own[0].layers)
    own[0](own[2][0])
    step = compile_keep_all(*own)
    assert step.verify().equal
    step(*own[2])
    assert len(own[0].recorded) == len(own[0].layers)


# -- random numbers that are not PyTorch's -----------------------------------------------------
DRAWS = {
    "python": (lambda p, x: p[0](x) * random.random(), "Python's random"),  # noqa: S311
    "numpy": (lambda p, x: p[0](x) * float(numpy.random.rand()), r"numpy\.random"),
    "a layer left out": (
        lambda p, x: p[0](x) if random.random() < 2 else x,  # noqa: S311
        "Python's random",
    ),
}


@pytest.mark.parametrize("kind", mark_seeds_except(DRAWS, ["numpy"]))
def test_draws_that_are_not_of_pytorch_are_refused(kind):
    """The module is named, and the states are as before."""
    forward, told = DRAWS[kind]
    own = row_step(nn.Sequential(FunctionModule(forward, nn.Linear(4, 4))))
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(pmt.CaptureError, match=f"draws from {told}"):
        compile_keep_all(*own)
    model, _, inputs = row_step(nn.Linear(4, 4))
    with pytest.raises(pmt.CaptureError, match="draws from Python's random"):  # in no module
        pmt.capture(model, lambda y, t: (y - t).square().mean() * random.random(), inputs)  # noqa: S311
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def replaced(parts, x):
    """Wrap the layer in another module the first time, like BigBird."""
    if type(parts[0]) is nn.ModuleList:
        new = nn.Sequential(nn.Linear(4, 4))
        new[0] = parts[0][0]
        parts[0] = new
    return nn.functional.dropout(parts[0](x), 0.5)


def test_modules_that_the_first_pass_makes_are_named():
    """Their initial values move the random generator once; called before, the model compiles."""
    own = row_step(nn.ModuleList([nn.Linear(4, 4)]), by=replaced)
    with pytest.raises(pmt.CaptureError, match=r"test_state\.py:\d+ .*call the model once"):
        compile_keep_all(*own)
    own[0](own[2][0])
    step = compile_keep_all(*own)
    assert find_differences(step, *own) == []


@pytest.mark.parametrize(
    "kind",
    mark_seeds_except(("random", "numpy generator", "numpy state"), ("random", "numpy generator")),
)
@pytest.mark.parametrize("held", [lambda value: value, lambda value: ([], (value,))])
def test_draws_of_generators_that_modules_hold_are_refused(kind, held):
    """Also from an object that a module holds, or from a tuple in one."""
    own = {
        "random": lambda: random.Random(1),  # noqa: S311
        "numpy generator": lambda: numpy.random.default_rng(1),
        "numpy state": lambda: numpy.random.RandomState(1),
    }[kind]()
    model, loss_fn, inputs = row_step(
        nn.Linear(4, 4), by=lambda p, x: p[0](x) * float(own.uniform(0, 1))
    )
    model.draws, model.others = held(own), random.SystemRandom()  # which has no state
    first = own.uniform(0, 1)
    with pytest.raises(pmt.CaptureError, match=r"draws from a .*[rR]andom"):
        compile_keep_all(model, loss_fn, inputs)
    again = type(own)(1) if kind != "numpy generator" else numpy.random.default_rng(1)
    assert (again.uniform(0, 1), again.uniform(0, 1)) == (first, own.uniform(0, 1))


# -- what modules hold that is no tensor of theirs -------------------------------------------------
class Average(nn.Module):
    """Adds a moving average, a buffer, to its input, and sets it by a function."""

    def __init__(self, sets):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.count = 0
        self.seen = []
        self.by_name = {"first": 1}
        self.last = deque([1, 2], maxlen=2)
        self.aux = None
        self.sets = sets

    def forward(self, x):
        """Return the layer's output; the buffer's old value is needed by the backward pass."""
        y = self.layer(x) * self.mean + self.layer(x + self.mean)
        self.sets(self, x, y)
        return y


def averaged(module, x, _):
    """Assign the buffer."""
    module.mean = 0.9 * module.mean + 0.1 * x.mean(0).detach()


def step_through(sets):
    """Return a step of two modules that set something."""
    model = nn.Sequential(Average(sets), Average(sets))
    return model, nn.functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))


def test_assigned_buffers_are_updated_as_in_eager(tmp_path):
    """Step after step, loss, gradients and the buffers are eager's; the buffers stay the same."""
    own = step_through(averaged)
    buffers = [module.mean for module in own[0]]
    with compile(*own, ram="95%", storage=tmp_path, device="rpi4b", time_limit=5) as step:
        assert not any(buffer.any() for buffer in buffers)
        for _ in range(3):
            assert find_differences(step, *own) == []
        before = [buffer.clone() for buffer in buffers]
        assert all(buffer.any() for buffer in buffers)
        certificate = step.verify()
        assert certificate.equal, certificate.summary()
    assert all(module.mean is buffer for module, buffer in zip(own[0], buffers, strict=True))
    assert all(map(torch.equal, buffers, before))


ASSIGNED = {
    "another shape": lambda m, x, _: setattr(m, "mean", x.detach().clone()),
    "another type": lambda m, x, _: setattr(m, "mean", x.mean(0).double()),
    "of parameters": lambda m, _, y: setattr(m, "mean", y.mean(0)),
    "nothing": lambda m, _, __: setattr(m, "mean", None),
    "a new one": lambda m, x, _: m.register_buffer("other", x),
    "one of two": averaged,
    "a new module's": lambda m, _, y: normed(m, y),
}


def normed(module, y):
    """Normalize by statistics of a module that the first pass makes."""
    if not hasattr(module, "norm"):
        module.norm = nn.BatchNorm1d(4, affine=False)
    module.norm(y)


@pytest.mark.parametrize("kind", ASSIGNED)
def test_assignments_that_are_no_update_are_refused(kind, told):
    """The error names buffer and module, and a remedy; the buffer is unchanged.

    In eager, two buffers that are one tensor would separate; a step does not change the other
    one silently.
    """
    own = step_through(ASSIGNED[kind])
    if kind == "one of two":
        own[0][1].mean = own[0][0].mean
    buffers = [module.mean for module in own[0]]
    with told.raises(CaptureError):
        capture(*own)
    assert all(module.mean is buffer for module, buffer in zip(own[0], buffers, strict=True))
    assert [module._buffers.keys() for module in own[0]] == [{"mean"}, {"mean"}]


def cached(module, _, y):
    """Make a table in the first pass, and use it in all others."""
    if module.aux is None:
        module.aux = torch.arange(4.0)
    y.mul_(module.aux)


def test_tables_of_the_first_pass_are_captured():
    """Values that forward stores for later passes are no foreign tensors, in repeated captures."""
    own = step_through(cached)
    check_replay(own)
    assert own[0][0].aux is None


def noted(module, x, y):
    """Set all kinds of attributes."""
    module.aux = y.pow(2).mean()
    module.by_name["last"] = x
    module.seen[:] = [y]
    module.new = x


def test_attributes_are_put_back():
    """After a capture, or one that fails, attributes are as before."""
    own = step_through(noted)
    capture(*own)
    for module in own[0]:
        assert (module.aux, module.seen) == (None, [])
        assert module.by_name == {"first": 1}
        assert not hasattr(module, "new")

    def fails(module, _, y):
        module.aux = y.mul_(y.sum().item())

    own = step_through(fails)
    with pytest.raises(CaptureError, match="reads a tensor's value"):
        capture(*own)
    assert own[0][0].aux is None


@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.spectral_norm,
        pytest.param(nn.utils.parametrizations.weight_norm, marks=pytest.mark.slow),
    ],
)
def test_weights_that_hooks_make_are_not_told(norm, caplog, tmp_path):
    """A weight that is computed from parameters in each pass is no attribute that gets stale."""
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    own = model, nn.functional.mse_loss, (torch.randn(3, 4), torch.randn(3, 4))
    with (
        caplog.at_level(logging.WARNING),
        compile(*own, ram="100%", storage=tmp_path, device="rpi4b", time_limit=5) as step,
    ):
        assert not caplog.records
        step(*own[2])
        assert step.verify().equal


# -- what code keeps outside of modules ------------------------------------------------------------
@pytest.fixture
def keepers(monkeypatch):
    """Execute the file of a model again, and return its new module."""
    path = find_spec("kit.keepers").origin
    spec = spec_from_file_location("keepers", path)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "keepers", module)
    spec.loader.exec_module(module)
    return module


KEEPERS = mark_seeds_except(
    ["bounded", "unbounded", "store_in_dictionary", "store_in_tuple",
        "store_in_list", "store_in_name", "store_in_object", "store_in_class"],
    ["bounded"], ["store_in_tuple"],
)  # fmt: skip


def step_with(table):
    """Return a step that adds a table to outputs of two layers, before and after activation."""
    torch.manual_seed(1)
    return row_step(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        by=lambda p, x: p[1](torch.tanh(p[0](x) * table(4))) + table(4),
    )


@pytest.mark.parametrize("name", KEEPERS)
def test_tables_that_code_keeps_are_as_in_eager(keepers, name):
    """Compiled first, eager after it, and compiled after that: all have the same bits.

    A failed capture leaves no table either.
    """
    table = getattr(keepers, name)
    model, loss_fn, inputs = step_with(table)
    step = compile_keep_all(model, loss_fn, inputs)
    alone = model(inputs[0])
    assert torch.equal(table(4), torch.tensor([1.0, 2, 3, 4]) + (name == "store_in_tuple"))
    assert find_differences(step, model, loss_fn, inputs) == []
    assert torch.equal(model(inputs[0]), alone)
    again = compile_keep_all(model, loss_fn, inputs)
    assert find_differences(again, model, loss_fn, inputs) == []
    assert find_differences(step, model, loss_fn, inputs) == []
    own = row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x) * table(4) * float(p[0](x).sum()))
    with pytest.raises(pmt.CaptureError, match="reads a tensor's value"):
        pmt.capture(*own)
    own[0](own[2][0]).sum().backward()
    assert float(table(4)[0]) in (1, 2)


def test_what_code_keeps_is_as_in_eager(keepers):
    """A name is as after a pass of eager mode; a constant is the tensor that the code holds."""
    kept = [None]

    def forward(parts, x):
        keepers.NAME = kept[0] = parts[0](x)
        return keepers.NAME

    own = row_step(nn.Linear(4, 4), by=forward)
    keepers.NAME = torch.ones(3)
    step = compile_keep_all(*own)
    assert find_differences(step, *own) == []
    assert torch.equal(keepers.NAME, own[0].parts[0](own[2][0]))
    assert torch.equal(keepers.NAME, kept[0])
    keepers.TABLES[4] = torch.ones(4)
    own = step_with(keepers.store_in_dictionary)
    step = compile_keep_all(*own)
    keepers.TABLES[4].mul_(3)
    assert find_differences(step, *own) == []


TABLES = {}
NAME = None


# -- constants -----------------------------------------------------------------------------------
def test_another_tensor_in_the_place_of_a_constant_is_noticed():
    """A step that would go on with the old tensor is refused, or compiled again."""
    own = row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x) * (p[0].scale + NAME))
    own[0].parts[0].scale = torch.ones(4)
    globals()["NAME"] = torch.ones(4)
    step = compile_keep_all(*own)
    again = compile_keep_all(*own, dynamic="retrace")
    assert find_differences(step, *own) == []
    for holder, key in ((vars(own[0].parts[0]), "scale"), (globals(), "NAME")):
        before = holder[key]
        holder[key] = torch.full((4,), 2.0)
        with pytest.raises(pmt.CaptureError, match=rf"\.{key} is another tensor, or missing"):
            step(*own[2])
        assert find_differences(again, *own) == []
        holder[key] = before
        assert find_differences(step, *own) == []


def written(parts, x):
    """Count in a tensor of the file."""
    TABLES["count"].add_(1)
    return parts[0](x) * TABLES["count"]


def written_from_inputs(parts, x):
    """Keep a mean in a tensor of the file."""
    TABLES["count"].copy_(x.mean())
    return parts[0](x) * TABLES["count"]


@pytest.mark.parametrize("forward", [written, written_from_inputs])
def test_constants_that_change_in_the_step_are_refused(forward):
    """The error names the line and a remedy; the tensor is unchanged."""
    TABLES["count"] = torch.zeros(4)
    with pytest.raises(pmt.CaptureError, match=r"is changed at .*test_state.*register_buffer"):
        pmt.capture(*row_step(nn.Linear(4, 4), by=forward))
    assert TABLES["count"].tolist() == [0, 0, 0, 0]


def test_trained_tensors_outside_of_the_model_are_refused():
    """One that is no parameter would get no gradient; one that is read is a constant."""
    TABLES["scale"] = torch.ones(4, requires_grad=True)
    with pytest.raises(pmt.CaptureError, match=r"requires a gradient is used at .*register_buffer"):
        pmt.capture(*row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x) * TABLES["scale"]))

    def read(parts, x):
        with torch.no_grad():
            teacher = x * TABLES["scale"]
        return parts[0](x) + teacher

    own = row_step(nn.Linear(4, 4), by=read)
    assert find_differences(compile_keep_all(*own), *own) == []
