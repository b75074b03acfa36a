"""Graphs of whole training steps: state, updates at their places, operators in place."""

from functools import cache, partial

import pytest
import torch

from kit.optimizer_steps import ADAM, OPTIMIZERS, SGD, Twins, group_parameters
from kit.rotation import mark_seeds_except
from kit.storage_peaks import storage_peak_bytes
from kit.traced_models import (
    STEPS,
    FunctionModule,
    frozen_step,
    residual,
    row_step,
    shared_gradient,
    trace_residual,
    transposed_gradient,
)
from poetmodel.device import Costs, Device
from poetmodel.graph import Phase
from poetmodel.torch import CaptureError, measure, trace
from poetmodel.torch.capturing.replay import execute_kernel
from poetmodel.torch.graph.tensors import heap_peak_bytes, storage_key
from poetmodel.torch.step.in_place import in_place_kernel
from poetmodel.torch.step.optimizers import OptimizerMoment, group_rules

nn = torch.nn
functional = torch.nn.functional
aten = torch.ops.aten


MUONS = {
    "muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.1),
    "muon, plain": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=1, nesterov=False),
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow), torch.bfloat16],
)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *MUONS])
def test_no_update_takes_more_memory_than_its_rule_states(name, dtype):
    """In no step, the later ones of RAdam included; numbers of an update add at most 16 B."""
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 40)).to(dtype)
    optimizer = (OPTIMIZERS | MUONS)[name](list(model.parameters()))
    for rule, parameters in group_rules(optimizer):
        for p in parameters:
            moments = [OptimizerMoment(optimizer, p, key).value() for key in rule.moment_keys]
            for step in range(8):
                update = partial(
                    rule.update, [p.detach(), *moments], torch.randn_like(p), 0.1, is_first=not step
                )
                assert heap_peak_bytes(update) <= rule.scratch_bytes(p) + 16, (step, p.shape)


def whole(step, name="sgd", *, clip=None):
    """Return the graph of a step with an optimizer."""
    return Twins(step, OPTIMIZERS[name], clip=clip).trace(measure_workspace=False).graph


@cache
def of_residual(name="sgd", *, clip=None):
    """Return the graph of a residual step with an optimizer."""
    return whole(residual(), name, clip=clip)


def state(graph):
    """Return the state tensors of a graph, and their bytes."""
    return {graph.tensors[i].name: graph.tensor_bytes[i] for i in graph.state_tensors}


def replaced(graph):
    """Return the names of the state tensors that get new values."""
    return {graph.tensors[i].name for i in graph.replacement_of}


def test_state_of_each_optimizer():
    """Parameters, moments and counts are state, with their bytes.

    A shared weight has one tensor, and one update with both gradients. Without an optimizer,
    the graph has no replacements, and version 1.
    """
    step = row_step(nn.Linear(4, 4))
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
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    graph = whole(row_step(first, second))
    assert state(graph) == {"0.weight": 64}
    assert graph.parameters == 16
    (update,) = [node for node in graph.nodes if node.op == "sgd"]
    assert len(update.inputs) == 3  # the sum of gradients, weight, learning rate
    graph = trace_residual().graph
    assert graph.version == 1
    assert not {Phase.STATE, Phase.UPDATE, Phase.INPUT} & {node.phase for node in graph.nodes}


@pytest.mark.parametrize(
    "name",
    mark_seeds_except(
        ["residual", "encoder layer", "group norm", "depthwise", "gru"], ["gru"], ["residual"]
    ),
)
def test_updates_follow_gradient_and_last_reader(name):
    """Only other updates and their state are between an update and its last input.

    Only state or inputs are between a state tensor, or an input, and its first reader.
    """
    graph = whole(STEPS[name](), "momentum")
    for k, node in enumerate(graph.nodes):
        if node.phase in (Phase.STATE, Phase.INPUT):
            (made,) = graph.outputs_of[k]
            between = graph.nodes[k + 1 : graph.users_of[made][0]]
            assert {each.phase for each in between} <= {Phase.STATE, Phase.INPUT}
            assert not node.recomputable
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


