"""Kernels have eager's results, especially dropout, and memory is measured."""

import operator
from random import Random

import pytest
import torch

from kit.eager_steps import (
    check_random_plans,
    compile_keep_all,
    find_differences,
    plan_of_trace,
)
from kit.plans import random_program
from kit.rotation import mark_seeds_except
from kit.storage_peaks import storage_peak_bytes
from kit.traced_models import FunctionModule, Residual, image_step, recurrent, row_step
from poetmodel.torch import trace
from poetmodel.torch.capturing import replay as replaying
from poetmodel.torch.capturing.replay import execute_kernel, replay, replay_distinct
from poetmodel.torch.graph import profiles
from poetmodel.torch.graph.operators import has_flop_formula, kernel_of
from poetmodel.torch.graph.profiles import OpProfiler
from poetmodel.torch.graph.tensors import call_key, heap_peak_bytes
from poetmodel.torch.runtime.runner import Runner

nn = torch.nn
aten = torch.ops.aten


def dropout_nodes(p):
    """Return the nodes of dropout and its backward in a graph of the two."""
    graph = torch.fx.Graph()
    x, grad = graph.placeholder("x"), graph.placeholder("grad")
    forward = graph.call_function(aten.native_dropout.default, (x, p, True))
    mask = graph.call_function(operator.getitem, (forward, 1))
    scale = 0.0 if p == 1 else 1 / (1 - p)
    backward = graph.call_function(aten.native_dropout_backward.default, (grad, mask, scale))
    return forward, backward


def laid_out(x, layout):
    """Return images of another layout in memory."""
    if layout == "channels_last":
        return x.to(memory_format=torch.channels_last)
    if layout == "transposed":
        return x.transpose(2, 3)
    if layout == "sliced":
        return x[:, ::2]
    return x[:1].expand(4, 6, 5, 5) if layout == "expanded" else x


def test_other_operations_are_their_own_kernels():
    """Operations without special kernels are called directly.

    If the graph does not state how a mask of dropout was drawn, its scale does. Dropout needs a
    few numbers besides its results, where PyTorch needs another tensor.
    """
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for target in (aten.mm.default, max):
        assert kernel_of(graph.call_function(target, (x, x))) is target
    mask = graph.placeholder("mask")
    node = graph.call_function(aten.native_dropout_backward.default, (x, mask, 2.0))
    assert kernel_of(node)(torch.ones(2), torch.tensor([True, False]), 2.0).tolist() == [2.0, 0.0]
    x = torch.randn(1024)
    forward, backward = dropout_nodes(0.3)
    mask = torch.rand(1024) > 0.3
    assert heap_peak_bytes(lambda: kernel_of(forward)(x, 0.3, True)) < 5 * 1024 + 64
    assert heap_peak_bytes(lambda: kernel_of(backward)(x, mask, 2.0)) < 4096 + 64
    assert heap_peak_bytes(lambda: backward.target(x, mask, 2.0)) >= 2 * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layout", ["contiguous", "channels_last", "transposed", "sliced", "expanded"]
)
@pytest.mark.parametrize("p", [0.15, 0.3, 0.45, 0.5, 1.0])
def test_dropout_is_that_of_eager(p, layout, dtype):
    """Values, types, strides and draws are eager's for every layout, infinities and NaN too."""
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


def encoder():
    """Return a step of three equal layers of attention and a feed-forward part."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    inputs = (torch.randn(2, 5, 16), torch.randn(2, 5, 16))
    return nn.TransformerEncoder(layer, 3), nn.functional.mse_loss, inputs


def blocks():
    """Return a step of three equal blocks of convolution and batch norm."""
    return image_step(nn.Sequential(*(Residual(4) for _ in range(3))), size=6)


def wide():
    """Return a step of three equal layers with dropout, whose tensors are large."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    inputs = (torch.randn(256, 256), torch.randn(256, 256))
    return nn.Sequential(*layers), nn.functional.mse_loss, inputs


def test_what_makes_large_tensors_is_executed_once():
    """Also element by element, and with random numbers; views of them are not."""
    like = replay_distinct(trace(*wide(), measure_workspace=False).joint, execute_kernel)
    found = [str(node.target) for node in like]
    assert found.count("aten.gelu.default") == 2
    assert found.count("aten.native_dropout.default") == 2
    assert found.count("aten.gelu_backward.default") == 2
    assert "aten.t.default" not in found


