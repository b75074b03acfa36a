"""Steps that TorchDynamo captures: bits, side effects, changed state."""

import copy
import os
import sys
import threading
import types
from collections import OrderedDict
from decimal import Decimal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poetmodel.torch as pmt
from kit.eager_steps import compile_keep_all, find_differences
from kit.rotation import mark_seeds_except

CHECKED = {
    "branch after dropout": lambda _, y, __: (
        y if torch.isfinite(dropped := nn.functional.dropout(y, 0.5)).all() else dropped * 0
    ),
    "distribution": lambda _, y, __: torch.distributions.Normal(
        y, 1 + y.square(), validate_args=True
    ).log_prob(torch.zeros(4)),
    "lazy property": lambda _, y, __: (
        -torch.distributions.Bernoulli(logits=y, validate_args=True).log_prob(torch.ones(4))
    ),
    "check of an argument": lambda _, y, __: (
        -torch.distributions.MultivariateNormal(
            y.mean(0), torch.eye(4) * (1 + y.square().mean()), validate_args=True
        ).log_prob(torch.ones(4))
    ),
    "factors of a matrix": lambda _, y, __: torch.linalg.cholesky(
        torch.eye(4) * (1 + y.square().mean())
    ),
    "assertion": lambda _, y, __: torch._assert_async((y.abs() < 100).all()) or y,
}


class Last(nn.Module):
    """A layer of a class of its own."""

    def forward(self, y):
        """Return twice the input."""
        return y * 2


class Model(nn.Module):
    """Layers, and a function of module, result and input."""

    def __init__(self, function=lambda _model, y, _x: y, *, width=0):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        wide = (nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)) if width else ()
        self.wide = nn.Sequential(*wide)
        self.last = Last()
        self.ordered, self.pair = OrderedDict(a=1.0, b=2.0), ([1.0],)
        self.register_buffer("mean", torch.zeros(4))
        self.function, self.scale, self.n, self.table = function, 1.0, 0, {}

    def forward(self, x):
        """Return a loss."""
        return self.function(self, self.norm(self.wide(self.layer(x))), x).square().mean()


def rows():
    """Return a batch."""
    torch.manual_seed(2)
    return (torch.randn(6, 4),)


def assigned(model, y, _):
    """Assign a buffer."""
    model.mean = model.mean * 0.5 + y.detach().mean(0)
    return y - model.mean


def in_checkpoint(model, y, x):
    """Normalize inside of a checkpoint."""
    return y + checkpoint(lambda v: model.norm(model.layer(v)), x, use_reentrant=False)


def masked(_, y, x):
    """Select rows by a mask, and branch by the value of an input."""
    y = y[x.sum(1) > -2]
    return y * 2 if (x > -9).all() else y


def masked_columns(_, y, x):
    """Select rows by a mask, and columns by another one or a range; read a number of ones."""
    rows = x.sum(1) > -2
    y = y[rows, 1:3].sum(1, keepdim=True) + y[rows][:, torch.arange(4) > 1]
    return y * torch.ones_like(y).sum().item()


def labelled(_, y, x):
    """Multiply by a table whose width is the largest label, in each row."""
    labels = (x[:, 0] > 0).long() + 2
    return y * nn.functional.one_hot(labels)[:, :1] + y


def transcribed(_, y, x):
    """Return the loss of a transcription, whose lengths are those of inputs."""
    lengths = (x[:2, 0] > 9).long() + 2
    logits = torch.stack([y, y]).transpose(0, 1).log_softmax(-1)
    labels = torch.ones(2, 3, dtype=torch.long)
    return nn.functional.ctc_loss(logits, labels, torch.tensor([6, 6]), lengths)


def written(_, y, x):
    """Read a number that was written through a view of another tensor."""
    table = torch.zeros(3)
    row = table[0]
    row.copy_(x[0, 0])
    return y * table.sum().item()


STEPS = {
    "one_hot": labelled,
    "ctc": transcribed,
    "plain": lambda _model, y, _x: y,
    "dropout": lambda _model, y, _x: nn.functional.dropout(y, 0.5),
    "buffer": assigned,
    "checkpoint": in_checkpoint,
    "readings": masked,
    "written": written,
    "masks beside others": masked_columns,
    "inverse": lambda _model, y, _x: torch.linalg.inv(y.T @ y + torch.eye(4)),
    "autocast": lambda m, y, x: m.layer(x).float() + y,
}


