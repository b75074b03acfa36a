"""`compile`: three lines, and what is wrong in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from eager_steps import differing  # noqa: E402
from poetmodel.device import Costs, Device  # noqa: E402
from poetmodel.errors import BudgetError, InputError, NoScheduleError  # noqa: E402
from small_networks import residual_step  # noqa: E402
from traced_models import rows  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch


def simple(**options: Any) -> tuple[Any, pmt.Step]:
    """Return a step of two linear layers, and it compiled to keep everything."""
    torch.manual_seed(1)
    own = rows(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return own, pmt.compile(*own, ram="100%", device="rpi4b", **options)


def test_three_lines(tmp_path: Path) -> None:
    """Measured, solved, planned, run: within the budget, and eager's results."""
    torch.manual_seed(1)
    model, loss_fn, (x, y) = residual_step(size=16)
    step = pmt.compile(model, loss_fn, (x, y), ram="60%", storage=tmp_path / "scratch")
    assert differing(step, model, loss_fn, (x, y)) == []
    compiled = step.compiled
    assert compiled.budget_bytes == int(0.6 * compiled.keep_all_bytes)
    assert compiled.peak_bytes <= step.budget_bytes
    assert compiled.check.valid
    assert step.result.schedule is not None
    assert any("page times: measured" in note for note in compiled.notes)
    assert step.source.startswith("def step(")
    step.close()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_recomputing_alone_needs_no_storage() -> None:
    """Without a folder tensors are recomputed, and nothing is written."""
    torch.manual_seed(1)
    own = residual_step(size=16)
    step = pmt.compile(*own, ram="80%", device="rpi4b")
    assert differing(step, *own) == []
    assert not step.result.problem.paging
    assert step.compiled.runner.file is None
    assert step.compiled.check.written_bytes == 0
    computed = [index for op, index in step.plan.program if op == "compute"]
    assert len(computed) > len(set(computed))


def test_everything_is_kept_where_there_is_room() -> None:
    """100 % recomputes and pages nothing, whatever is small or large."""
    _, step = simple()
    assert step.compiled.coarse.threshold_bytes == 0
    assert step.compiled.peak_bytes == step.budget_bytes
    assert len(step.plan.program) > 0
    assert step.result.overhead_j == 0


def test_costs_can_be_given() -> None:
    """Costs that the user has are taken as they are."""
    own = rows(nn.Linear(4, 4))
    costs = Costs.estimate(pmt.trace(*own).graph, Device.load("rpi4b"))
    step = pmt.compile(*own, ram="100%", profile=costs)
    assert step.compiled.costs.compute == costs.compute
    assert step.compiled.notes == (f"costs: {costs.source}",)


def test_the_state_dict_and_mode_are_the_users() -> None:
    """No key comes or goes; evaluation runs as before, and training goes on after it."""
    own, step = simple()
    model, _, inputs = own
    keys = list(model.state_dict())
    step(*inputs)
    assert list(model.state_dict()) == keys
    model.eval()
    with torch.no_grad():
        assert model(inputs[0]).shape == (3, 4)
    with pytest.raises(pmt.CaptureError, match="training mode"):
        step(*inputs)
    model.train()
    assert differing(step, *own) == []


def test_other_inputs_are_refused() -> None:
    """Shapes, types, nesting, frozen parameters and autocast: what was, and what is."""
    (model, _, (x, y)), step = simple()
    for inputs, words in (
        ((x[:2], y[:2]), r"inputs\[0\] was float32 \[3, 4\].* and is float32 \[2, 4\]"),
        ((x.double(), y), r"is float64 \[3, 4\]"),
        ((x,), "expected inputs nested as"),
        ((x.t().contiguous().t(), y), r"strides \[1, 3\]"),
    ):
        with pytest.raises(pmt.CaptureError, match=words):
            step(*inputs)
    model[0].weight.requires_grad_(False)
    with pytest.raises(pmt.CaptureError, match=r"0\.weight was .*, requiring a gradient and is"):
        step(x, y)
    model[0].weight.requires_grad_(True)
    with torch.autocast("cpu"), pytest.raises(pmt.CaptureError, match="inside of the model"):
        step(x, y)
    step(x, y)


def test_other_inputs_are_compiled_for_if_asked() -> None:
    """With retrace each form is compiled once."""
    own, step = simple(dynamic="retrace")
    model, loss_fn, (x, y) = own
    first = step.compiled
    assert differing(step, model, loss_fn, (x[:2], y[:2])) == []
    second = step.compiled
    assert second is not first
    assert differing(step, *own) == []
    assert step.compiled is first
    model.eval()
    assert differing(step, *own) == []
    assert step.compiled not in (first, second)
    model.train()
    step(x[:2], y[:2])
    assert step.compiled is second
    step.close()


def test_a_number_among_the_inputs_is_guarded() -> None:
    """A number is part of the program; another one is another step."""
    model, loss_fn, (x, y) = rows(nn.Linear(4, 4), by=lambda p, x, k: p[0](x) * k)
    step = pmt.compile(model, loss_fn, (x, 3, y), ram="100%", device="rpi4b")
    step(x, 3, y)
    with pytest.raises(pmt.CaptureError, match=r"inputs\[1\] was 3 and is 4"):
        step(x, 4, y)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ram": "100%", "dynamic": "maybe"}, "dynamic: expected error or retrace"),
        ({"ram": "100%", "paging": True}, "paging: needs a folder"),
        ({"ram": "100%", "device": "rpi4b", "profile": object()}, "not both"),
        ({"ram": "many", "device": "rpi4b"}, "ram: expected"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, words: str) -> None:
    """Each with a sentence."""
    with pytest.raises(InputError, match=words):
        pmt.compile(*rows(nn.Linear(4, 4)), **options)


def test_budgets_that_cannot_be_kept_are_told() -> None:
    """Too little for small tensors, or for the largest operation."""
    own = residual_step()
    with pytest.raises(BudgetError, match=r"less than the .* that tensors of less than"):
        pmt.compile(*own, ram=10_000, device="rpi4b")
    with pytest.raises(NoScheduleError, match=r"alone needs the floor.* B more are reserved"):
        pmt.compile(*own, ram="30%", device="rpi4b")


def test_autocast_around_compile_is_refused() -> None:
    """Autocast belongs inside of the model."""
    with torch.autocast("cpu"), pytest.raises(pmt.CaptureError, match="inside of the model"):
        pmt.compile(*rows(nn.Linear(4, 4)), ram="100%", device="rpi4b")


def test_other_devices_are_refused() -> None:
    """Only the processor runs steps."""
    model = nn.Linear(4, 4, device="meta")
    inputs = (torch.randn(3, 4, device="meta"), torch.randn(3, 4, device="meta"))
    with pytest.raises(InputError, match="on meta"):
        pmt.compile(model, nn.functional.mse_loss, inputs, ram="100%", device="rpi4b")


def test_frozen_layers_shrink_the_graph() -> None:
    """Fine-tuning the last layers has fewer operations and a lower peak."""
    torch.manual_seed(1)
    own = residual_step()
    whole = pmt.compile(*own, ram="100%", device="rpi4b").compiled
    for layer in own[0][:4]:
        layer.requires_grad_(False)
    part = pmt.compile(*own, ram="100%", device="rpi4b")
    assert len(part.compiled.trace.graph.nodes) < len(whole.trace.graph.nodes)
    assert part.compiled.keep_all_bytes < whole.keep_all_bytes
    assert differing(part, *own) == []
    assert own[0][0].weight.grad is None
