"""Graphs of whole training steps: state, updates at their places, and what waits for what."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.optimizer_steps import ADAM, OPTIMIZERS, SGD, Twins, grouped  # noqa: E402
from kit.rotation import quick  # noqa: E402
from kit.traced_models import (  # noqa: E402
    STEPS,
    Through,
    frozen,
    residual,
    rows,
    shared_gradient,
    traced_residual,
    transposed_gradient,
)
from poetmodel.device import Costs, Device  # noqa: E402
from poetmodel.graph import Graph, Phase  # noqa: E402
from poetmodel.torch import CaptureError, measure, trace  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch


def whole(step: Any, name: str = "sgd", *, clip: float | None = None) -> Graph:
    """Return the graph of a step with an optimizer."""
    return Twins(step, OPTIMIZERS[name], clip=clip).trace(measure_workspace=False).graph


@cache
def of_residual(name: str = "sgd", *, clip: float | None = None) -> Graph:
    """Return the graph of a residual step with an optimizer."""
    return whole(residual(), name, clip=clip)


def state(graph: Graph) -> dict[str, int]:
    """Return the state tensors of a graph, and their bytes."""
    return {graph.tensors[i].name: graph.tensor_bytes[i] for i in graph.state_tensors}


def replaced(graph: Graph) -> set[str]:
    """Return the names of the state tensors that get new values."""
    return {graph.tensors[i].name for i in graph.replacement_of}


def reader(graph: Graph, name: str) -> int:
    """Return the last node that reads a tensor."""
    return graph.users_of[graph.tensor_index[name]][-1]


def test_state_of_each_optimizer() -> None:
    """Parameters, moments and counts are state, with the bytes that they have."""
    step = rows(nn.Linear(4, 4))
    parameters = {"0.weight": 64, "0.bias": 16}
    assert state(whole(step)) == parameters
    moments = {f"{name}.momentum_buffer": size for name, size in parameters.items()}
    assert state(whole(step, "momentum")) == parameters | moments
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    moments = {f"{name}.{key}": size for name, size in parameters.items() for key in keys}
    moments |= {f"{name}.step": 4 for name in parameters}
    graph = whole(step, "amsgrad")
    assert state(graph) == parameters | moments
    assert replaced(graph) == set(state(graph))
    assert graph.version == 2
    assert graph.resident_bytes == {}


@pytest.mark.parametrize(
    "name",
    quick(["residual", "encoder layer", "group norm", "depthwise", "gru"], ["residual", "gru"]),
)
def test_updates_follow_gradient_and_last_reader(name: str) -> None:
    """Between what an update waits for and the update come other updates and their state only."""
    torch.manual_seed(1)
    graph = whole(STEPS[name](), "momentum")
    for old, new in graph.replacement_of.items():
        u = graph.node_of[new]
        node = graph.nodes[u]
        assert graph.users_of[old][-1] == u
        if node.op != "sgd" or graph.nodes[graph.node_of[old]].op != "parameter":
            continue
        waits = {*graph.users_of[old][:-1]}
        waits |= {
            graph.node_of[i] for i in graph.inputs_of[u] if graph.nodes[graph.node_of[i]].op != "lr"
        }
        before = [k for k in waits if graph.nodes[k].phase not in (Phase.STATE, Phase.INPUT)]
        between = graph.nodes[max(before) + 1 : u]
        assert {node.phase for node in between} <= {Phase.STATE, Phase.INPUT, Phase.UPDATE}


def test_sources_come_right_before_their_first_reader() -> None:
    """Between state, or an input, and what reads it first, there are only others like it."""
    graph = of_residual("adam")
    for k, node in enumerate(graph.nodes):
        if node.phase in (Phase.STATE, Phase.INPUT):
            (made,) = graph.outputs_of[k]
            between = graph.nodes[k + 1 : graph.users_of[made][0]]
            assert {each.phase for each in between} <= {Phase.STATE, Phase.INPUT}
            assert not node.recomputable


def test_clipping_is_a_barrier() -> None:
    """Every update reads the factor, and the factor reads every gradient."""
    graph = of_residual(clip=1.0)
    (norm,) = [k for k, node in enumerate(graph.nodes) if node.op == "clip_grad_norm"]
    updates = [k for k, node in enumerate(graph.nodes) if node.op == "sgd"]
    assert min(updates) > norm
    (factor,) = graph.outputs_of[norm]
    assert graph.tensor_bytes[factor] == 4
    for k in updates:
        assert factor in graph.inputs_of[k]
        read = [i for i in graph.inputs_of[k] if graph.nodes[graph.node_of[i]].phase == "backward"]
        assert read
        assert set(read) <= set(graph.inputs_of[norm])
    assert "clip_grad_norm" not in {node.op for node in of_residual().nodes}


def test_learning_rate_is_an_input() -> None:
    """It is a number of 8 bytes that every update reads; each group of parameters has its own."""
    graph = of_residual("adamw")
    k = graph.node_index["lr"]
    assert (graph.nodes[k].phase, graph.nodes[k].output_bytes) == (Phase.INPUT, 8)
    updates = [k for k, node in enumerate(graph.nodes) if node.op == "adamw"]
    assert list(graph.users_of[graph.tensor_index["lr"]]) == updates
    step = residual()
    groups = Twins(step, lambda p: SGD(grouped(p), lr=0.1, momentum=0.9))
    graph = groups.trace(measure_workspace=False).graph
    assert len(graph.users_of[graph.tensor_index["lr[0]"]]) == 1
    assert "0.weight.momentum_buffer" not in state(graph)
    assert "0.bias.momentum_buffer" in state(graph)


def test_what_is_not_trained_is_only_read() -> None:
    """Frozen parameters, buffers that stay, and constants are state without a replacement."""
    graph = whole(frozen())
    assert state(graph) == {"0.weight": 64, "0.bias": 16, "1.weight": 64, "1.bias": 16}
    assert replaced(graph) == {"1.weight", "1.bias"}
    graph = whole(STEPS["evaluation mode"]())
    assert {"1.running_mean", "1.running_var"} <= state(graph).keys() - replaced(graph)
    graph = whole(STEPS["a literal tensor"]())
    assert len(state(graph)) == len(replaced(graph)) + 1
    assert "1.weight" not in state(whole(STEPS["unused"]()))  # nothing reads it


def test_running_statistics_are_updated_when_batch_norm_is_done_with() -> None:
    """One node updates those of a module, after the backward of batch norm: it may run again."""
    graph = of_residual()
    names = {f"1.bn.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert names <= replaced(graph)
    (update,) = {graph.node_of[graph.replacement_of[graph.tensor_index[n]]] for n in names}
    backward = [k for k, node in enumerate(graph.nodes) if node.op == "native_batch_norm_backward"]
    assert max(backward) < update
    assert graph.nodes[graph.node_index["1.bn/_native_batch_norm_legit_functional"]].recomputable


def test_tied_weights_are_one_state_tensor() -> None:
    """A weight in two places is held once, and updated once with both gradients."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    graph = whole(rows(first, second))
    assert state(graph) == {"0.weight": 64}
    (update,) = [node for node in graph.nodes if node.op == "sgd"]
    assert len(update.inputs) == 4  # both gradients, weight, learning rate


