"""Values that a model reads: constants, functions of inputs and buffers, and checks of numbers."""

import random

import pytest
import torch

import poetmodel.torch as pmt
from kit.eager_steps import compile_keep_all, copy_outcome, find_differences, find_unequal
from kit.rotation import mark_seeds_except
from kit.traced_models import FunctionModule, row_step
from poetmodel.torch.lowering.step import lower

nn = torch.nn
functional = nn.functional


class Masked(nn.Module):
    """A layer whose loss is a function of the module, its output and a mask."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))
        self.function = function

    def forward(self, x, mask):
        """Return a loss."""
        return self.function(self, self.layer(x), mask).square().mean()


def whole(_, y, mask):
    """Omit the mask if it is all ones, as transformers do."""
    return y if mask.all() else y * mask[:, None]


def masked(function, **options):
    """Return a model and its step, compiled for two rows of three."""
    torch.manual_seed(1)
    model = Masked(function)
    inputs = (torch.randn(3, 4), torch.tensor([True, True, False]))
    return (model, None, inputs), compile_keep_all(model, None, inputs, **options)


def with_mask(own, *mask):
    """Return a step with another mask."""
    model, loss_fn, (x, _) = own
    return model, loss_fn, (x, torch.tensor(mask, dtype=torch.bool))


def test_values_with_another_answer_are_refused():
    """The error names the line that read, the old and the new value.

    With retracing, each value is compiled once, and both steps are available from then on.
    """
    own, step = masked(whole)
    model, _, inputs = with_mask(own, 1, 1, 1)
    words = r"value that is read at .*guards.py:\d+ \(return y if .* was False and is True"
    for call in (step, step.verify):
        with pytest.raises(pmt.CaptureError, match=words):
            call(*inputs)
    assert model.layer.weight.grad is None
    assert find_differences(step, *own) == []
    own, step = masked(whole, dynamic="retrace")
    first = step.compiled
    assert find_differences(step, *with_mask(own, 1, 1, 1)) == []
    second = step.compiled
    assert second is not first
    assert find_differences(step, *own) == []
    assert step.compiled is first
    assert find_differences(step, *with_mask(own, 1, 1, 1)) == []
    assert step.compiled is second


def test_buffers_that_are_read_are_looked_at(caplog):
    """A buffer that is read may get another value, if the result of the reading is equal.

    A step that will soon be invalid reports this when it is compiled, with the buffer.
    """
    own, step = masked(lambda model, y, _: y * 2 if model.scale > 0 else y)
    model, _, inputs = own
    model.scale.fill_(3)
    assert find_differences(step, *own) == []
    model.scale.fill_(-1)
    for scale in (model.scale, torch.tensor(-1.0)):
        model.scale = scale  # what is there at the step counts
        with pytest.raises(pmt.CaptureError, match=r"model.scale > 0 .* was True and is False"):
            step(*inputs)

    def counted(model, y, _):
        model.scale.add_(1)
        return y / model.scale.item()

    own, step = masked(counted)
    assert "forward reads scale, which each step changes" in caplog.text
    assert find_differences(step, *own) == []
    with pytest.raises(pmt.CaptureError, match=r"model.scale.item\(\)\) was 2.0 and is 3.0"):
        step(*own[2])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda _, y, mask: y[mask], "number that decides a shape at .* was 2 and is 1"),
        pytest.param(  # as in a pass of `READ`
            lambda _, y, mask: y * len(mask.nonzero()),
            "decides a shape at .* was 2 and is 1",
            marks=pytest.mark.slow,
        ),
        (lambda _, y, mask: y * mask.nonzero()[1].clamp(max=1).item(), "cannot be computed now"),
    ],
)
def test_shapes_that_follow_from_values_are_looked_at(function, words):
    """Other rows may be selected, but as many; if the reading fails, the step does not run.

    Several readings of one mask have one guard.
    """

    def often(model, y, mask):
        for _ in range(5):
            y = y + 1 if (mask & torch.tensor([True, True, True])).all() else y * 2
        return function(model, y, mask)

    own, step = masked(often)
    assert (
        len(step.compiled.trace.joint.reads)
        == len(masked(function)[1].compiled.trace.joint.reads) + 1
    )
    assert find_differences(step, *with_mask(own, 0, 1, 1)) == []
    with pytest.raises(pmt.CaptureError, match=words):
        step(*with_mask(own, 0, 1, 0)[2])


# -- readings drawn at random ------------------------------------------------------------------
STEPS = (
    lambda m: m.flip(0),
    lambda m: ~m,
    lambda m: m & torch.tensor([True, False, True]),
    lambda m: m.long().cumsum(0) > 1,
    lambda m: torch.cat((m[1:], m[:1])),
    lambda m: m.float().mul(3).round().bool(),
    lambda m: m[torch.arange(2, -1, -1)],
    lambda m: torch.where(m, m.roll(1), m),
    lambda m: m.clone().index_fill_(0, torch.tensor([1]), 1),
    lambda m: (m[:, None] | m[None]).all(1),
)
"""What makes a mask of three of a mask of three."""
READINGS = (
    lambda y, m: y * 2 if m.all() else y,
    lambda y, m: y * m.sum().item(),
    lambda y, m: y[m] if m.any() else y * 0,
    lambda y, m: y[: int(m.long().argmax()) + 1],
    lambda y, m: y * len(m.nonzero()),
    lambda y, m: y * float(m.float().mean()),
    lambda y, m: y.masked_select(m[:, None]) if m.any() else y,
    lambda y, m: y * (1 + m.tolist().count(True)),
    lambda y, m: y if torch.equal(m, m.flip(0)) else y - 1,
    lambda y, m: y.repeat_interleave(m.long() + 1, 0),
)
"""What a model does with what it reads of a mask."""


@pytest.mark.parametrize("seed", mark_seeds_except(range(100), (), [0, 1]))
def test_random_readings(seed):
    """A model that reads at random is eager's for every mask, compiled for or known."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    steps = [draw.choice(STEPS) for _ in range(draw.randint(0, 3))]
    readings = [draw.choice(READINGS) for _ in range(draw.randint(1, 2))]

    def function(_, y, mask):
        for step in steps:
            mask = step(mask)
        return sum(reading(y, mask).square().sum() for reading in readings)

    own, step = masked(function, dynamic="retrace")
    kinds = [[draw.random() < 0.5 for _ in range(3)] for _ in range(3)]
    for mask in (*kinds, *kinds):
        assert find_differences(step, *with_mask(own, *mask)) == [], mask


