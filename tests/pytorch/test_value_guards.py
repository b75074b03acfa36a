"""Values that a model reads from inputs and buffers: other ones are noticed, or compiled for."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import differing, keep_all  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.torch import Step

nn = torch.nn
pytestmark = pytest.mark.torch


class Masked(nn.Module):
    """A layer whose rows count as a mask says, and what it does about that is its own."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))
        self.function = function

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.function(self, self.layer(x), mask).square().mean()


def whole(_: Any, y: Any, mask: Any) -> Any:
    """Leave the mask out where it masks nothing, as transformers do."""
    return y if mask.all() else y * mask[:, None]


def masked(function: Callable[..., torch.Tensor], **options: Any) -> tuple[Any, Step]:
    """Return a model and its step, compiled for two rows of three."""
    torch.manual_seed(1)
    model = Masked(function)
    inputs = (torch.randn(3, 4), torch.tensor([True, True, False]))
    return (model, None, inputs), keep_all(model, None, inputs, **options)


def with_mask(own: Any, *mask: int) -> Any:
    """Return a step with another mask."""
    model, loss_fn, (x, _) = own
    return model, loss_fn, (x, torch.tensor(mask, dtype=torch.bool))


def test_other_values_with_the_same_answer_run() -> None:
    """A mask of another value, of which the model reads the same, is not compiled for again."""
    own, step = masked(whole)
    for mask in ((1, 0, 1), (0, 0, 1), (0, 0, 0)):
        assert differing(step, *with_mask(own, *mask)) == []


def test_values_with_another_answer_are_refused() -> None:
    """The error names the line that read, what it read, and what it would read now."""
    own, step = masked(whole)
    model, _, inputs = with_mask(own, 1, 1, 1)
    words = r"value that is read at .*guards.py:\d+ \(return y if .* was False and is True"
    with pytest.raises(pmt.CaptureError, match=words):
        step(*inputs)
    assert model.layer.weight.grad is None
    assert differing(step, *own) == []


def test_values_with_another_answer_are_compiled_for_if_asked() -> None:
    """Each answer is compiled for once, and both are there from then on."""
    own, step = masked(whole, dynamic="retrace")
    first = step.compiled
    assert differing(step, *with_mask(own, 1, 1, 1)) == []
    second = step.compiled
    assert second is not first
    assert differing(step, *own) == []
    assert step.compiled is first
    assert differing(step, *with_mask(own, 1, 1, 1)) == []
    assert step.compiled is second


def test_buffers_that_are_read_are_looked_at() -> None:
    """A buffer that is read may get another value, if what is read of it stays."""
    own, step = masked(lambda model, y, _: y * 2 if model.scale > 0 else y)
    model, _, inputs = own
    model.scale.fill_(3)
    assert differing(step, *own) == []
    model.scale.fill_(-1)
    with pytest.raises(pmt.CaptureError, match=r"model.scale > 0 .* was True and is False"):
        step(*inputs)


def test_a_buffer_that_becomes_another_tensor_is_the_one_that_counts() -> None:
    """What is there at the step is looked at, not what was there when it was compiled."""
    own, step = masked(lambda model, y, _: y * 2 if model.scale > 0 else y)
    model, _, inputs = own
    model.scale = torch.tensor(-1.0)
    with pytest.raises(pmt.CaptureError, match="was True"):
        step(*inputs)


def test_numbers_of_selected_rows_are_looked_at() -> None:
    """Other rows may be selected, but as many."""
    own, step = masked(lambda _, y, mask: y[mask])
    assert differing(step, *with_mask(own, 0, 1, 1)) == []
    with pytest.raises(pmt.CaptureError, match=r"number that decides a shape at .* was 2 and is 1"):
        step(*with_mask(own, 0, 1, 0)[2])