def test_updates_need_no_memory_but_that_of_their_gradient() -> None:
    """A gradient that others read too is copied, where the update would write over it."""
    assert not any(n.workspace_bytes for n in of_residual("adam").nodes if n.op == "adam")

    def found(name: str, step: Any) -> list[int]:
        return [n.workspace_bytes for n in whole(step, name).nodes if n.op in ("sgd", "adam")]

    assert found("sgd", shared_gradient()) == [0, 0]
    assert found("nesterov", shared_gradient()) == [48, 0]
    assert found("adam", shared_gradient()) == [48, 0]
    assert found("sgd", transposed_gradient()) == [48]  # as eager keeps it


def test_inputs_of_the_step_are_nodes() -> None:
    """Batch and target count, each from its first reader on."""
    graph = whole(rows(nn.Linear(4, 4)))
    inputs = [node.name for node in graph.nodes if node.phase == Phase.INPUT]
    assert inputs == ["inputs[0]", "inputs[1]", "lr"]


def test_without_an_optimizer_nothing_is_new() -> None:
    """The graph ends with the gradients, and has version 1."""
    graph = traced_residual().graph
    assert graph.version == 1
    assert not {Phase.STATE, Phase.UPDATE, Phase.INPUT} & {node.phase for node in graph.nodes}


def test_costs_are_measured_and_estimated(tmp_path: Path) -> None:
    """State costs nothing to compute, updates do; pages of state have costs."""
    twins = Twins(residual(), OPTIMIZERS["adam"])
    traced = twins.trace()
    before = {key: value.clone() for key, value in twins.model.state_dict().items()}
    estimated = Costs.estimate(traced.graph, Device.load("rpi4b"))
    for costs in (measure(traced, folder=tmp_path, repeats=2).costs, estimated):
        table = costs.table(traced.graph)
        for node, time_s in zip(traced.graph.nodes, table.compute_time_s, strict=True):
            if node.phase == Phase.UPDATE:
                assert time_s > 0
            elif node.phase == Phase.STATE:
                assert time_s == 0
        assert table.has_storage
    after = twins.model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not twins.optimizers[0].state