# -- what can be read ------------------------------------------------------------------------------
def in_place():
    """Change a constant in place, also through views."""
    table = torch.zeros(3, 3)
    table[0].fill_(3)
    table.view(-1)[4:].mul_(2).add_(1)
    table[1, 1] = 7
    return float(table.sum())


def counted_mask():
    """Count the elements that a mask selects."""
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[:2, :2] = True
    mask[torch.arange(4), torch.arange(4)] = True
    return len(mask.nonzero())


CONSTANTS = {
    "a list": lambda y, _: y[:, torch.arange(3).tolist()].sum(1, keepdim=True),
    "nested list": lambda y, _: y * sum(map(sum, torch.eye(3).tolist())),
    "a sum": lambda y, _: y * torch.arange(4).sum().item(),
    "constant": lambda y, _: y * 2 if torch.ones(3, 3).tril().sum() > 5 else y,
    "rates": lambda y, _: functional.dropout(y, [v.item() for v in torch.linspace(0, 0.3, 3)][1]),
    "element": lambda y, _: y * float(torch.tensor([1.0, 2.0, 3.0])[1]),
    "sections": lambda y, _: torch.cat(y.split(torch.tensor([1, 3]).tolist(), 1)[::-1], 1),
    "in place": lambda y, _: y * in_place(),
    "mask": lambda y, _: y * counted_mask(),
    "masked index": lambda y, _: y[:, torch.arange(4) > 1].sum(1, keepdim=True),
    "form of another": lambda y, _: y * torch.ones_like(y).sum().item(),
    "equal": lambda y, _: y if torch.equal(torch.arange(3), torch.arange(3)) else y * 2,
    "grid": lambda y, _: (
        y
        * torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")).max().item()
    ),
}


def written(x):
    """Put an input into a constant."""
    table = torch.zeros(3)
    row = table[0]
    row.copy_(x[0, 0])
    return table.sum().item()


def distinct(numbers):
    """Return a number that distinct numbers, their counts and their positions decide."""
    values, positions, counts = torch.unique(numbers, return_inverse=True, return_counts=True)
    places = torch.arange(numbers.numel()).view_as(numbers)
    return (values * counts).sum() + (positions * places).sum() + len(numbers.unique())


def trimmed(x):
    """Return as many columns as the longest row has positive numbers."""
    return x[:, : (x > 0).sum(1).max()]