@pytest.mark.parametrize("make", [pytest.param(encoder, marks=pytest.mark.slow), blocks, wide])
def test_equal_operations_are_executed_once(make):
    """Of three equal layers, one is computed; the results of the others have its form."""
    joint = trace(*make(), measure_workspace=False).joint
    executed = []
    forms = {}

    def execute(node, *given):
        executed.append(node)
        return execute_kernel(node, *given)

    def checked(node, *given):
        value = execute_kernel(node, *given)
        forms[node] = call_key(value)
        return value

    replay(joint, checked)
    like = replay_distinct(joint, execute)
    nodes = [node for node in joint.graph_module.graph.nodes if node.op == "call_function"]
    assert sorted((*executed, *like)) == sorted(nodes)
    heavy = [node for node in nodes if has_flop_formula(node)]
    assert len(like) >= len(heavy) // 2
    assert all(forms[node] == forms[first] for node, first in like.items())


@pytest.mark.slow
@pytest.mark.parametrize("make", mark_seeds_except([encoder, blocks, wide], [blocks]))
def test_units_and_workspaces_are_those_of_a_full_run(make, monkeypatch):
    """The graph is the same whether equal operations run once or each time."""
    step = make()
    graph = trace(*step).graph
    monkeypatch.setattr(replaying, "has_flop_formula", lambda _: False)
    monkeypatch.setattr(replaying, "LARGE_BYTES", 2**60)
    assert trace(*step).graph == graph


def custom(function, factor=1):
    """Return an operation of a user, and the factor of its gradient."""
    operation = torch.library.custom_op(
        f"poetmodel_test::{function.__name__}", function, mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )  # fmt: skip
    operation.register_fake(torch.empty_like)
    operation.register_autograd(lambda _, grad: grad * factor)
    return operation


def test_operations_that_fail_on_copies_get_their_own_values():
    """A product on which an operation succeeds does not replace an equal one on which it fails."""

    def grow(x):
        if x.trace() < 0:
            raise ValueError("the trace is negative")
        return x * 2

    operation = custom(grow, 2)

    def forward(p, x):
        one, two = p[0].weight, p[1].weight
        product = one @ -one.T
        return x @ (product + operation(two @ two.T))

    traced = trace(*row_step(nn.Linear(4, 4), nn.Linear(4, 4), by=forward))
    assert any(node.op.endswith("grow") for node in traced.graph.nodes)
    assert not replay_distinct(traced.joint, execute_kernel)


def test_workspace_is_what_the_operation_frees_again(capfd):
    """An operation that needs a scratch tensor of a known size is charged with just that."""
    scratch = 1000

    def scratched(x):
        return x + torch.ones(scratch, dtype=torch.float64).sum().to(x.dtype)

    operation = custom(scratched)
    step = row_step(torch.nn.Linear(4, 4), by=lambda p, x: operation(p[0](x)))
    graph = trace(*step).graph
    (node,) = (node for node in graph.nodes if node.op.endswith("scratched"))
    # At its peak it has the ones and their sum; its output comes after and fits in their place.
    assert node.workspace_bytes + node.output_bytes == (scratch + 1) * 8
    assert "USDT" not in capfd.readouterr().err


def test_a_form_is_measured_once_with_full_caches():
    """Operations with workspaces run again, because the first time is unusual."""
    runs = []

    def cached(x):
        runs.append(len(x))
        return x + torch.ones(500 if len(runs) > 1 else 4000).sum()

    custom(cached)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    target = torch.ops.poetmodel_test.cached.default
    first, second = graph.call_function(target, (x,)), graph.call_function(target, (x,))
    profiler = OpProfiler()
    sizes_bytes = []
    for node in (first, second):
        value, profile = profiler(node, (torch.zeros(8),), {})
        assert value.tolist() == [500.0] * 8
        sizes_bytes.append(profile.workspace_bytes)
    assert sizes_bytes[0] == sizes_bytes[1]
    assert 2000 <= sizes_bytes[0] + 8 * 4 <= 2000 + 8 * 4 + 4
    assert len(runs) == 3


def test_times_are_those_of_kernels_alone(monkeypatch):
    """Of 3 s in the kernel, between 5 s and 7 s of the profiler, only the 3 s count."""
    clock = [0.0]

    def advance(seconds):
        clock[0] += seconds

    def timed(x):
        advance(3.0)
        return x + 1

    def watched(work):
        advance(5.0)
        peak_bytes = heap_peak_bytes(work)
        advance(7.0)
        return peak_bytes

    monkeypatch.setattr(profiles, "heap_peak_bytes", watched)
    monkeypatch.setattr(profiles, "perf_counter", lambda: clock[0])
    custom(timed)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.poetmodel_test.timed.default, (x,))
    _, profile = OpProfiler(measure_times=True)(node, (torch.zeros(8),), {})
    assert profile.time_s == 3.0