def test_learning_rate_is_an_input():
    """It is a number of 8 bytes that every update reads; each group of parameters has its own.

    Batch and target are inputs too, each from its first reader on. Every update reads the factor of
    clipping, and the factor reads every gradient.
    """
    nodes = whole(row_step(nn.Linear(4, 4))).nodes
    inputs = [node.name for node in nodes if node.phase == Phase.INPUT]
    assert inputs == ["inputs[0]", "inputs[1]", "lr"]
    graph = of_residual("adamw")
    k = graph.node_index["lr"]
    assert (graph.nodes[k].phase, graph.nodes[k].output_bytes) == (Phase.INPUT, 8)
    updates = [k for k, node in enumerate(graph.nodes) if node.op == "adamw"]
    assert list(graph.users_of[graph.tensor_index["lr"]]) == updates
    step = residual()
    groups = Twins(step, lambda p: SGD(group_parameters(p), lr=0.1, momentum=0.9))
    graph = groups.trace(measure_workspace=False).graph
    assert len(graph.users_of[graph.tensor_index["lr[0]"]]) == 1
    assert "0.weight.momentum_buffer" not in state(graph)
    assert "0.bias.momentum_buffer" in state(graph)
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


def test_what_is_not_trained_is_only_read():
    """Frozen parameters, buffers that stay, and constants are state without a replacement.

    One node updates the statistics of a batch norm, after its backward: it may run again.
    """
    graph = of_residual()
    names = {f"1.bn.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert names <= replaced(graph)
    (update,) = {graph.node_of[graph.replacement_of[graph.tensor_index[n]]] for n in names}
    backward = [k for k, node in enumerate(graph.nodes) if node.op == "native_batch_norm_backward"]
    assert max(backward) < update
    assert graph.nodes[graph.node_index["1.bn/_native_batch_norm_legit_functional"]].recomputable
    graph = whole(frozen_step())
    assert state(graph) == {"0.weight": 64, "0.bias": 16, "1.weight": 64, "1.bias": 16}
    assert replaced(graph) == {"1.weight", "1.bias"}
    graph = whole(STEPS["evaluation mode"]())
    assert {"1.running_mean", "1.running_var"} <= state(graph).keys() - replaced(graph)
    graph = whole(STEPS["a literal tensor"]())
    assert len(state(graph)) == len(replaced(graph)) + 1
    assert "1.weight" not in state(whole(STEPS["unused"]()))  # nothing reads it


def test_updates_need_no_memory_but_that_of_their_gradient():
    """A gradient that others read too is copied, where the update would write over it."""
    assert not any(n.workspace_bytes for n in of_residual("adam").nodes if n.op == "adam")

    def found(name, step):
        return [n.workspace_bytes for n in whole(step, name).nodes if n.op in ("sgd", "adam")]

    assert found("sgd", shared_gradient()) == [0, 0]
    assert found("nesterov", shared_gradient()) == [48, 0]
    assert found("adam", shared_gradient()) == [48, 0]
    assert found("sgd", transposed_gradient()) == [48]  # as eager keeps it


def test_costs_are_measured_and_estimated(tmp_path):
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


@pytest.mark.parametrize("name", [pytest.param("nesterov", marks=pytest.mark.slow), "amsgrad"])
def test_steps_on_the_meta_device_have_graphs(name):
    """Tensors with shapes but without numbers have the same nodes and state."""
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


def hooked(parameters):
    """Return an optimizer with a hook."""
    optimizer = SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.Adadelta, "expected SGD, .* or Muon of torch.optim, got .*.Adadelta"),
        (lambda p: Own(p, lr=0.1), "expected SGD.* got .*Own"),
        (lambda _: "sgd", "got 'sgd'"),
        (lambda p: ADAM(p, capturable=True), "group 0: capturable=True cannot be traced; leave it"),
        (torch.optim.LBFGS, "LBFGS computes the loss a varying number of times.* in its closure"),
        (lambda p: ADAM(p, lr=torch.tensor(0.5)), "group 0: lr is a tensor; .* such as lr=0.5"),
        (lambda p: ADAM([{"params": p, "lr": "0.5"}]), "group 0: lr: expected a number, got '0.5'"),
        (lambda p: SGD(p, lr=0.1, differentiable=True), "differentiable=True"),
        (hooked, "it has hooks on its steps"),
        (lambda p: SGD(list(p)[:1], lr=0.1), "0.bias requires a gradient, but the optimizer"),
        (lambda p: SGD([*p, torch.zeros(1)], lr=0.1), "parameters belong neither to the model"),
    ],
)  # fmt: skip
def test_other_optimizers_are_refused(make, message):
    """The error states the accepted optimizers, or a remedy."""
    step = row_step(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=f"optimizer: .*{message}"):
        trace(*step, optimizer=make(step[0].parameters()), measure_workspace=False)