INPUTS = {
    "item": lambda y, x: y * x.sum().item(),
    "branch": lambda y, x: y if x.sum() > 0 else -y,
    "all": lambda y, x: y * 2 if (x < 100).all() else y,
    "literal": lambda y, x: y if torch.equal(x[0] > 0, torch.tensor([True] * 4)) else y * 2,
    "where": lambda y, x: y * torch.where(x > 0, torch.ones(4), torch.zeros(4)).sum().item(),
    "list": lambda y, x: y[:, x.argmax(1).tolist()].sum(1, keepdim=True),
    "written": lambda y, x: y * written(x),
    "added": lambda y, x: y * torch.zeros(3, 4).add_(x).sum().item(),
    "several outputs": lambda y, x: y * x.max(1)[0].sum().item() + x.split(2, 1)[1].sum().item(),
    "not a number": lambda y, x: y if (x.sum() * float("nan")).item() > 0 else y * 2,
    "a view": lambda y, x: y * x.view(-1)[::2].view(2, 3)[1].sum().item(),
    "selected inputs": lambda y, x: y * x[x > 0].sum(),
    "selected results": lambda y, x: y[x > 0].sum() + y,
    "selected rows": lambda y, x: y[x.sum(1) > 0, 1:3].sum() + y,
    "masked_select": lambda y, x: y.masked_select(x > 0).mean() + y,
    "masked_select by a row": lambda y, x: y.masked_select(x[1] > 0).sum() + y,
    "nonzero": lambda y, x: y[(x[:, 0] < 9).nonzero().squeeze(1)],
    "where alone": lambda y, x: y[torch.where(x[:, 0] < 9)[0]],
    "repeated": lambda y, x: y.repeat_interleave((x > 0).sum(1) + 1, 0).sum() + y,
    "trimmed": lambda y, x: trimmed(x).sum() * y,
    "variances": lambda y, x: functional.gaussian_nll_loss(y, y * 0, x.abs()),
    "unique": lambda y, x: y * distinct((x * 2).long()),
    "unique floats": lambda y, x: y * distinct((x * 2).round()) + len((x > 0).unique()),
    "unflatten": lambda y, x: y.unflatten(1, (2, -1)).flatten(1) if x.sum() < 9 else y,
}
"""What reads an input, given the result of a layer and the input."""


def transcribed(parts, x, lengths):
    """Return the loss of a transcription: lengths decide the shape of selected parts."""
    logits = parts[0](x).log_softmax(-1)
    written = torch.arange(12).view(2, 6) % 3 + 1
    labels = written.masked_select(torch.arange(6) < lengths[:, None])
    return functional.ctc_loss(logits, labels, torch.full((2,), 20), lengths, zero_infinity=True)


def test_lengths_may_decide_the_shape_of_a_loss():
    """Lengths of other texts run where the longest is as long, and are refused otherwise."""
    model = FunctionModule(transcribed, nn.Linear(4, 4))
    own = model, None, (torch.randn(20, 2, 4), torch.tensor([5, 3]))
    step = compile_keep_all(*own)
    assert find_differences(step, *own) == []
    assert find_differences(step, model, None, (own[2][0] * 2, torch.tensor([3, 5]))) == []
    with pytest.raises(pmt.CaptureError, match=r"decides .* was 5 and is 4"):
        step(own[2][0], torch.tensor([4, 4]))


READ = (
    "item", "written", "several outputs", "selected inputs", "nonzero", "unique", "unflatten",
    "not a number",
)  # fmt: skip


def test_all_constants_can_be_read():
    """In one step, which records no reading."""
    own = row_step(
        nn.Linear(4, 4),
        by=lambda p, x: sum(read(p[0](x), x).square().mean() for read in CONSTANTS.values()) + x,
    )
    step = compile_keep_all(*own)
    assert not step.compiled.trace.joint.reads
    assert find_differences(step, *own) == []


@pytest.mark.parametrize("kind", mark_seeds_except(CONSTANTS | INPUTS, READ))
def test_constants_and_inputs_can_be_read(kind):
    """The captured step has eager's results, and records its readings of inputs."""
    own = row_step(nn.Linear(4, 4), by=lambda p, x: (CONSTANTS | INPUTS)[kind](p[0](x), x) + x)
    step = compile_keep_all(*own)
    assert bool(step.compiled.trace.joint.reads) == (kind in INPUTS)
    assert find_differences(step, *own) == []