def test_shapes_that_follow_from_values_are_looked_at() -> None:
    """A shape is read, too."""
    own, step = masked(lambda _, y, mask: y * len(mask.nonzero()))
    assert differing(step, *with_mask(own, 0, 1, 1)) == []
    with pytest.raises(
        pmt.CaptureError, match=r"shape of a result .* was \(\(2, 1\),\) and is \(\(1, 1\),\)"
    ):
        step(*with_mask(own, 0, 1, 0)[2])


def test_values_that_cannot_be_had_are_refused() -> None:
    """Where reading fails on other inputs, the step does not run on them."""
    own, step = masked(lambda _, y, mask: y * mask.nonzero()[1].item())
    with pytest.raises(pmt.CaptureError, match="cannot be had now"):
        step(*with_mask(own, 0, 0, 1)[2])


def test_not_a_number_is_itself() -> None:
    """A value that is no number is the same the next time."""
    own, step = masked(lambda _, y, mask: y * ((mask.sum() * float("nan")).item() != 0))
    assert differing(step, *own) == []


def test_what_is_read_twice_is_looked_at_once() -> None:
    """Many layers that read the same of one mask cost one guard."""

    def often(_: Any, y: Any, mask: Any) -> Any:
        for _ in range(5):
            y = y + 1 if (mask & torch.tensor([True, True, True])).all() else y * 2
        return y

    own, step = masked(often)
    assert len(step.compiled.trace.joint.read.reads) == 1
    assert differing(step, *own) == []


def test_verify_looks_at_values() -> None:
    """A certificate is of what was compiled for, never of another branch."""
    own, step = masked(whole)
    with pytest.raises(pmt.CaptureError, match="was False"):
        step.verify(*with_mask(own, 1, 1, 1)[2])


def test_buffers_that_a_step_changes_and_reads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A step that will not hold for long says so when it is compiled, and which buffer it is."""

    def counted(model: Any, y: Any, _: Any) -> Any:
        model.scale.add_(1)
        return y / model.scale.item()

    own, step = masked(counted)
    assert "forward reads scale, which each step changes" in caplog.text
    assert differing(step, *own) == []
    with pytest.raises(pmt.CaptureError, match=r"model.scale.item\(\)\) was 2.0 and is 3.0"):
        step(*own[2])


def test_what_is_compiled_again_and_again_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that is another one in each step is compiled for each time: the log names it."""
    monkeypatch.setattr("poetmodel.torch.compilation._MANY", 2)
    own, step = masked(lambda _, y, mask: y * mask.sum().item(), dynamic="retrace")
    model, _, (x, _) = own
    for number in (1, 2):
        assert "kinds of steps" not in caplog.text
        step(x, torch.tensor([number, 7, 7]))
    assert "compiled for 2 kinds of steps" in caplog.text
    assert "mask.sum().item()" in caplog.text
    assert model.layer.weight.grad is not None


# -- readings drawn at random ------------------------------------------------------------------

STEPS: tuple[Callable[[Any], Any], ...] = (
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
READINGS: tuple[Callable[[Any, Any], Any], ...] = (
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


def check_random_readings(seed: int) -> None:
    """Assert that a model that reads at random is eager's for every mask, compiled for or known."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    steps = [draw.choice(STEPS) for _ in range(draw.randint(0, 3))]
    readings = [draw.choice(READINGS) for _ in range(draw.randint(1, 2))]

    def function(_: Any, y: Any, mask: Any) -> Any:
        for step in steps:
            mask = step(mask)
        return sum(reading(y, mask).square().sum() for reading in readings)

    own, step = masked(function, dynamic="retrace")
    kinds = [[draw.random() < 0.5 for _ in range(3)] for _ in range(3)]
    for mask in (*kinds, *kinds):
        assert differing(step, *with_mask(own, *mask)) == [], (seed, mask)


@pytest.mark.parametrize("seed", range(2))
def test_random_readings(seed: int) -> None:
    """Masks change what is read of them, or not: loss and gradients are eager's."""
    check_random_readings(seed)


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(2, 100))
def test_more_random_readings(seed: int) -> None:
    """The same for more models and masks."""
    check_random_readings(seed)
