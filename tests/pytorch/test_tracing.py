"""Tracing: training graphs, their units, the scheduled part; traced files."""

from pathlib import Path

import pytest
import torch

from kit.networks import residual_step
from kit.traced_models import (
    STEPS,
    checkpointed_step,
    frozen_step,
    residual,
    row_step,
    trace_residual,
)
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph, Phase, checkpoint_all_peak_bytes
from poetmodel.problem import Problem
from poetmodel.torch import compile, trace
from poetmodel.torch.capturing.joint_graph import InputKind, OutputKind
from poetmodel.torch.step.scheduled import (
    RANDOM_STATE_BYTES,
    build_scheduled_graph,
    floor_bytes,
    keep_all_bytes,
    select_costs,
)

nn = torch.nn


def test_figures_of_one_layer():
    """A linear layer on 3 rows of 4, and a sum weighted by the target: every figure by hand."""
    model, _, inputs = row_step(nn.Linear(4, 4))
    graph = trace(
        model, lambda y, t: (y * t).sum(), inputs, name="layer", measure_workspace=False
    ).graph
    figures = [(n.op, n.output_bytes, n.flops, n.bytes_moved, n.inputs) for n in graph.nodes]
    rows_b, weight_b, bias_b = 3 * 4 * 4, 4 * 4 * 4, 4 * 4
    assert figures == [
        # 2 * 3 * 4 * 4 FLOP; reads bias, rows and weight, writes rows.
        ("addmm", rows_b, 96, bias_b + weight_b + 2 * rows_b, ()),
        ("mul", rows_b, 12, 3 * rows_b, ("0/addmm",)),
        ("sum", 4, 12, rows_b + 4, ("loss/mul",)),
        # The gradient that arrives is one number, seen as rows.
        ("mul", rows_b, 12, 4 + 2 * rows_b, ()),
        ("mm", weight_b, 96, 2 * rows_b + weight_b, ("loss/mul#2",)),
        ("sum", bias_b, 12, rows_b + bias_b, ("loss/mul#2",)),
    ]
    assert (graph.name, graph.batch_size, graph.dtype) == ("layer", 3, "float32")
    assert graph.resident_bytes == {"parameters": 80, "gradients": 80}
    assert (graph.parameters, graph.forward_macs) == (20, 48)
    # Output gradient and weight gradient; nothing of the forward pass is kept for them.
    assert checkpoint_all_peak_bytes(graph) == rows_b + weight_b
    # Each gradient of a depthwise convolution costs what the convolution itself does.
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, groups=4), torch.nn.Flatten())
    graph = trace(model, lambda y, _: y.sum(), (torch.randn(1, 4, 5, 5), torch.zeros(1))).graph
    flops = {node.op: node.flops for node in graph.nodes}
    assert flops["convolution"] == flops["convolution_backward"] == 2 * 4 * 9 * 9


def test_resident_bytes_of_frozen_layers_and_buffers():
    """Frozen parameters have no gradients; buffers are in memory like parameters.

    Training only the last layer needs fewer operations and a lower peak.
    """
    traced, both = (
        trace(*step, measure_workspace=False)
        for step in (frozen_step(), row_step(nn.Linear(4, 4), nn.Linear(4, 4)))
    )
    graph = traced.graph
    assert graph.resident_bytes == {"parameters": 160, "gradients": 80}
    assert graph.parameters == 20
    assert len(graph.nodes) < len(both.graph.nodes)
    assert keep_all_bytes(traced) < keep_all_bytes(both)
    step = residual()
    held = sum(t.numel() * t.element_size() for t in step[0].state_dict().values())
    trained = sum(p.numel() * 4 for p in step[0].parameters())
    traced = trace(*step, measure_workspace=False)
    assert traced.graph.resident_bytes == {"parameters": held, "gradients": trained}


