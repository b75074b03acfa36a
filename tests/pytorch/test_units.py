"""Units: running them one by one is the step that PyTorch runs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch import trace  # noqa: E402
from poetmodel.torch.roles import Purpose, Source  # noqa: E402
from traced_models import STEPS, recurrent, residual, rows  # noqa: E402
from traced_steps import run_eager, run_units  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", STEPS)
def test_units_run_as_eager(name: str) -> None:
    """Loss, gradients, buffers and random state are those of eager, bit by bit."""
    torch.manual_seed(1)
    model, loss_fn, inputs = STEPS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    traced = trace(model, loss_fn, inputs, measure_workspace=False)
    state = torch.get_rng_state()
    expected = run_eager(model, loss_fn, inputs)
    state_after = torch.get_rng_state()
    torch.set_rng_state(state)
    found = run_units(traced)
    assert torch.equal(torch.get_rng_state(), state_after)
    for key, value in expected.items():
        still = before.get(key.removeprefix("mutation of "))
        assert torch.equal(value, found.pop(key, still)), key
    assert not found


def test_lstm_is_eager_without_onednn() -> None:
    """An LSTM differs from eager's fused one by rounding only."""
    torch.manual_seed(1)
    model, loss_fn, inputs = recurrent(nn.LSTM(4, 4, batch_first=True))
    found = run_units(trace(model, loss_fn, inputs, measure_workspace=False))
    for key, value in run_eager(model, loss_fn, inputs).items():
        assert torch.allclose(value, found[key], atol=1e-6), key
    assert torch.backends.mkldnn.enabled


def test_tied_weights_have_a_gradient_each() -> None:
    """A weight in two places gives two gradients, whose sum is eager's."""
    torch.manual_seed(1)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model, loss_fn, inputs = rows(first, second)
    traced = trace(model, loss_fn, inputs, measure_workspace=False)
    found = run_units(traced)
    expected = run_eager(model, loss_fn, inputs)["gradient of 0.weight"]
    assert torch.allclose(expected, found["gradient of 0.weight"] + found["gradient of 1.weight"])
    assert traced.graph.parameters == 16


def test_an_input_changed_in_place_is_a_mutation() -> None:
    """The new value of an input comes out as a result of its own; the input stays."""
    model, loss_fn, inputs = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x.mul_(2)))
    before = inputs[0].clone()
    traced = trace(model, loss_fn, inputs, measure_workspace=False)
    assert torch.equal(inputs[0], before)
    assert torch.equal(run_units(traced)["mutation of inputs[0]"], 2 * before)
    assert run_eager(model, loss_fn, inputs)["loss"] == run_units(traced)["loss"]


def test_views_are_no_units_and_readers_replay_them() -> None:
    """A view has neither node nor tensor; whoever reads it names the tensor behind it."""
    model, loss_fn, inputs = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x).t().relu().t())
    parts = trace(model, loss_fn, inputs, measure_workspace=False).parts
    assert [unit.label.op for unit in parts.units[:2]] == ["addmm", "relu"]
    relu = parts.units[1]
    assert relu.reads.storages == parts.units[0].storages
    assert [view.name for view in relu.reads.views] == ["t_1"]
    assert relu.reads.arguments == ()


def test_outputs_of_one_operation_are_tensors_of_their_own() -> None:
    """Batch norm makes five tensors, dropout two, one of them a mask of a byte an element."""
    parts = trace(*residual(), measure_workspace=False).parts
    made = {
        unit.label.op: [parts.storages[index].bytes for index in unit.storages]
        for unit in parts.units
        if unit.label.op in {"_native_batch_norm_legit_functional", "native_dropout"}
    }
    image = 2 * 4 * 4 * 4
    assert made == {
        "_native_batch_norm_legit_functional": [4 * image, 16, 16, 16, 16],
        "native_dropout": [4 * image, image],
    }


def test_only_random_operations_are_tagged() -> None:
    """Units that draw random numbers are told from the others."""
    parts = trace(*residual(), measure_workspace=False).parts
    assert [unit.label.op for unit in parts.units if unit.random] == ["native_dropout"]


def test_layouts_rebuild_a_tensor_from_its_bytes() -> None:
    """Element type, shape, stride and offset say how an output lies in its storage."""
    parts = trace(*STEPS["channels last"](), measure_workspace=False).parts
    convolution = parts.storages[parts.units[0].storages[0]]
    (layout,) = convolution.layouts
    assert (layout.shape, layout.stride) == ((2, 4, 4, 4), (64, 1, 16, 4))
    assert (layout.dtype, layout.offset, layout.position) == (torch.float32, 0, None)


def test_emissions_come_after_their_last_maker() -> None:
    """A result is there after the unit that makes it; a parameter handed through, at once."""
    traced = trace(*residual(), measure_workspace=False)
    for emission in traced.parts.emissions:
        makers = [traced.parts.storages[index].unit for index in emission.reads.storages]
        assert emission.after == max(makers)
    purposes = {emission.result.purpose for emission in traced.parts.emissions}
    assert purposes == set(Purpose)
    sources = {argument.source for argument in traced.joint.arguments}
    assert sources == {Source.PARAMETER, Source.BUFFER, Source.INPUT, Source.TANGENT}