def work():
    """Hold 3 MB at most: two tensors of 1 MB, and their sum before the first is let go."""
    one = torch.ones(250_000)
    two = one + 1
    three = one + two
    del one, two
    four = three.view(500, 500).t()
    del three
    assert four.numel() == 250_000


def test_peaks_are_the_highest_total():
    """Freed tensors no longer count, nor do earlier tensors and views."""
    held = torch.ones(1000)
    assert heap_peak_bytes(work) == pytest.approx(3_000_000, abs=1000)
    assert held.numel() == 1000
    assert storage_peak_bytes(work, ()) == 3_000_000
    assert storage_peak_bytes(lambda: held.add_(1), [held]) == 0
    assert storage_peak_bytes(lambda: held + 1, [held]) == 4000


# -- dropout, whatever its ratio and type ----------------------------------------------------------
RATIOS = (0.0, *(k / 20 for k in range(1, 20)), 1.0)


def layers(p):
    """Return a step of dropout between layers, and at the end."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8), nn.Dropout(p))
    return model, nn.functional.mse_loss, (torch.randn(16, 8), torch.randn(16, 8))


def cast(p):
    """Return the same with autocast inside of the model."""

    def forward(parts, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return parts[0](x).float()

    model, loss_fn, inputs = layers(p)
    return FunctionModule(forward, model), loss_fn, inputs


def dropping_encoder(p):
    """Return a step of a transformer's layer, with dropout of its attention."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=p, batch_first=True)
    return model, nn.functional.mse_loss, (torch.randn(2, 5, 8), torch.randn(2, 5, 8))


def channels(p):
    """Return a step of dropout in place, and of whole channels."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.Dropout(p, inplace=True), nn.Dropout2d(p), nn.FeatureAlphaDropout(p)
    )
    return model, nn.functional.mse_loss, (torch.randn(2, 4, 6, 6), torch.randn(2, 4, 4, 4))


def low(step):
    """Return a step with everything in bfloat16."""
    model, loss_fn, inputs = step
    return model.bfloat16(), loss_fn, tuple(tensor.bfloat16() for tensor in inputs)


KINDS = {
    **{f.__name__: f for f in (layers, cast, dropping_encoder, channels)},
    "low": lambda p: low(layers(p)),
    "low encoder": lambda p: low(dropping_encoder(p)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", mark_seeds_except(RATIOS, (0.15, 1.0)))
def test_dropout_of_every_ratio_is_that_of_eager(p, kind, tmp_path):
    """Recomputed and paged, in single and half precision, with autocast, inside of layers.

    So it is in place, and of whole channels.
    """
    check_random_plans(KINDS[kind](p), tmp_path, range(1))


def test_dropout_that_drops_nothing_copies_nothing():
    """In evaluation, and with p = 0, it is its input, whose strides decide the order of sums."""

    def forward(parts, x):
        x = parts[0](x)[:, ::4]
        return nn.functional.gelu(parts[1](x)).mean((2, 3))

    for dropout in (nn.Dropout(0.0), nn.Dropout(0.5).eval()):
        model = FunctionModule(forward, nn.Conv2d(4, 48, 1), dropout)
        own = model, nn.functional.mse_loss, (torch.randn(2, 4, 16, 16), torch.randn(2, 12))
        assert find_differences(compile_keep_all(*own), *own) == []
        graph = trace(*own, measure_workspace=False).graph
        assert not any(node.op in ("clone", "native_dropout") for node in graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "p"),
    mark_seeds_except(
        [(kind, p) for kind in (nn.GRU, nn.LSTM, nn.RNN) for p in (0.1, 0.5, 1.0)], [(nn.LSTM, 0.1)]
    ),
)
def test_dropout_between_recurrent_layers_is_drawn(kind, p):
    """Recurrent layers draw eager's masks; results are equal but for the order of sums."""
    model, loss_fn, _ = recurrent(kind(4, 4, 3, dropout=p, bidirectional=True, batch_first=True))
    own = model, loss_fn, (torch.randn(2, 3, 4), torch.randn(2, 3, 8))
    traced = trace(*own, measure_workspace=False)
    plan = random_program(traced.graph, Random(1), "blocking", page=0)  # noqa: S311
    runner = Runner(traced, plan_of_trace(traced, plan))
    state = torch.get_rng_state()
    loss = loss_fn(model(own[2][0]), own[2][1])
    loss.backward()
    state_after = torch.get_rng_state()
    assert torch.backends.mkldnn.enabled
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    torch.set_rng_state(state)
    assert torch.allclose(runner(traced.joint.flat_inputs(own[2])), loss.detach(), atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state_after)
    for name, weight in model.named_parameters():
        assert torch.allclose(weight.grad, expected[name], atol=1e-6), name