def test_meta_device_needs_no_memory():
    """On the meta device, the graph is the same, and nothing is computed."""
    parts = (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    inputs = (torch.randn(2, 4, 6, 6), torch.randn(2, 4, 4, 4))
    real, meta = (
        trace(
            nn.Sequential(*parts).to(device),
            lambda y, t: (y * t).sum(),
            tuple(tensor.to(device) for tensor in inputs),
            measure_workspace=device == "meta",
        )
        for device in ("cpu", "meta")
    )
    assert meta.graph == real.graph
    assert all(node.workspace_bytes == 0 for node in meta.graph.nodes)


def test_all_computed_tensors_are_decided_on():
    """However small; with updates, all but state and inputs, and costs are the others'."""
    traced = trace_residual()
    small = build_scheduled_graph(traced, budget_bytes=keep_all_bytes(traced) - 1)
    assert small.graph is traced.graph
    # One random operation, and the step's own state twice: to restore it, and as a result.
    assert small.reserved_bytes == traced.held_bytes + 3 * RANDOM_STATE_BYTES
    model, loss_fn, inputs = residual_step(widths=(8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    traced = trace(model, loss_fn, inputs, optimizer=optimizer)
    scheduled = build_scheduled_graph(traced, budget_bytes=0)
    operations = traced.step_graph.operations
    computed = {
        storage.name
        for storage in traced.step_graph.storages
        if not operations[storage.operation].is_source and storage.replaces is None
    }
    decided = {tensor.name: tensor.bytes for tensor in scheduled.graph.tensors}
    assert computed <= decided.keys()
    assert not any(size for name, size in decided.items() if name not in computed)
    costs = Costs.estimate(traced.graph, Device.load("rpi4b"))
    table = select_costs(costs, scheduled.graph).table(scheduled.graph)
    whole = costs.table(traced.graph)
    assert table.page_in_time_s == tuple(whole.page_in_time_s[i] for i in scheduled.storage_indices)
    assert select_costs(Costs(compute=costs.compute), scheduled.graph).pages is None


def test_results_that_wait_are_reserved():
    """Copies of the loss and of new statistics."""
    traced = trace_residual()
    assert traced.held_bytes == 4 + 16 + 16 + 8
    whole = build_scheduled_graph(traced, budget_bytes=keep_all_bytes(traced))
    assert whole.graph is traced.graph
    # A loss, mean and variance of 4 channels, and a counter of 8 bytes.
    assert whole.reserved_bytes == 4 + 16 + 16 + 8 + RANDOM_STATE_BYTES
    expected = checkpoint_all_peak_bytes(traced.graph) + whole.reserved_bytes
    assert keep_all_bytes(traced) == expected
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight  # whose gradients the step itself adds
    traced = trace(*row_step(first, second), measure_workspace=False)
    whole = build_scheduled_graph(traced, budget_bytes=keep_all_bytes(traced))
    assert whole.reserved_bytes == 4


def test_step_near_the_floor_keeps_its_budget(tmp_path):
    """A step a little above the floor, below which there is no plan, is within its budget."""
    own = residual_step(widths=(8,))
    budget = floor_bytes(build_scheduled_graph(trace(*own), budget_bytes=0)) + 256
    with compile(*own, ram=budget, storage=str(tmp_path), device="rpi4b", time_limit=5) as step:
        certificate = step.verify()
    assert certificate.equal
    assert certificate.heap_peak_bytes <= budget


# -- units: what is scheduled, what it is called, and what it reads --------------------------------
def test_storages_and_results_are_those_of_the_operations():
    """Batch norm has five outputs, dropout two; results exist after their unit has run.

    Element type, shape, stride and offset state how an output lies in its storage. A view has
    neither node nor tensor; its readers name the tensor behind it.
    """
    traced = trace_residual()
    parts = traced.step_graph
    made = {
        unit.op: [parts.storages[index].bytes for index in unit.storages]
        for unit in parts.operations
        if unit.op in {"_native_batch_norm_legit_functional", "native_dropout"}
    }
    image = 2 * 4 * 4 * 4
    assert made == {
        "_native_batch_norm_legit_functional": [4 * image, 16, 16, 16, 16],
        "native_dropout": [4 * image, image],
    }
    last = trace(*STEPS["channels last"](), measure_workspace=False).step_graph
    (layout,) = last.storages[last.operations[0].storages[0]].layouts
    assert (layout.shape, layout.stride) == ((2, 4, 4, 4), (64, 1, 16, 4))
    assert (layout.dtype, layout.offset, layout.position) == (torch.float32, 0, None)
    for output in traced.outputs:
        makers = [traced.step_graph.storages[index].operation for index in output.reads.storages]
        assert output.last_operation == max(makers)
    purposes = {output.result.kind for output in traced.outputs}
    assert purposes == {OutputKind.LOSS, OutputKind.GRADIENT, OutputKind.MUTATION}
    sources = {argument.kind for argument in traced.joint.arguments}
    assert sources == {
        InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT, InputKind.TANGENT,
    }  # fmt: skip
    model, loss_fn, inputs = row_step(nn.Linear(4, 4), by=lambda p, x: p[0](x).t().relu().t())
    parts = trace(model, loss_fn, inputs, measure_workspace=False).step_graph
    assert [unit.op for unit in parts.operations[:2]] == ["addmm", "relu"]
    relu = parts.operations[1]
    assert relu.reads.storages == parts.operations[0].storages
    assert [view.name for view in relu.reads.views] == ["t_1"]


NAMES = [
    *((name, Phase.FORWARD) for name in (
        "0/convolution", "1.conv/convolution", "1.bn/add",
        "1.bn/_native_batch_norm_legit_functional", "1/add", "1/relu", "2/native_dropout",
        "4/addmm",
    )),
    *((f"loss/{name}", Phase.LOSS) for name in ("_log_softmax", "nll_loss_forward")),
    *((name, Phase.BACKWARD) for name in (
        "loss/nll_loss_backward", "loss/_log_softmax_backward_data", "4/mm", "4/mm#2", "4/sum",
        "2/native_dropout_backward", "1/threshold_backward", "1.bn/native_batch_norm_backward",
        "1.conv/convolution_backward", "1/add#2", "0/convolution_backward",
    )),
]  # fmt: skip


def test_names_say_module_and_operator():
    """Each node has the name of its module and operator, and the same in each run.

    The sum of a residual block's gradients has one, too. A repetition in a module gets a
    number; an operation that a user's checkpoint would compute twice is there once.
    """
    graph = trace_residual().graph
    assert [(node.name, node.phase) for node in graph.nodes] == NAMES
    assert trace(*residual(), measure_workspace=False).graph.sha256 == graph.sha256
    step = row_step(nn.Linear(4, 4), by=lambda p, x: p[0](p[0](x)))
    names = [node.name for node in trace(*step, measure_workspace=False).graph.nodes]
    assert names[:2] == ["parts.0/addmm", "parts.0/addmm#2"]
    graph = trace(*checkpointed_step(), measure_workspace=False).graph
    assert [node.op for node in graph.nodes].count("native_dropout") == 1


class Wave(torch.autograd.Function):
    """A function with a gradient written by hand."""

    @staticmethod
    def forward(ctx, x):
        """Return the sines of numbers."""
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient of the numbers."""
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Waves(nn.Module):
    """A layer that calls a function."""

    def forward(self, x):
        """Return the sines of numbers."""
        return Wave.apply(x)


def test_nodes_of_an_autograd_function_have_their_module():
    """Those of its gradient too."""
    step = row_step(nn.Linear(4, 4), nn.Sequential(Waves()))
    nodes = trace(*step, measure_workspace=False).graph.nodes
    names = [node.name for node in nodes if node.op in ("sin", "cos")]
    assert names == ["1.0/sin", "1.0/cos"]


# -- the traced graphs under ``bench/traced`` ------------------------------------------------------
TRACED = Path(__file__).parents[2] / "bench" / "traced"
SIZES = {
    "resnet18-b8": (160, 300, 56.7e6),
    "vgg16-b8": (117, 227, 39.6e6),
    "bert4-b8": (266, 316, 95.5e6),
}
"""Nodes, tensors, and the keep-all peak [B]."""
MODELS = (
    *("bert12", "efficientnet-b0", "gpt2", "llama", "mamba", "mixer", "mobilenetv2", "swin", "t5"),
    *("unet2d", "vit", "whisper"),
)
"""Captures of models as people train them; some are there with an optimizer too."""
WHOLE = ("gpt2", "llama", "mixer", "swin", "t5", "vit")
CAPTURES = (*SIZES, *(f"models/{name}" for name in MODELS), *(f"whole-steps/{n}" for n in WHOLE))


@pytest.mark.parametrize(
    "names", [tuple(SIZES), pytest.param(CAPTURES, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_every_traced_graph_is_a_problem(names):
    """Each has its profile, which fits it, and 150 nodes or the sizes of its network."""
    files = {f"{name}.{kind}" for name in CAPTURES for kind in ("graph.json", "profile.csv")}
    found = (path for path in TRACED.rglob("*") if path.is_file())
    assert {path.relative_to(TRACED).as_posix() for path in found} == files | {"README.md"}
    for name in names:
        graph = Graph.load(TRACED / f"{name}.graph.json")
        assert graph.name == name.rpartition("/")[2]
        if name in SIZES:
            nodes, tensors, whole = SIZES[name]
            assert (len(graph.nodes), len(graph.tensors), graph.batch_size) == (nodes, tensors, 8)
            assert checkpoint_all_peak_bytes(graph) == pytest.approx(whole, rel=0.01)
        assert len(graph.nodes) >= 150 or name in SIZES
        assert bool(graph.state_tensors) == name.startswith("whole-steps/")
        costs = Costs.load(TRACED / f"{name}.profile.csv")
        assert Problem(graph, costs, ram="50%").pass_time_s > 0
