"""Kernels give what eager does, and memory is measured."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.traced_models import Residual, images, rows  # noqa: E402
from poetmodel.torch import trace  # noqa: E402
from poetmodel.torch.capturing import replay as interpreter  # noqa: E402
from poetmodel.torch.capturing.replay import (  # noqa: E402
    call,
    heap_peak_bytes,
    kernel_of,
    replay,
    sampled,
    storage_peak_bytes,
)

if TYPE_CHECKING:
    from torch import fx

nn = torch.nn
pytestmark = pytest.mark.torch


aten = torch.ops.aten


def dropout_nodes(p: float) -> tuple[fx.Node, fx.Node]:
    """Return the nodes of dropout and its backward in a graph of the two."""
    graph = torch.fx.Graph()
    x, grad = graph.placeholder("x"), graph.placeholder("grad")
    forward = graph.call_function(aten.native_dropout.default, (x, p, True))
    mask = graph.call_function(operator.getitem, (forward, 1))
    scale = 0.0 if p == 1 else 1 / (1 - p)
    backward = graph.call_function(aten.native_dropout_backward.default, (grad, mask, scale))
    return forward, backward


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return images of another layout in memory."""
    if layout == "channels_last":
        return x.to(memory_format=torch.channels_last)
    if layout == "transposed":
        return x.transpose(2, 3)
    if layout == "sliced":
        return x[:, ::2]
    return x[:1].expand(4, 6, 5, 5) if layout == "expanded" else x


def test_other_operations_are_their_own_kernels() -> None:
    """Whatever needs no other kernel is called as it is."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for target in (aten.mm.default, max):
        assert kernel_of(graph.call_function(target, (x, x))) is target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layout", ["contiguous", "channels_last", "transposed", "sliced", "expanded"]
)
@pytest.mark.parametrize("p", [0.15, 0.3, 0.45, 0.5, 1.0])
def test_dropout_is_that_of_eager(p: float, layout: str, dtype: torch.dtype) -> None:
    """Values, types, strides and draws are eager's for every layout, infinities and NaN too."""
    torch.manual_seed(1)
    x = laid_out(torch.randn(4, 6, 5, 5).to(dtype), layout).detach().requires_grad_()
    grad = torch.randn(4, 6, 5, 5).to(dtype)
    grad[0, 0, 0, 0], grad[0, 0, 0, 1], grad[0, 0, 0, 2] = torch.inf, torch.nan, -0.0
    grad = laid_out(grad, layout)
    state = torch.get_rng_state()
    expected = nn.functional.dropout(x, p, training=True)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    state_after = torch.get_rng_state()
    torch.set_rng_state(state)
    forward, backward = dropout_nodes(p)
    values, mask = kernel_of(forward)(x.detach(), p, True)
    found_grad = kernel_of(backward)(grad, mask, backward.args[2])
    assert torch.equal(torch.get_rng_state(), state_after)
    assert mask.dtype == torch.bool
    for one, other in ((values, expected), (found_grad, expected_grad)):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
        assert one.stride() == other.stride()
        assert one.dtype == dtype


def test_backward_of_a_mask_from_elsewhere_takes_the_scale() -> None:
    """Where the graph does not say how a mask was drawn, its scale does."""
    graph = torch.fx.Graph()
    grad, mask = graph.placeholder("grad"), graph.placeholder("mask")
    node = graph.call_function(aten.native_dropout_backward.default, (grad, mask, 2.0))
    found = kernel_of(node)(torch.ones(2), torch.tensor([True, False]), 2.0)
    assert found.tolist() == [2.0, 0.0]


def test_dropout_makes_its_results_and_nothing_else() -> None:
    """What is taken beside results is a few numbers, where PyTorch takes another tensor."""
    x = torch.randn(1024)
    forward, backward = dropout_nodes(0.3)
    mask = torch.rand(1024) > 0.3
    assert heap_peak_bytes(lambda: kernel_of(forward)(x, 0.3, True)) < 5 * 1024 + 64
    assert heap_peak_bytes(lambda: kernel_of(backward)(x, mask, 2.0)) < 4096 + 64
    assert heap_peak_bytes(lambda: backward.target(x, mask, 2.0)) >= 2 * 4096


def encoder() -> tuple[Any, ...]:
    """Return a step of three equal layers of attention and a feed-forward part."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    inputs = (torch.randn(2, 5, 16), torch.randn(2, 5, 16))
    return nn.TransformerEncoder(layer, 3), nn.functional.mse_loss, inputs


def blocks() -> tuple[Any, ...]:
    """Return a step of three equal blocks of convolution and batch norm."""
    return images(nn.Sequential(*(Residual(4) for _ in range(3))), size=6)


def wide() -> tuple[Any, ...]:
    """Return a step of three equal layers with dropout, whose tensors are large."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    inputs = (torch.randn(256, 256), torch.randn(256, 256))
    return nn.Sequential(*layers), nn.functional.mse_loss, inputs


def test_what_makes_large_tensors_is_executed_once() -> None:
    """Also element by element, and with random numbers; views of them are not."""
    like = sampled(trace(*wide(), measure_workspace=False).joint, call)
    found = [str(node.target) for node in like]
    assert found.count("aten.gelu.default") == 2
    assert found.count("aten.native_dropout.default") == 2
    assert found.count("aten.gelu_backward.default") == 2
    assert "aten.t.default" not in found


