"""A model that asks whether its numbers are finite is captured; where they are not, nothing is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import differing, keep_all, outcome, unequal  # noqa: E402
from kit.rotation import quick  # noqa: E402
from kit.traced_models import Through, rows  # noqa: E402
from poetmodel.torch.lowering.step import lower  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

nn = torch.nn
pytestmark = pytest.mark.torch


def clamped(y: Any) -> Any:
    """Clamp what overflows, as detectors of transformers do."""
    if not torch.isfinite(y).all():
        y = torch.clamp(y, min=-1e3, max=1e3)
    return y


def refused(y: Any) -> Any:
    """Raise where there is something that is no number."""
    if torch.isnan(y).any() or y.isinf().any():
        raise ValueError
    return y


def asserted(y: Any) -> Any:
    """Assert it."""
    assert not (torch.isnan(y) | torch.isinf(y)).any().item()
    return y


KINDS: dict[str, Callable[[Any], Any]] = {
    "all finite": clamped,
    "any": refused,
    "joined": asserted,
    "each": lambda y: y if torch.isfinite(y.sum()) else y * 0,
    "negated": lambda y: y * 0 if (~torch.isfinite(y)).any() else y,
}


def compiled(kind: str, **options: Any) -> tuple[Any, pmt.Step]:
    """Return a step that asks, and its parts."""
    torch.manual_seed(1)
    layers = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(parts: Any, x: Any) -> Any:
        return parts[2](parts[1](KINDS[kind](parts[0](x))))

    own = rows(*layers, by=forward)
    return own, keep_all(*own, **options)


@pytest.mark.parametrize("kind", quick(KINDS, ("all finite", "any", "joined")))
def test_steps_on_finite_numbers_are_those_of_eager(kind: str) -> None:
    """What the model asks changes nothing; the line that asks is known."""
    own, step = compiled(kind)
    assert len(step.compiled.trace.joint.checked) >= 1
    assert all("test_finite_checks.py" in place for place in step.compiled.trace.joint.checked)
    assert differing(step, *own) == []
    assert step.verify().equal


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_steps_on_other_numbers_are_undone(number: float) -> None:
    """Gradients that are there, buffers and the random generator are as before, and it is said."""
    (model, _, (x, y)), step = compiled("all finite")
    loss = step(x, y)
    before = outcome(model, loss)
    spoilt = x.clone()
    spoilt[0, 0] = number
    with pytest.raises(pmt.CaptureError, match=r"finite .*isfinite\(y\)\.all\(\):\).*nothing has"):
        step(spoilt, y)
    assert unequal(before, outcome(model, loss)) == []
    step(x, y)


def test_checks_of_inputs_are_guards() -> None:
    """What an input alone decides is known before the step."""
    own = rows(nn.Linear(4, 4), by=lambda p, x: p[0](clamped(x)))
    step = keep_all(*own)
    assert not step.compiled.trace.joint.checked
    assert step.compiled.trace.joint.read.reads


def test_other_questions_are_refused() -> None:
    """What is asked beside that is not taken for granted."""
    own = rows(nn.Linear(4, 4), by=lambda p, x: clamped(p[0](x)) * (2 if p[0](x).max() > 0 else 1))
    with pytest.raises(pmt.CaptureError, match="reads a tensor's value"):
        keep_all(*own)


def test_updates_do_not_wait_for_answers() -> None:
    """Where the optimizer is part of the step, parameters would be new before the answer is."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4), by=lambda p, x: clamped(p[0](x)))
    optimizer = torch.optim.SGD(own[0].parameters(), lr=0.1)
    with pytest.raises(pmt.CaptureError, match="updates do not wait for the answer"):
        keep_all(*own, optimizer=optimizer)


def test_checks_cannot_be_exported() -> None:
    """A program in C would not undo a step."""
    own = rows(nn.Linear(4, 4), by=lambda p, x: clamped(p[0](x)))
    with pytest.raises(pmt.CaptureError, match="which cannot be exported"):
        lower(*own)


def likely(parts: Any, x: Any) -> Any:
    """Return what is likely under a normal distribution, whose arguments are checked."""
    y = parts[0](x)
    # Asked for, since torch.compile turns the default off in its whole process.
    normal = torch.distributions.Normal(y, y.exp(), validate_args=True)
    return y * normal.log_prob(torch.zeros(4))


def inverted(parts: Any, x: Any) -> Any:
    """Divide by matrices that rows of the input make."""
    return torch.linalg.solve(torch.diag_embed(x * parts[0].weight.sum()), parts[0](x))


@pytest.mark.parametrize(("forward", "number"), [(likely, float("nan")), (inverted, 0.0)])
def test_what_libraries_check_is_checked_after_the_step(forward: Any, number: float) -> None:
    """Of distributions and matrices too: eager raises, and so does the step, undone."""
    torch.manual_seed(1)
    own = model, loss_fn, (x, y) = rows(nn.Linear(4, 4), by=forward)
    step = keep_all(*own)
    assert differing(step, *own) == []
    before = outcome(model, step(x, y))
    spoilt = x.clone()
    spoilt[0, 0] = number
    with pytest.raises((ValueError, RuntimeError)):
        loss_fn(model(spoilt), y)
    with pytest.raises(pmt.CaptureError, match=r"test_finite_checks\.py.*nothing has changed"):
        step(spoilt, y)
    assert unequal(before, outcome(model, before["loss"])) == []


@pytest.mark.parametrize("words", [(), ("too large",)])
def test_assertions_are_looked_at(words: tuple[str, ...]) -> None:
    """A graph loses them, since nothing reads what they make."""

    def forward(parts: Any, x: Any) -> Any:
        y = parts[0](x)
        torch._assert_async((y.abs() < 100).all(), *words)
        return y

    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4), by=forward)
    model, _, (x, y) = own
    step = keep_all(*own)
    assert differing(step, *own) == []
    model.zero_grad()
    with pytest.raises(pmt.CaptureError, match=r"in range.* at .*_assert_async"):
        step(1e6 * x, y)
    assert model.parts[0].weight.grad is None


def test_what_inputs_decide_is_read_before_a_step() -> None:
    """So PyTorch checks the numbers of classes; an optimizer's updates may be part of the step."""

    def forward(parts: Any, x: Any, classes: Any) -> Any:
        return parts[0](x) * nn.functional.one_hot(classes, 4)

    torch.manual_seed(1)
    model = Through(forward, nn.Linear(4, 4))
    x, y, classes = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 1, 3])
    optimizer = torch.optim.SGD(model.parameters())
    step = keep_all(model, nn.functional.mse_loss, (x, classes, y), optimizer=optimizer)
    assert step.verify(x, classes.flip(0), y).equal
    with pytest.raises(pmt.CaptureError, match=r"number that is checked .* was True and is False"):
        step(x, classes + 1, y)
    lower(model, nn.functional.mse_loss, (x, classes, y))  # C makes a row of zeros