UNREAD = {
    "unique": lambda y, _: y * len(torch.unique(y)),
    "unique rows": lambda y, x: y * len((x > 0).unique(dim=0)),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_what_cannot_be_read_is_refused(kind):
    """The line and a remedy are named."""
    own = row_step(nn.Linear(4, 4), by=lambda p, x: UNREAD[kind](p[0](x), x))
    with pytest.raises(pmt.CaptureError, match=r"at .*guards\.py:\d+ .*; select with torch\.where"):
        compile_keep_all(*own)


DRAWN = {
    "item": lambda _, __: torch.rand(3).sum().item(),
    "in place": lambda _, __: torch.zeros(3).uniform_().sum().item(),
    "list": lambda _, __: torch.randperm(3).tolist()[0],
    "bernoulli": lambda _, __: torch.full((3,), 0.5).bernoulli().sum().item(),
    "branch": lambda _, x: 1 if torch.rand(()) > x[0, 0] else 2,
    "nonzero": lambda _, __: len(torch.rand(5).round().nonzero()),
    "selected inputs": lambda _, x: x[torch.rand(3) > 2].sum(),
    "integer": lambda _, __: int(torch.empty(1).uniform_(0, 3).item()),
    "like": lambda _, x: torch.rand_like(x).sum().item(),
    # Parameters are other ones in the next step, and so is what follows from them.
    "a parameter": lambda p, _: p.weight.sum().item(),
    "with an input": lambda p, x: (p.weight.sum() * x.sum()).item(),
    "a shape": lambda p, x: len(p(x)[p(x) > 0]),
}
OF_PARAMETERS = ("a parameter", "with an input", "a shape")


@pytest.mark.parametrize(
    "kind",
    mark_seeds_except(
        DRAWN, ("item", "nonzero", "a parameter", "a shape"), ("branch", "with an input")
    ),
)
def test_random_numbers_and_parameters_cannot_be_read(kind):
    """They differ in the next step: that is the error."""
    own = row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x) * DRAWN[kind](p[0], x))
    words = r"a random number is read at .*test_value_guards"
    if kind in OF_PARAMETERS:
        words = "depends on parameters|depends on values"
    with pytest.raises(pmt.CaptureError, match=words):
        compile_keep_all(*own)