def test_other_norms_of_gradients_are_refused():
    """Those that are no number above 0, and any without an optimizer."""
    step = row_step(nn.Linear(4, 4))
    optimizer = SGD(step[0].parameters(), lr=0.1)
    for clip in (0, -1.0, "1", True):
        with pytest.raises(CaptureError, match="clip_grad_norm: expected a number above 0, got"):
            trace(*step, optimizer=optimizer, clip_grad_norm=clip)
    with pytest.raises(CaptureError, match="clip_grad_norm: needs an optimizer"):
        trace(*step, clip_grad_norm=1.0)


def input_with_gradient():
    """Return a step whose input requires a gradient."""
    step = row_step(nn.Linear(4, 4))
    step[2][0].requires_grad_()
    return step


def views_of_one():
    """Return a step of two weights that are views of one tensor."""
    flat = torch.randn(32)
    parts = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
    for part, values in zip(parts, flat.chunk(2), strict=True):
        part.weight = nn.Parameter(values.view(4, 4))
    return row_step(*parts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (input_with_gradient, r"inputs\[0\] requires a gradient"),
        (lambda: row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x.mul_(2))),
         r"inputs\[0\] is changed"),
        (views_of_one, "0.weight and 1.weight share memory; use separate tensors"),
        (lambda: (FunctionModule(lambda p, x: p[0](x).abs(),
                                 nn.Linear(4, 4, dtype=torch.complex64)),
                  nn.functional.mse_loss,
                  (torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4))), "is complex"),
    ],
)  # fmt: skip
def test_steps_that_updates_do_not_fit_are_refused(make, message):
    """The error states why a step with updates would be wrong or lose results."""
    step = make()
    with pytest.raises(CaptureError, match=f"optimizer: .*{message}"):
        trace(*step, optimizer=SGD(step[0].parameters(), lr=0.1), measure_workspace=False)


# -- operators in place: the same bits, in the memory of the input ---------------------------------
CAPTURE_LOCK = ["relu", "gelu", "silu", "sigmoid", "tanh", "exp", "neg", "softplus"]
PAIRS = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.gelu_backward.default, aten.silu_backward.default, aten.tanh_backward.default),
    *(aten.sigmoid_backward.default, aten.hardsigmoid_backward.default),
)
CALLS = {
    **{getattr(aten, name).default: ("x",) for name in CAPTURE_LOCK},
    **dict.fromkeys(PAIRS, ("x", "x")),
    aten.hardtanh.default: ("x", 0.0, 1.0),
    aten.clamp_min.default: ("x", 0.1),
    aten.pow.Tensor_Scalar: ("x", 2),
    aten.mul.Scalar: ("x", 0.37),
    aten.where.self: ("mask", "x", "x"),
    aten.threshold_backward.default: ("x", "x", 0),
    aten.hardtanh_backward.default: ("x", "x", 0.0, 1.0),
    aten.elu_backward.default: ("x", 1.0, 1.0, 1.0, False, "x"),
    aten.leaky_relu_backward.default: ("x", "x", 0.1, False),
    aten.softplus_backward.default: ("x", "x", 1.0, 20.0),
    aten.softshrink_backward.default: ("x", "x", 0.5),
    aten.log_sigmoid_backward.default: ("x", "x", "x"),
    aten.mse_loss_backward.default: ("one", "x", "x", 1),
    aten.smooth_l1_loss_backward.default: ("one", "x", "x", 1, 1.0),
    aten.huber_loss_backward.default: ("one", "x", "x", 1, 1.0),
    aten.native_dropout_backward.default: ("x", "mask", 1 / 0.7),
}
"""Operators, and what to call them with: tensors of one shape, a mask, a tensor of one element."""

