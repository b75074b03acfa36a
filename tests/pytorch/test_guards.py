"""Guards: no step runs that would omit a computation, and all changes are detected."""

import copy
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch

import poetmodel.torch as pmt
from kit.eager_steps import (
    compile_keep_all,
    copy_outcome,
    find_differences,
    find_unequal,
    run_eager_step,
)
from kit.rotation import mark_seeds_except
from kit.traced_models import row_step
from poetmodel.torch.capturing.guards import Guards

nn = torch.nn


def layers(**options):
    """Return a step through four kinds of layers, compiled to keep everything."""
    torch.manual_seed(1)
    own = row_step(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    return own, compile_keep_all(*own, **options)


@pytest.fixture(scope="module")
def kept():
    """Return the results of `layers`; tests leave both unchanged."""
    return layers()


@pytest.fixture(scope="module")
def retracing():
    """Return the results of `layers` with ``dynamic="retrace"``; tests leave both unchanged."""
    return layers(dynamic="retrace")


@contextmanager
def restored(model):
    """Put back the attributes of all modules at the end, and where parameters are changed."""
    modules = [(m, {k: copy.copy(v) for k, v in vars(m).items()}) for m in model.modules()]
    dicts = [{k: v for k, v in vars(m).items() if isinstance(v, dict)} for m, _ in modules]
    parameters = [(p, p.data, p.requires_grad) for p in model.parameters()]
    yield
    for (module, values), own in zip(modules, dicts, strict=True):
        vars(module).clear()
        vars(module).update(values | own)
        for name, items in own.items():
            items.clear()
            items.update(values[name])
    for parameter, data, requires_grad in parameters:
        parameter.data = data
        parameter.requires_grad_(requires_grad)


def tied(**options):
    """Return a step of two layers with one weight."""
    torch.manual_seed(1)
    own = row_step(nn.Linear(4, 4), nn.Linear(4, 4))
    own[0][1].weight = own[0][0].weight
    return own, compile_keep_all(*own, **options)


# -- memory in several places -------------------------------------------------------------------
class Averaged(nn.Linear):
    """Changes its input, or stores an average of its results."""

    def __init__(self, *, changes):
        super().__init__(4, 4)
        self.changes = changes
        self.register_buffer("mean", torch.ones(4, 4))

    def forward(self, x, y):
        """Return a number."""
        if self.changes:
            x.mul_(2)
        z = super().forward(x)
        if not self.changes:
            self.mean.add_(z.detach())
        return (z * y).sum()


@pytest.mark.parametrize("changes", [True, False], ids=["input", "buffer"])
def test_memory_that_a_step_changes_is_no_input_unnoticed(changes):
    """Eager reads the new value where it lies, a step compiled for others the old one.

    So it is of a tensor itself, and of a view of it.
    """
    model = Averaged(changes=changes)
    step = compile_keep_all(model, None, (torch.randn(4, 4), torch.randn(4, 4)))
    x = torch.randn(4, 4)
    changed = x if changes else model.mean
    before = changed.clone()
    for same in (changed, changed.view(4, 4)):
        with pytest.raises(
            pmt.CaptureError, match=r"inputs\[1\] shares memory with .*, which the step"
        ):
            step(x, same)
        assert torch.equal(changed, before)
    whole = torch.randn(8, 4)
    step(whole[:4], whole[4:])  # two parts of one memory
    if changes:  # compiled for if asked, and noticed where it is in common no more
        step = compile_keep_all(
            model, None, (torch.randn(4, 4), torch.randn(4, 4)), dynamic="retrace"
        )
        for same in (True, False):
            x = torch.randn(4, 4)
            own, eager = ((t, t if same else torch.ones(4, 4)) for t in (x.clone(), x.clone()))
            expected = copy.deepcopy(model)(*eager)
            assert torch.equal(step(*own), expected)
            assert torch.equal(own[0], eager[0])


class Counted(nn.Linear):
    """Adds 1 to two buffers."""

    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("first", torch.zeros(4))
        self.register_buffer("second", torch.ones(4))

    def forward(self, x):
        """Return a number."""
        loss = super().forward(x.clone()).sum()
        self.first.add_(1)
        self.second.add_(1)
        return loss


def test_the_tensor_that_an_input_overlaps_now_is_named():
    """Another tensor that it overlapped at compilation is not; it is if there is no overlap now."""
    model = Counted()
    step = compile_keep_all(model, None, (model.first,))
    with pytest.raises(pmt.CaptureError, match=r"inputs\[0\] shares memory with second, which"):
        step(model.second)
    with pytest.raises(pmt.CaptureError, match=r"inputs\[0\] shares no memory with first, which"):
        step(torch.zeros(4))


# -- weights in several places -----------------------------------------------------------------
def test_untied_weights_are_noticed():
    """A shared weight that became two is named; with retrace, each has eager's gradient.

    So is a tensor that is passed twice and requires a gradient, and then two of them.
    """
    (model, _, inputs), step = tied()
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    with pytest.raises(pmt.CaptureError, match=r"1\.weight was the same tensor as 0\.weight and"):
        step(*inputs)
    assert model[0].weight.grad is None
    own, step = tied(dynamic="retrace")
    assert find_differences(step, *own) == []
    first = step.compiled
    own[0][1].weight = nn.Parameter(own[0][1].weight.detach().clone())
    own[0].zero_grad()
    assert find_differences(step, *own) == []
    assert step.compiled is not first
    model, loss_fn, (x, _) = row_step(nn.Linear(4, 4))
    x.requires_grad_()
    step = compile_keep_all(model, loss_fn, (x, x))
    assert find_differences(step, model, loss_fn, (x, x)) == []
    other = x.detach().clone().requires_grad_()
    with pytest.raises(pmt.CaptureError, match=r"inputs\[1\] was the same object as inputs\[0\]"):
        step(x, other)


# -- hooks -------------------------------------------------------------------------------------
def nothing(*_):
    """Do nothing."""


def scale(tensor):
    """Let a tensor's gradient be ten times as large."""
    tensor.register_hook(lambda gradient: gradient * 10)


def clamp(tensor):
    """Clamp a tensor's gradient in place, once it is in ``.grad``."""

    def change(tensor):
        tensor.grad.clamp_(-0.01, 0.01)

    tensor.register_post_accumulate_grad_hook(change)


def train(tensor):
    """Scale a tensor's gradient, update the tensor, and remove the gradient."""

    def update(tensor):
        with torch.no_grad():
            tensor.sub_(0.1 * tensor.grad)
        tensor.grad = None

    scale(tensor)
    tensor.register_post_accumulate_grad_hook(update)


@pytest.mark.parametrize(
    "register",
    [pytest.param(scale, marks=pytest.mark.slow), clamp, train],  # `train` scales, too
)
def test_hooks_of_gradients_are_called(register):
    """As in eager mode, of a weight used twice and of an input, while gradients add up.

    A step that recomputes reads the weight again after its gradient exists. A hook may come later.
    """

    def make():
        torch.manual_seed(1)
        own = row_step(nn.Linear(4, 4), nn.ReLU(), by=lambda p, x: p[0](p[1](p[0](p[1](p[0](x))))))
        own[2][0].requires_grad_()
        return own

    (model, loss_fn, inputs), twin = make(), make()
    register(model.parts[0].weight)
    step = compile_keep_all(model, loss_fn, inputs, ram="85%")
    assert model.parts[0].weight.grad is None
    register(twin[0].parts[0].weight)
    for n_steps in range(3):
        if n_steps == 1:
            register(inputs[0])
            register(twin[2][0])
        expected = copy_outcome(twin[0], run_eager_step(*twin))
        assert find_unequal(expected, copy_outcome(model, step(*inputs))) == []
        gradients = [own[0].grad for own in (inputs, twin[2])]
        assert gradients[0] is gradients[1] is None or torch.equal(*gradients)
    assert step.verify().equal
    assert find_unequal(copy_outcome(twin[0], inputs[1]), copy_outcome(model, inputs[1])) == []


def test_gradients_with_hooks_wait_for_the_end():
    """`verify` states their bytes, which existing gradients need in addition."""
    own = row_step(nn.Linear(4, 4))
    step = compile_keep_all(*own)
    assert step.verify().second_gradients_bytes == 0
    scale(own[0][0].weight)
    assert step.verify().second_gradients_bytes == own[0][0].weight.nbytes


@pytest.mark.parametrize("register", [scale, clamp])
def test_hooks_of_gradients_are_refused_where_nothing_calls_them(register):
    """By a step with updates, also later, and by a graph that is executed elsewhere."""
    own = row_step(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(own[0].parameters(), lr=0.1)
    step = compile_keep_all(*own, optimizer=optimizer)
    register(own[0][0].weight)
    with pytest.raises(pmt.CaptureError, match=r"0\.weight: .*hooks of parameters.*optimizer"):
        step(*own[2])
    with pytest.raises(pmt.CaptureError, match=r"0\.weight: .*hooks of parameters.*optimizer"):
        compile_keep_all(*own, optimizer=optimizer)
    with pytest.raises(pmt.CaptureError, match=r"0\.weight has a hook of its gradient"):
        pmt.trace(*own)
    model, loss_fn, (x, y) = row_step(nn.Linear(4, 4))
    register(x.requires_grad_())
    with pytest.raises(pmt.CaptureError, match=r"inputs\[0\] has a hook of its gradient"):
        pmt.trace(model, loss_fn, (x, y))


@pytest.mark.parametrize(
    "kind",
    [
        "forward_hook", "forward_pre_hook", "full_backward_hook",
        "full_backward_pre_hook",
    ],
)  # fmt: skip
def test_hooks_of_modules_that_come_later_are_noticed(kind, kept):
    """The module is named; after the hook is removed, the step runs."""
    own, step = kept
    handle = getattr(own[0][1], f"register_{kind}")(nothing)
    with pytest.raises(pmt.CaptureError, match="hooks of 1 were added or removed"):
        step(*own[2])
    handle.remove()
    assert find_differences(step, *own) == []


# -- modules -----------------------------------------------------------------------------------
CHANGES = {
    "replaced": (
        lambda m: setattr(m, "2", nn.Identity()),
        "2: replaced by another module, or removed",
    ),
    "without parameters": (
        lambda m: setattr(m, "3", nn.Identity()),
        "3: replaced by another module",
    ),
    "one more": (lambda m: m.append(nn.ReLU()), "modules were added to the model"),
    "gone": (lambda m: delattr(m[3], "bias"), "a parameter or a buffer is missing"),
    "no bias": (lambda m: setattr(m[3], "bias", None), r"3\.bias was .* and is None"),
    "no mean": (
        lambda m: [setattr(m[1], f"running_{name}", None) for name in ("mean", "var")],
        r"1\.running_mean was .* and is None",
    ),
    "a rate": (lambda m: setattr(m[2], "p", 0.9), r"2\.p was 0\.5 and is 0\.9"),
    "tied": (lambda m: setattr(m[3], "weight", m[0].weight), r"3\.weight was not .* 0\.weight"),
    "frozen": (
        lambda m: m[0].weight.requires_grad_(requires_grad=False),
        r"0\.weight was .*, requiring a gradient and is",
    ),
    # A number that only the program holds.
    "a number": (lambda m: setattr(m[1], "eps", 1.0), r"1\.eps was 1e-05 and is 1\.0"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_of_modules_are_noticed(kind, kept):
    """A step and `verify` name the change."""
    change, words = CHANGES[kind]
    own, step = kept
    with restored(own[0]):
        change(own[0])
        for work in (lambda: step(*own[2]), step.verify):
            with pytest.raises(pmt.CaptureError, match=words):
                work()
    assert find_differences(step, *own) == []


@pytest.mark.parametrize(
    "kind",
    mark_seeds_except(
        [kind for kind in CHANGES if kind != "gone"], ("replaced", "tied"), ("one more",)
    ),
)
def test_changes_of_modules_are_compiled_for(kind, retracing):
    """With retrace, a new step equals eager."""
    change, _ = CHANGES[kind]
    own, step = retracing
    with restored(own[0]):
        change(own[0])
        own[0].epoch = 2  # what users keep in modules is theirs
        assert find_differences(step, *own) == []


# -- inputs ------------------------------------------------------------------------------------
def test_an_input_that_others_wait_for_is_refused(kept):
    """The computation of an input would silently not be trained."""
    encoder = nn.Linear(4, 4)
    (model, loss_fn, (x, y)), step = kept
    words = r"inputs\[0\] requires a gradient and was computed from other tensors.*detach\(\)"
    for work in (
        lambda: step(encoder(x), y),
        lambda: compile_keep_all(model, loss_fn, (encoder(x), y)),
    ):
        with pytest.raises(pmt.CaptureError, match=words):
            work()
    step(encoder(x).detach(), y)


def test_numbers_are_those_that_were_compiled_for():
    """NaN is equal to itself; a number of another type is another one."""
    others = {3: 4, 2: 2.0, 1: True, 0.0: -0.0, float("nan"): 1.0}
    model, loss_fn, (x, y) = row_step(
        nn.Linear(4, 4), by=lambda p, x, *numbers: p[0](x) * numbers[0] * sum(numbers)
    )
    step = compile_keep_all(model, loss_fn, (x, *others, y))
    step(x, *(type(number)(str(number)) for number in others), y)
    for place, (number, other) in enumerate(others.items()):
        changed = [*others]
        changed[place] = other
        words = rf"inputs\[{place + 1}\] was {number!r} and is {other!r}"
        with pytest.raises(pmt.CaptureError, match=words):
            step(x, *changed, y)


# -- modules and tensors
@pytest.fixture(scope="module")
def guarded():
    """Return a model of four kinds of layers, its guards, and flat inputs; tests restore it."""
    torch.manual_seed(1)
    model, loss_fn, inputs = row_step(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4))
    )
    joint = pmt.capture(model, loss_fn, inputs)
    return model, Guards(joint), joint.flat_inputs(inputs)


def swap_names(model):
    """Let the two layers of one kind change places."""
    model[0], model[3][0] = model[3][0], model[0]


GUARDED = (
    lambda model: setattr(model[0].weight, "data", model[0].weight.data.double()),
    lambda model: setattr(model[0].weight, "data", model[0].weight.data.t()),
    lambda model: setattr(model[3][0], "weight", model[0].weight),
    swap_names,
    lambda model: model.eval(),
    lambda model: model[2].eval(),
    lambda model: model[0].weight.requires_grad_(requires_grad=False),
    lambda model: model[2].register_forward_hook(lambda *_: None),
    lambda model: model[2].register_full_backward_pre_hook(lambda *_: None),
    lambda model: setattr(model[2], "p", 0.25),
    lambda model: delattr(model[2], "p"),
    lambda model: model[2].add_module("more", nn.ReLU()),
    lambda model: model[3].__delitem__(0),
    lambda model: delattr(model[0], "bias"),
    lambda model: setattr(model[0], "bias", None),
    lambda model: setattr(model[1], "running_mean", torch.zeros(5)),
)


@pytest.mark.parametrize("change", GUARDED)
def test_no_change_goes_unnoticed(change, guarded):
    """A step is refused, or compiled again, after each change."""
    model, guards, flat = guarded
    assert guards.hold(flat)
    with restored(model):
        change(model)
        with suppress(pmt.CaptureError):
            assert not guards.hold(flat)
    assert guards.hold(flat)


def test_further_guards_of_python_values_are_those_of_the_caller():
    """A text for each value that has changed, in a capture with them."""
    changed = []
    own = row_step(nn.Linear(4, 4))
    joint = replace(pmt.capture(*own), python_guards=lambda: changed)
    guards, flat = Guards(joint), joint.flat_inputs(own[2])
    assert guards.hold(flat)
    changed.append("the season was summer and is autumn")
    assert not guards.hold(flat)
    assert list(guards.differences(flat)) == changed


def test_training_changes_nothing_that_a_step_assumes(guarded):
    """Steps, new gradients, loaded states, new values and equal tensors are no changes."""
    model, guards, flat = guarded
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model[0].weight.data = torch.zeros(4, 4)
    assert guards.hold(flat)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert guards.hold(flat)
