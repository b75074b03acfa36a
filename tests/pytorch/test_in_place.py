"""Operators in place: the same bits, in the memory of the input, and only where that is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.optimizer_steps import OPTIMIZERS, Twins  # noqa: E402
from kit.traced_models import rows  # noqa: E402
from poetmodel.torch.capturing.replay import call, storage_key, storage_peak_bytes  # noqa: E402
from poetmodel.torch.step.in_place import kernel_in_place  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.graph import Graph

nn = torch.nn
functional = torch.nn.functional
aten = torch.ops.aten
pytestmark = pytest.mark.torch

CALLS: dict[Any, tuple[Any, ...]] = {
    aten.relu.default: ("x",),
    aten.gelu.default: ("x",),
    aten.silu.default: ("x",),
    aten.hardtanh.default: ("x", 0.0, 1.0),
    aten.sigmoid.default: ("x",),
    aten.tanh.default: ("x",),
    aten.exp.default: ("x",),
    aten.neg.default: ("x",),
    aten.softplus.default: ("x",),
    aten.clamp_min.default: ("x", 0.1),
    aten.pow.Tensor_Scalar: ("x", 2),
    aten.add.Tensor: ("x", "x"),
    aten.sub.Tensor: ("x", "x"),
    aten.mul.Tensor: ("x", "x"),
    aten.div.Tensor: ("x", "x"),
    aten.mul.Scalar: ("x", 0.37),
    aten.where.self: ("mask", "x", "x"),
    aten.threshold_backward.default: ("x", "x", 0),
    aten.gelu_backward.default: ("x", "x"),
    aten.silu_backward.default: ("x", "x"),
    aten.tanh_backward.default: ("x", "x"),
    aten.sigmoid_backward.default: ("x", "x"),
    aten.hardtanh_backward.default: ("x", "x", 0.0, 1.0),
    aten.hardsigmoid_backward.default: ("x", "x"),
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


def tensors(name: str, kind: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what makes the tensors that operators are called with."""
    layout = torch.channels_last if name == "channels last" else torch.contiguous_format
    shape = SHAPES[name]
    return {
        "x": lambda: torch.randn(shape).to(kind).contiguous(memory_format=layout),
        "mask": lambda: (torch.rand(shape) > 0.3).contiguous(memory_format=layout),
        "one": lambda: torch.tensor(0.7, dtype=kind),
    }


def watched(kernel: Any, values: list[Any]) -> tuple[int, torch.Tensor]:
    """Return how much memory a call makes, and its result."""
    found: list[torch.Tensor] = []
    known = [value for value in values if isinstance(value, torch.Tensor)]
    grown = storage_peak_bytes(lambda: found.append(kernel(*values)), known)
    return grown, found[0]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("operator", CALLS, ids=str)
def test_the_same_bits_in_the_memory_of_the_input(
    operator: Any, layout: str, kind: torch.dtype
) -> None:
    """For every input that may be written over: the result lies there, and no memory is made."""
    torch.manual_seed(1)
    made = tensors(layout, kind)
    graph = torch.fx.Graph()
    node = graph.call_function(operator, CALLS[operator])
    values = [made.get(each, lambda each=each: each)() for each in CALLS[operator]]
    expected = call(node, tuple(values), {})
    written = 0
    for place, value in enumerate(values):
        kernel = kernel_in_place(node, place) if CALLS[operator][place] == "x" else None
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


def traced(*parts: nn.Module) -> Graph:
    """Return the graph of a step on rows."""
    return Twins(rows(*parts), OPTIMIZERS["sgd"]).trace(measure_workspace=False).graph


def pairs(graph: Graph) -> dict[str, str]:
    """Return all pairs of a graph, output and input."""
    return {y: x for node in graph.nodes for y, x in node.in_place}


def test_chains_of_activations_are_in_place() -> None:
    """What an activation reads is written over where nothing reads it later, backward too."""
    found = pairs(traced(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert found["1/relu"] == "0/addmm"
    assert found["1/threshold_backward"] == "2/mm"
    assert found["loss/mse_loss_backward"] == "2/addmm"


def test_what_is_read_later_is_not_written_over() -> None:
    """The backward of SiLU reads what SiLU read."""
    found = pairs(traced(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4)))
    assert "1/silu" not in found
    assert "1/silu_backward" in found


@pytest.mark.parametrize(
    "by",
    [
        lambda p, x: p[0](x + p[1](x)),  # an input of the model
        lambda p, x: p[0](x) + p[1](x).t().reshape(3, 4),  # behind a view, in other strides
        lambda p, x: p[0](x)[:, :1] + p[1](x).detach(),  # of another shape
        lambda p, x: p[0](x) + (p[1].weight[:3] * 2),
    ],
)
def test_inputs_state_and_views_are_not_written_over(by: Any) -> None:
    """Whatever the pairs are: givers are made by operations, of the same bytes, and die there."""
    step = rows(nn.Linear(4, 4), nn.Linear(4, 4), by=by)
    trace = Twins(step, OPTIMIZERS["sgd"]).trace(measure_workspace=False)
    graph = trace.graph
    for k, node in enumerate(graph.nodes):
        for y, x in graph.in_place_of[k]:
            maker = graph.nodes[graph.node_of[x]]
            assert maker.phase not in ("state", "input")
            assert graph.tensor_bytes[x] == graph.tensor_bytes[y]
            assert graph.users_of[x][-1] == k, node.name


def test_the_loss_is_not_written_over() -> None:
    """What is handed out at the end stays as it is."""
    twins = Twins(
        (rows(nn.Linear(4, 4))[0], lambda y, t: ((y - t) ** 2).sum() * 2, rows()[2]),
        OPTIMIZERS["sgd"],
    )
    graph = twins.trace(measure_workspace=False).graph
    last = [node for node in graph.nodes if node.phase == "loss"][-1]
    assert last.outputs[0].bytes == 4
    assert last.outputs[0].name not in pairs(graph).values()