@pytest.mark.parametrize("name", ["nesterov", "amsgrad"])
def test_steps_on_the_meta_device_have_graphs(name: str) -> None:
    """What has shapes and no numbers has the same nodes, and the same state."""
    graphs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
            step = (model, lambda y, t: (y * t).sum(), (torch.randn(3, 4), torch.randn(3, 4)))
            optimizer = OPTIMIZERS[name](model.parameters())
            options = {"optimizer": optimizer, "clip_grad_norm": 1.0}
            graphs.append(trace(*step, measure_workspace=False, **options).graph)
    assert state(graphs[0]) == state(graphs[1])
    assert [node.name for node in graphs[0].nodes] == [node.name for node in graphs[1].nodes]


class Own(SGD):
    """An optimizer of a user's own."""


def hooked(parameters: Any) -> Any:
    """Return an optimizer with a hook."""
    optimizer = SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.Adamax, "expected SGD, .* or Adagrad of torch.optim, got .*.Adamax"),
        (lambda p: Own(p, lr=0.1), "expected SGD.* got .*Own"),
        (lambda _: "sgd", "got 'sgd'"),
        (lambda p: ADAM(p, fused=True), "group 0: fused=True cannot be traced; leave it out"),
        (lambda p: ADAM(p, lr=torch.tensor(0.5)), "group 0: lr is a tensor; .* such as lr=0.5"),
        (lambda p: ADAM([{"params": p, "lr": "0.5"}]), "group 0: lr: expected a number, got '0.5'"),
        (lambda p: SGD(p, lr=0.1, differentiable=True), "differentiable=True"),
        (hooked, "it has hooks on its steps"),
        (lambda p: SGD(list(p)[:1], lr=0.1), "0.bias requires a gradient, and the optimizer"),
        (lambda p: SGD([*p, torch.zeros(1)], lr=0.1), "1 of its parameters are none of the model"),
    ],
)  # fmt: skip
def test_other_optimizers_are_refused(make: Any, message: str) -> None:
    """The sentence says what is accepted, or what to change."""
    step = rows(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=f"optimizer: .*{message}"):
        trace(*step, optimizer=make(step[0].parameters()), measure_workspace=False)


@pytest.mark.parametrize("clip", [0, -1.0, "1", True])
def test_norms_are_positive_numbers(clip: Any) -> None:
    """Anything else is refused, and so is a norm without an optimizer."""
    step = rows(nn.Linear(4, 4))
    optimizer = SGD(step[0].parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="clip_grad_norm: expected a number above 0, got"):
        trace(*step, optimizer=optimizer, clip_grad_norm=clip)
    with pytest.raises(CaptureError, match="clip_grad_norm: needs an optimizer"):
        trace(*step, clip_grad_norm=1.0)


def input_with_gradient() -> Any:
    """Return a step whose input requires a gradient."""
    step = rows(nn.Linear(4, 4))
    step[2][0].requires_grad_()
    return step


def views_of_one() -> Any:
    """Return a step of two weights that are views of one tensor."""
    flat = torch.randn(32)
    parts = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
    for part, values in zip(parts, flat.chunk(2), strict=True):
        part.weight = nn.Parameter(values.view(4, 4))
    return rows(*parts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (input_with_gradient, r"inputs\[0\] requires a gradient"),
        (lambda: rows(nn.Linear(4, 4), by=lambda p, x: p[0](x.mul_(2))), r"inputs\[0\] is changed"),
        (views_of_one, "0.weight and 1.weight share memory; give each its own"),
        (lambda: (Through(lambda p, x: p[0](x).abs(), nn.Linear(4, 4, dtype=torch.complex64)),
                  nn.functional.mse_loss,
                  (torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4))), "is complex"),
    ],
)  # fmt: skip
def test_steps_that_updates_do_not_fit_are_refused(make: Any, message: str) -> None:
    """What would be lost or wrong if updates are part of the step is said."""
    step = make()
    with pytest.raises(CaptureError, match=f"optimizer: .*{message}"):
        trace(*step, optimizer=SGD(step[0].parameters(), lr=0.1), measure_workspace=False)