@pytest.mark.parametrize("make", [encoder, blocks, wide])
def test_equal_operations_are_executed_once(make: Any) -> None:
    """Of three equal layers one computes; what the others would make has the same form."""
    joint = trace(*make(), measure_workspace=False).joint
    executed: list[Any] = []
    forms: dict[Any, Any] = {}

    def execute(node: Any, *given: Any) -> Any:
        executed.append(node)
        return call(node, *given)

    def checked(node: Any, *given: Any) -> Any:
        value = call(node, *given)
        forms[node] = interpreter.form_of(value)
        return value

    replay(joint, checked)
    like = sampled(joint, execute)
    nodes = [node for node in joint.graph_module.graph.nodes if node.op == "call_function"]
    assert sorted((*executed, *like)) == sorted(nodes)
    heavy = [node for node in nodes if interpreter.is_counted(node)]
    assert len(like) >= len(heavy) // 2
    assert all(forms[node] == forms[first] for node, first in like.items())


@pytest.mark.slow
@pytest.mark.parametrize("make", [encoder, blocks, wide])
def test_units_and_workspaces_are_those_of_a_full_run(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is the same whether equal operations run once or each time."""
    step = make()
    graph = trace(*step).graph
    monkeypatch.setattr(interpreter, "is_counted", lambda _: False)
    monkeypatch.setattr(interpreter, "LARGE_BYTES", 2**60)
    assert trace(*step).graph == graph


def test_operations_that_fail_on_copies_get_their_own_values() -> None:
    """A product that an operation can work on is not taken for an equal one that it cannot."""

    def grow(x: torch.Tensor) -> torch.Tensor:
        if x.trace() < 0:
            raise ValueError("the trace is negative")
        return x * 2

    operation = torch.library.custom_op(
        "poetmodel_test::grow", grow, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operation.register_fake(torch.empty_like)
    operation.register_autograd(lambda _, grad: grad * 2)

    def forward(p: Any, x: torch.Tensor) -> torch.Tensor:
        one, two = p[0].weight, p[1].weight
        product = one @ -one.T
        return x @ (product + operation(two @ two.T))

    traced = trace(*rows(nn.Linear(4, 4), nn.Linear(4, 4), by=forward))
    assert any(node.op.endswith("grow") for node in traced.graph.nodes)
    assert not sampled(traced.joint, call)


def test_workspace_is_what_the_operation_frees_again(capfd: pytest.CaptureFixture[str]) -> None:
    """An operation that needs a scratch tensor of a known size is charged with just that."""
    scratch = 1000

    def add_the_sum_of_ones(x: Any) -> Any:
        return x + torch.ones(scratch, dtype=torch.float64).sum().to(x.dtype)

    operation = torch.library.custom_op(
        "poetmodel_test::scratch",
        add_the_sum_of_ones,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    operation.register_fake(torch.empty_like)
    operation.register_autograd(lambda _, grad: grad)
    step = rows(torch.nn.Linear(4, 4), by=lambda p, x: operation(p[0](x)))
    graph = trace(*step).graph
    (node,) = (node for node in graph.nodes if node.op.endswith("scratch"))
    # At its peak it has the ones and their sum; its output comes after and fits in their place.
    assert node.workspace_bytes + node.output_bytes == (scratch + 1) * 8
    assert "USDT" not in capfd.readouterr().err


def test_a_form_is_measured_once_with_full_caches() -> None:
    """What takes a workspace runs again, for the first time is not the usual one."""
    runs: list[int] = []

    def scratch(x: torch.Tensor) -> torch.Tensor:
        runs.append(len(x))
        return x + torch.ones(500 if len(runs) > 1 else 4000).sum()

    operation = torch.library.custom_op(
        "poetmodel_test::cached", scratch, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operation.register_fake(torch.empty_like)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    target = torch.ops.poetmodel_test.cached.default
    first, second = graph.call_function(target, (x,)), graph.call_function(target, (x,))
    workspaces = interpreter.Workspaces()
    for node in (first, second):
        value = workspaces(node, (torch.zeros(8),), {})
        assert value.tolist() == [500.0] * 8
    assert workspaces.sizes_bytes[first] == workspaces.sizes_bytes[second]
    assert 2000 <= workspaces.sizes_bytes[first] + 8 * 4 <= 2000 + 8 * 4 + 4
    assert len(runs) == 3


def work() -> None:
    """Hold 3 MB at most: two tensors of 1 MB, and their sum before the first is let go."""
    one = torch.ones(250_000)
    two = one + 1
    three = one + two
    del one, two
    four = three.view(500, 500).t()
    del three
    assert four.numel() == 250_000


def test_heap_peak_is_the_highest_total() -> None:
    """What is let go counts no more, and what was there before does not count."""
    held = torch.ones(1000)
    assert heap_peak_bytes(work) == pytest.approx(3_000_000, abs=1000)
    assert held.numel() == 1000


def test_storage_peak_counts_each_storage_once() -> None:
    """Views take nothing, and what is known does not count."""
    assert storage_peak_bytes(work, ()) == 3_000_000
    known = torch.ones(10)
    assert storage_peak_bytes(lambda: known.add_(1), [known]) == 0
    assert storage_peak_bytes(lambda: known + 1, [known]) == 40