SHAPES = {"a row": (37,), "an image": (2, 5, 7, 3), "channels last": (2, 5, 7, 3)}


def tensors(name, kind):
    """Return a function that makes the operands of operators."""
    layout = torch.channels_last if name == "channels last" else torch.contiguous_format
    shape = SHAPES[name]
    return {
        "x": lambda: torch.randn(shape).to(kind).contiguous(memory_format=layout),
        "mask": lambda: (torch.rand(shape) > 0.3).contiguous(memory_format=layout),
        "one": lambda: torch.tensor(0.7, dtype=kind),
    }


def watched(kernel, values):
    """Return how much memory a call makes, and its result."""
    found = []
    known = [value for value in values if isinstance(value, torch.Tensor)]
    grown = storage_peak_bytes(lambda: found.append(kernel(*values)), known)
    return grown, found[0]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("operator", CALLS, ids=str)
def test_the_same_bits_in_the_memory_of_the_input(operator, layout, kind):
    """For every input that may be written over: the result lies there, and no memory is made."""
    made = tensors(layout, kind)
    graph = torch.fx.Graph()
    node = graph.call_function(operator, CALLS[operator])
    values = [made.get(each, lambda each=each: each)() for each in CALLS[operator]]
    expected = execute_kernel(node, tuple(values), {})
    written = 0
    for place, value in enumerate(values):
        kernel = in_place_kernel(node, place) if CALLS[operator][place] == "x" else None
        if kernel is None:
            continue
        own = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
        grown, found = watched(kernel, own)
        assert grown <= 8  # a factor of dropout
        assert storage_key(found) == storage_key(own[place])
        assert torch.equal(found, expected)
        assert found.stride() == value.stride()
        written += 1
    assert written


def pairs(graph):
    """Return all pairs of a graph, output and input."""
    return {y: x for node in graph.nodes for y, x in node.in_place}


@pytest.mark.parametrize(
    "by",
    [
        lambda p, x: p[0](x + p[1](x)),  # an input of the model
        lambda p, x: p[0](x) + p[1](x).t().reshape(3, 4),  # behind a view, in other strides
        lambda p, x: p[0](x)[:, :1] + p[1](x).detach(),  # of another shape
        lambda p, x: p[0](x) + (p[1].weight[:3] * 2),
    ],
)
def test_inputs_state_and_views_are_not_written_over(by):
    """Whatever the pairs are: givers are made by operations, of the same bytes, and die there."""
    step = row_step(nn.Linear(4, 4), nn.Linear(4, 4), by=by)
    trace = Twins(step, OPTIMIZERS["sgd"]).trace(measure_workspace=False)
    graph = trace.graph
    for k, node in enumerate(graph.nodes):
        for y, x in graph.in_place_of[k]:
            maker = graph.nodes[graph.node_of[x]]
            assert maker.phase not in ("state", "input")
            assert graph.tensor_bytes[x] == graph.tensor_bytes[y]
            assert graph.users_of[x][-1] == k, node.name


def test_what_nothing_reads_later_is_written_over():
    """The input of an activation is overwritten, unless a later node reads it; not the loss."""
    layers = (nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    found = pairs(whole(row_step(*layers)))
    assert found["1/relu"] == "0/addmm"
    assert found["1/threshold_backward"] == "2/mm"
    assert found["loss/mse_loss_backward"] == "4/addmm"
    assert "3/silu" not in found
    assert "3/silu_backward" in found
    twins = Twins(
        (row_step(nn.Linear(4, 4))[0], lambda y, t: ((y - t) ** 2).sum() * 2, row_step()[2]),
        OPTIMIZERS["sgd"],
    )
    graph = twins.trace(measure_workspace=False).graph
    last = [node for node in graph.nodes if node.phase == "loss"][-1]
    assert last.outputs[0].bytes == 4
    assert last.outputs[0].name not in pairs(graph).values()