def test_captures_hold_no_values():
    """The tensors of a captured graph do not keep those that were read alive."""
    joint = pmt.capture(*row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x) * (x * 2).sum().item()))
    nodes = joint.graph_module.graph.nodes
    held = [
        vars(node.meta["val"]) for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    assert held
    assert not any("poetmodel" in key for found in held for key in found)


# -- checks that numbers are finite ----------------------------------------------------------------
def clamped(y):
    """Clamp overflowing values, as detectors of transformers do."""
    if not torch.isfinite(y).all():
        y = torch.clamp(y, min=-1e3, max=1e3)
    return y


def refused(y):
    """Raise where there is something that is no number."""
    if torch.isnan(y).any() or y.isinf().any():
        raise ValueError
    return y


def asserted(y):
    """Assert it."""
    assert not (torch.isnan(y) | torch.isinf(y)).any().item()
    return y


KINDS = {
    "all finite": clamped,
    "any": refused,
    "joined": asserted,
    "each": lambda y: y if torch.isfinite(y.sum()) else y * 0,
    "negated": lambda y: y * 0 if (~torch.isfinite(y)).any() else y,
}


def compiled(kind, **options):
    """Return a step that tests values, and its parts."""
    torch.manual_seed(1)
    layers = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(parts, x):
        return parts[2](parts[1](KINDS[kind](parts[0](x))))

    own = row_step(*layers, by=forward)
    return own, compile_keep_all(*own, **options)


@pytest.mark.parametrize("kind", mark_seeds_except(KINDS, ("all finite", "any"), ("joined",)))
def test_steps_on_finite_numbers_are_those_of_eager(kind):
    """The tests of the model have no effect; their lines are recorded."""
    own, step = compiled(kind)
    assert len(step.compiled.trace.joint.finite_check_lines) >= 1
    assert all(
        "test_value_guards.py" in place for place in step.compiled.trace.joint.finite_check_lines
    )
    assert find_differences(step, *own) == []
    assert step.verify().equal


def test_checks_that_cannot_wait_are_refused():
    """Updates and C cannot wait for a test; further readings are not allowed.

    Tests of inputs alone are evaluated before the step.
    """
    own = row_step(nn.Linear(4, 4), by=lambda p, x: clamped(p[0](x)))
    optimizer = torch.optim.SGD(own[0].parameters(), lr=0.1)
    with pytest.raises(pmt.CaptureError, match="updates do not wait for the result"):
        compile_keep_all(*own, optimizer=optimizer)
    with pytest.raises(pmt.CaptureError, match="which cannot be exported"):
        lower(*own)
    own = row_step(
        nn.Linear(4, 4), by=lambda p, x: clamped(p[0](x)) * (2 if p[0](x).max() > 0 else 1)
    )
    with pytest.raises(pmt.CaptureError, match="reads a tensor's value"):
        compile_keep_all(*own)
    joint = pmt.capture(*row_step(nn.Linear(4, 4), by=lambda p, x: p[0](clamped(x))))
    assert not joint.finite_check_lines
    assert joint.reads


def likely(parts, x):
    """Return the likelihood under a normal distribution, whose arguments are checked."""
    y = parts[0](x)
    # Asked for, since torch.compile turns the default off in its whole process.
    normal = torch.distributions.Normal(y, y.exp(), validate_args=True)
    return y * normal.log_prob(torch.zeros(4))


def spread(parts, x):
    """Return a loss under variances that the model predicts, which cannot be negative."""
    y = parts[0](x)
    return functional.gaussian_nll_loss(y, torch.zeros_like(y), 99 - y.abs()) + y


def inverted(parts, x):
    """Divide by matrices that rows of the input make."""
    return torch.linalg.solve(torch.diag_embed(x * parts[0].weight.sum()), parts[0](x))


def asserts(*words):
    """Return a pass with an assertion whose result is not read: a graph would lose it."""

    def forward(parts, x):
        y = parts[0](x)
        torch._assert_async((y.abs() < 100).all(), *words)
        return y

    return forward


CHECKED = {
    "nan": (None, float("nan"), r"finite .*isfinite\(y\)\.all\(\):\).*nothing has"),
    "infinity": (None, float("inf"), r"finite .*isfinite\(y\)\.all\(\):\).*nothing has"),
    "distribution": (likely, float("nan"), r"test_value_guards\.py.*nothing has changed"),
    "variances": (spread, 1e6, r"in range.*test_value_guards\.py.*nothing has changed"),
    "matrix": (inverted, 0.0, r"test_value_guards\.py.*nothing has changed"),
    "assertion": (asserts(), 1e6, r"in range.* at .*_assert_async"),
    "assertion with words": (asserts("too large"), 1e6, r"in range.* at .*_assert_async"),
}


@pytest.mark.parametrize(
    "case", mark_seeds_except(CHECKED, {"nan", "matrix"}, {"distribution", "assertion with words"})
)
def test_steps_on_other_numbers_are_undone(case):
    """Checks of a model or a library are evaluated after the step, which raises as eager does.

    Present gradients, buffers and the random generator are as before.
    """
    forward, number, words = CHECKED[case]
    own, step = compiled("all finite")
    if forward is not None:
        own = row_step(nn.Linear(4, 4), by=forward)
        step = compile_keep_all(*own)
        assert find_differences(step, *own) == []
    model, loss_fn, (x, y) = own
    before = copy_outcome(model, step(x, y))
    spoilt = x.clone()
    spoilt[0, 0] = number
    if forward is not None:
        with pytest.raises((ValueError, RuntimeError)):
            loss_fn(model(spoilt), y)
    with pytest.raises(pmt.CaptureError, match=words):
        step(spoilt, y)
    assert find_unequal(before, copy_outcome(model, before["loss"])) == []
    step(x, y)


@pytest.mark.slow
def test_failed_step_without_rollback_does_not_claim_that_nothing_changed():
    """Gradients that were complete before the test are in ``.grad`` already."""
    own, _ = compiled("all finite")
    model, loss_fn, (x, y) = own
    step = pmt.compile(model, loss_fn, (x, y), ram="100%", rollback=False)
    with pytest.raises(pmt.CaptureError, match="finite") as caught:
        step(x * float("nan"), y)
    assert "nothing has changed" not in str(caught.value)


def test_what_inputs_decide_is_read_before_a_step():
    """So PyTorch checks the numbers of classes; an optimizer's updates may be part of the step."""

    def forward(parts, x, classes):
        return parts[0](x) * nn.functional.one_hot(classes, 4)

    model = FunctionModule(forward, nn.Linear(4, 4))
    x, y, classes = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 1, 3])
    optimizer = torch.optim.SGD(model.parameters())
    step = compile_keep_all(model, nn.functional.mse_loss, (x, classes, y), optimizer=optimizer)
    assert step.verify(x, classes.flip(0), y).equal
    if torch.__version__.startswith("2.9."):
        assert torch.isfinite(step(x, classes + 1, y))  # as the page of limits says
        return
    with pytest.raises(pmt.CaptureError, match=r"number that is checked .* was True and is False"):
        step(x, classes + 1, y)
    lower(model, nn.functional.mse_loss, (x, classes, y))  # C makes a row of zeros