FEW_STEPS = ("one_hot", "masks beside others")
"""Those of which no other quick test has the kind."""


@pytest.mark.parametrize("name", mark_seeds_except(STEPS, FEW_STEPS))
def test_bits_are_those_of_eager(name):
    """Loss, gradients and buffers, over three steps."""
    model = Model(STEPS[name])
    step = compile_keep_all(model, None, rows())
    for _ in range(3):
        assert find_differences(step, model, None, rows()) == []


@pytest.mark.slow
def test_updates_and_state_on_storage(tmp_path):
    """Parameters and moments follow eager's."""
    model = Model(width=64)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    eager = torch.optim.Adam(twin.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "storage": tmp_path, "cache": False}
    with pmt.compile(model, None, rows(), ram="95%", **options) as step:
        for _ in range(3):
            loss = twin(*rows())
            assert torch.equal(step(*rows()), loss.detach())
            loss.backward()
            eager.step()
            eager.zero_grad()
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_stored_tensors_are_those_of_the_step():
    """An attribute, and a dict, get the tensors that eager mode would store, detached."""

    def store(model, y, x):
        model.kept = y
        model.table["x"] = x * 2
        return y

    model = Model(store)
    step = compile_keep_all(model, None, rows())
    assert not hasattr(model, "kept")
    step(*rows())
    twin = Model(store)
    twin(*rows())
    assert torch.equal(model.kept, twin.kept)
    assert torch.equal(model.table["x"], twin.table["x"])
    assert not model.kept.requires_grad


def count(model, y, _):
    """Count in an attribute."""
    model.n += 1
    return y * model.n


def test_state_that_forward_changes_is_followed():
    """A counter is captured again in each step; `test_python_guards` has the refusal."""
    model = Model(count)
    step = compile_keep_all(model, None, rows(), dynamic="retrace")
    twin = Model(count)
    for _ in range(2):
        assert torch.equal(step(*rows()), twin(*rows()).detach())
    assert model.n == twin.n


OWN_GENERATOR = torch.Generator()
PRICE = Decimal("1.5")
REFUSED = (
    (lambda _, y, __: y + torch.randn(4, generator=OWN_GENERATOR),
     r"takes a Generator, .* at .*test_dynamo_steps\.py:\d+ .*; leave it out"),
    (lambda m, y, x: checkpoint(lambda v: count(m, v, x), y, use_reentrant=False),
     r"inside of a checkpoint, .* at .*test_dynamo_steps\.py:\d+ .*; leave the checkpoint out"),
    (lambda _, y, __: y * float(PRICE),
     r"reads a Python object \(such as a Decimal\).* at .*test_dynamo_steps\.py:\d+ .*; keep it"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("function", "words"), mark_seeds_except(REFUSED, REFUSED[1:], REFUSED[:1])
)
def test_what_no_capture_can_repeat_is_refused_with_advice(function, words):
    """The error names reason, line and remedy."""
    with pytest.raises(pmt.CaptureError, match=words):
        compile_keep_all(Model(function), None, rows())


@pytest.mark.slow
def test_state_that_settles_is_followed():
    """A table that the first step makes is there for the others."""

    def tabulate(model, y, _):
        if "t" not in model.table:
            model.table["t"] = torch.arange(4.0)
        return y * model.table["t"]

    model = Model(tabulate)
    step = compile_keep_all(model, None, rows(), dynamic="retrace")
    twin = Model(tabulate)
    for _ in range(3):
        assert torch.equal(step(*rows()), twin(*rows()).detach())


SCHEDULE = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], 1), 1)


def advance(_):
    """Change the learning rate of a schedule."""
    SCHEDULE.optimizer.step()
    SCHEDULE.step()


