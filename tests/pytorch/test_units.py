"""Units: what is scheduled, what it is called, and what it reads."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from kit.rotation import quick  # noqa: E402
from kit.traced_models import (  # noqa: E402
    QUICK_STEPS,
    STEPS,
    checkpointed,
    recurrent,
    residual,
    rows,
    traced_residual,
)
from kit.traced_steps import run_eager, run_units  # noqa: E402
from poetmodel.graph import Phase  # noqa: E402
from poetmodel.torch import trace  # noqa: E402
from poetmodel.torch.capturing.signature import InputKind, OutputKind  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", quick(STEPS, QUICK_STEPS))
def test_units_run_as_eager(name: str) -> None:
    """Loss, gradients, buffers and random state are those of eager, bit for bit."""
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
    assert [unit.op for unit in parts.units[:2]] == ["addmm", "relu"]
    relu = parts.units[1]
    assert relu.reads.storages == parts.units[0].storages
    assert [view.name for view in relu.reads.views] == ["t_1"]


def test_outputs_of_one_operation_are_tensors_of_their_own() -> None:
    """Batch norm makes five tensors, dropout two, one of them a mask of a byte an element."""
    parts = traced_residual().parts
    made = {
        unit.op: [parts.storages[index].bytes for index in unit.storages]
        for unit in parts.units
        if unit.op in {"_native_batch_norm_legit_functional", "native_dropout"}
    }
    image = 2 * 4 * 4 * 4
    assert made == {
        "_native_batch_norm_legit_functional": [4 * image, 16, 16, 16, 16],
        "native_dropout": [4 * image, image],
    }


def test_only_random_operations_are_tagged() -> None:
    """Units that draw random numbers are told from the others."""
    parts = traced_residual().parts
    assert [unit.op for unit in parts.units if unit.random] == ["native_dropout"]


def test_layouts_rebuild_a_tensor_from_its_bytes() -> None:
    """Element type, shape, stride and offset say how an output lies in its storage."""
    parts = trace(*STEPS["channels last"](), measure_workspace=False).parts
    convolution = parts.storages[parts.units[0].storages[0]]
    (layout,) = convolution.layouts
    assert (layout.shape, layout.stride) == ((2, 4, 4, 4), (64, 1, 16, 4))
    assert (layout.dtype, layout.offset, layout.position) == (torch.float32, 0, None)


def test_emissions_come_after_their_last_maker() -> None:
    """A result is there after the unit that makes it; a parameter handed through, at once."""
    traced = traced_residual()
    for emission in traced.parts.emissions:
        makers = [traced.parts.storages[index].unit for index in emission.reads.storages]
        assert emission.after == max(makers)
    purposes = {emission.result.kind for emission in traced.parts.emissions}
    assert purposes == {OutputKind.LOSS, OutputKind.GRADIENT, OutputKind.MUTATION}
    sources = {argument.kind for argument in traced.joint.arguments}
    assert sources == {
        InputKind.PARAMETER,
        InputKind.BUFFER,
        InputKind.USER_INPUT,
        InputKind.TANGENT,
    }


NAMES = [
    ("0/convolution", Phase.FORWARD),
    ("1.conv/convolution", Phase.FORWARD),
    ("1.bn/add", Phase.FORWARD),
    ("1.bn/_native_batch_norm_legit_functional", Phase.FORWARD),
    ("1/add", Phase.FORWARD),
    ("1/relu", Phase.FORWARD),
    ("2/native_dropout", Phase.FORWARD),
    ("4/addmm", Phase.FORWARD),
    ("loss/_log_softmax", Phase.LOSS),
    ("loss/nll_loss_forward", Phase.LOSS),
    ("loss/nll_loss_backward", Phase.BACKWARD),
    ("loss/_log_softmax_backward_data", Phase.BACKWARD),
    ("4/mm", Phase.BACKWARD),
    ("4/mm#2", Phase.BACKWARD),
    ("4/sum", Phase.BACKWARD),
    ("2/native_dropout_backward", Phase.BACKWARD),
    ("1/threshold_backward", Phase.BACKWARD),
    ("1.bn/native_batch_norm_backward", Phase.BACKWARD),
    ("1.conv/convolution_backward", Phase.BACKWARD),
    ("1/add#2", Phase.BACKWARD),
    ("0/convolution_backward", Phase.BACKWARD),
]


def test_names_say_module_and_operator() -> None:
    """Every node says whose it is, the sum of a residual block's gradients too."""
    traced = traced_residual()
    assert [(node.name, node.phase) for node in traced.graph.nodes] == NAMES


def test_names_without_annotations_say_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch cannot record modules, names are operators, and still unique."""
    monkeypatch.delattr(torch.fx.traceback, "annotate")
    nodes = trace(*residual(), measure_workspace=False).graph.nodes
    assert [node.name for node in nodes[:3]] == ["convolution", "convolution#2", "add"]
    assert [node.phase == Phase.BACKWARD for node in nodes] == [
        phase == Phase.BACKWARD for _, phase in NAMES
    ]


def test_names_do_not_depend_on_the_run() -> None:
    """Traced twice, a step gives the same graph, so that profiles and schedules fit."""
    first, second = (trace(*residual(), measure_workspace=False).graph for _ in range(2))
    assert first.sha256 == second.sha256


def test_a_module_used_twice_has_numbered_names() -> None:
    """What happens again in the same module gets a number."""
    step = rows(nn.Linear(4, 4), by=lambda p, x: p[0](p[0](x)))
    names = [node.name for node in trace(*step, measure_workspace=False).graph.nodes]
    assert names[:2] == ["parts.0/addmm", "parts.0/addmm#2"]


def test_phases_follow_each_other() -> None:
    """Forward, loss, backward: none comes again."""
    order = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD]
    graph = traced_residual().graph
    places = [order.index(Phase(node.phase)) for node in graph.nodes]
    assert all(before <= after for before, after in pairwise(places))


def test_a_checkpoint_of_the_user_decides_nothing() -> None:
    """What the user's code would compute twice is there once: the schedule decides."""
    graph = trace(*checkpointed(), measure_workspace=False).graph
    assert [node.op for node in graph.nodes].count("native_dropout") == 1


def test_gradients_of_grouped_convolutions_take_as_many_flops_as_those() -> None:
    """Each gradient of a depthwise convolution costs what the convolution itself does."""
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, groups=4), torch.nn.Flatten())
    x = torch.randn(1, 4, 5, 5)
    graph = trace(model, lambda y, _: y.sum(), (x, torch.zeros(1))).graph
    flops = {node.op: node.flops for node in graph.nodes}
    assert flops["convolution"] == 2 * 4 * 9 * 9
    assert flops["convolution_backward"] == flops["convolution"]