CHANGES = (
    (lambda m, y, _: y * m.scale, lambda m: setattr(m, "scale", 3.0), r"scale was 1\.0 and is 3"),
    (lambda _, y, __: y * float(os.environ.get("POETMODEL_TRY", "1")),
     lambda _: os.environ.update(POETMODEL_TRY="3"), "POETMODEL_TRY was None and is 3"),
    (lambda _, y, __: y * SCHEDULE.get_last_lr()[0], advance, r"_last_lr\[0\] was .* read at"),
    (lambda _, y, x: y if x[0, 0] > -9 else -y, lambda m: m.eval(), "training mode"),
    (lambda m, y, _: m.last(y), lambda m: setattr(type(m.last), "forward", lambda _, v: v * 3),
     "forward of the class Last was replaced"),
    (lambda m, y, _: y * next(iter(m.ordered.values())), lambda m: m.ordered.move_to_end("a"),
     r"the order of ordered was \['a', 'b'\] and is \['b', 'a'\]"),
    (lambda m, y, _: y * m.pair[0][0], lambda m: m.pair[0].__setitem__(0, 3.0),
     r"pair\[0\] was \[1\.0\] and is \[3\.0\]"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("function", "change", "words"),  # quick of numbers and modes: test_python_guards.py and others
    mark_seeds_except(CHANGES, CHANGES[5:6], (CHANGES[0], CHANGES[3])),
)
def test_changes_are_told_or_followed(function, change, words, monkeypatch):
    """With both values; a step that follows computes what eager mode does."""
    monkeypatch.delenv("POETMODEL_TRY", raising=False)
    monkeypatch.setattr(Last, "forward", Last.forward)  # put back at the end
    model = Model(function)
    step = compile_keep_all(model, None, rows())
    following_model = Model(function)
    following_step = compile_keep_all(following_model, None, rows(), dynamic="retrace")
    change(model)
    change(following_model)
    with pytest.raises(pmt.CaptureError, match=words):
        step(*rows())
    assert model.layer.weight.grad is None
    assert find_differences(following_step, following_model, None, rows()) == []


SLOW_CHECKED = ("distribution", "check of an argument", "factors of a matrix")  # of quick kinds


@pytest.mark.parametrize("name", mark_seeds_except(CHECKED, {*CHECKED} - {*SLOW_CHECKED}, CHECKED))
def test_checks_of_numbers_are_made_at_the_end(name):
    """As eager mode, a step refuses numbers that a library refuses; nothing has changed."""
    model = Model(CHECKED[name])
    step = compile_keep_all(model, None, rows())
    assert find_differences(step, model, None, rows()) == []
    before = model.layer.weight.grad.clone()
    (x,) = rows()
    with pytest.raises(pmt.CaptureError, match=r"finite or in range.*nothing has changed"):
        step(x * float("nan"))
    assert torch.equal(model.layer.weight.grad, before)


class Frozen(nn.Linear):
    """A layer that is in evaluation mode whatever it is told."""

    training = property(lambda _: False, lambda *_: None)


def test_a_mode_may_be_a_property():
    """A class may compute what `train` sets in others."""
    model = Model(lambda m, y, _: m.frozen(y))
    model.frozen = Frozen(4, 4)
    step = compile_keep_all(model, None, rows())
    assert find_differences(step, model, None, rows()) == []


def test_tensors_outside_of_modules_are_those_of_the_step():
    """Another tensor in a list that forward reads is used from then on, in both passes."""
    model = Model(lambda m, y, _: y * m.tensors[0])
    model.tensors = [torch.ones(4)]
    step = compile_keep_all(model, None, rows())
    assert find_differences(step, model, None, rows()) == []
    model.tensors[0] = torch.full((4,), 3.0)
    assert find_differences(step, model, None, rows()) == []
    model.tensors[0].mul_(2)
    assert find_differences(step, model, None, rows()) == []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_keep_all(model, None, rows(), optimizer=optimizer)
    optimizer.zero_grad()
    step(*rows())
    model.tensors[0] = torch.ones(4)
    with pytest.raises(pmt.CaptureError, match=r"a tensor outside of the model, .* is another"):
        step(*rows())


@pytest.mark.slow
def test_what_is_written_through_a_view_is_read_again():
    """Another input has another number, which is no constant of the step."""
    (x,) = rows()
    step = compile_keep_all(Model(written), None, (x,))
    with pytest.raises(pmt.CaptureError, match=r"table\.sum\(\)\.item\(\)\) was .* and is "):
        step(x * 2)


def test_a_file_may_replace_one_of_its_name(monkeypatch):
    """As a file that is imported again: names are those of the newer one."""
    for factor in (1.0, 3.0):
        file = types.ModuleType("poetmodel_try_file")
        monkeypatch.setitem(sys.modules, file.__name__, file)
        file.FACTOR = factor
        exec("def scale(_, y, __): return y * FACTOR", vars(file))  # noqa: S102 - as a file
        model = Model(file.scale)
        assert find_differences(compile_keep_all(model, None, rows()), model, None, rows()) == []


def test_a_name_of_what_exec_made_is_that_of_its_own_scope():
    """Also where a module has the scope's name, as for documents that are executed."""
    scope = {"__name__": "__main__", "FACTOR": 2.0}
    exec("def scale(_, y, __): return y * FACTOR", scope)  # noqa: S102 - as a document
    model = Model(scope["scale"])
    step = compile_keep_all(model, None, rows())
    assert find_differences(step, model, None, rows()) == []
    scope["FACTOR"] = 3.0
    with pytest.raises(pmt.CaptureError, match=r"FACTOR.* was 2\.0 and is 3\.0"):
        step(*rows())


def hooked(model, y, _):
    """Register a hook in the first pass."""
    if not model.n:
        model.n = 1
        model.last.register_forward_hook(lambda _, __, output: output * 2)
    return model.last(y)


LOCK = threading.Lock()


def recorded(model, y, _):
    """Take what a hook has recorded, which the first pass registers under a lock."""
    if not hasattr(model, "is_ready"):
        with LOCK:
            model.last.register_forward_hook(lambda m, _, output: setattr(m, "output", output))
            model.is_ready = True
    model.last(y)
    output, model.last.output = model.last.output, None
    return output


@pytest.mark.parametrize("function", [pytest.param(hooked, marks=pytest.mark.slow), recorded])
def test_a_hook_that_the_first_pass_registers_is_refused(function):
    """The remedy is named, and helps; the model is as it was."""
    model = Model(function)
    with pytest.raises(pmt.CaptureError, match=r"steps\.py:\d+ .*call the model once, and comp"):
        compile_keep_all(model, None, rows())
    assert model.n == 0
    assert not model.last._forward_hooks
    model(*rows())
    assert find_differences(compile_keep_all(model, None, rows()), model, None, rows()) == []


def test_hooks_of_all_modules_that_a_pass_leaves_are_removed():
    """A capture that fails leaves none behind."""
    hooks = nn.modules.module._global_forward_hooks
    model = Model(lambda *_: nn.modules.module.register_module_forward_hook(lambda *_: None))
    with pytest.raises(pmt.CaptureError):
        compile_keep_all(model, None, rows())
    assert not hooks


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_are_refused(kind):
    """The module is named, and a remedy."""
    model = Model()
    getattr(model.last, kind)(lambda *_: None)
    with pytest.raises(pmt.CaptureError, match=r"last has a backward hook.*output\.register_hook"):
        compile_keep_all(model, None, rows())


def with_gradient(model, y, x):
    """Multiply by a tensor of the forward pass that gets a gradient of its own."""
    model.leaf = leaf = x.square()
    leaf.requires_grad = True
    model.leaf = None if model.scale == 1 else leaf
    return y * leaf


def test_requires_grad_may_be_set_of_tensors_that_are_not_kept():
    """As speech models do; nobody reads the gradient. One that forward stores is refused."""
    model = Model(with_gradient)
    assert find_differences(compile_keep_all(model, None, rows()), model, None, rows()) == []
    model = Model(with_gradient)
    model.scale = 2.0
    with pytest.raises(
        pmt.CaptureError, match=r"stores a tensor, made at .*x\.square\(\).*gradient"
    ):
        compile_keep_all(model, None, rows())
    model = Model(lambda _, y, x: setattr(x, "requires_grad", True) or y)
    with pytest.raises(pmt.CaptureError, match=r"sets requires_grad .*set it before the step"):
        compile_keep_all(model, None, rows())


def test_a_reset_of_the_compiler_is_named():
    """It discards TorchDynamo's captures."""
    model = nn.Linear(4, 4)
    own = model, nn.functional.mse_loss, (torch.randn(2, 4), torch.randn(2, 4))
    step = compile_keep_all(*own)
    torch.compiler.reset()
    with pytest.raises(pmt.CaptureError, match=r"reset\(\) has discarded the captures.*compile"):
        step(*own[2])
