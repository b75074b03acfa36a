"""Kernels of convolutions and of their gradients against PyTorch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kit.digits import compute_state
from kit.kernel_calls import check, list_kernels
from kit.programs import require_programs
from kit.rotation import parametrize_parts
from kit.traced_models import FunctionModule
from poetmodel.export.board import Target
from poetmodel.lowered import fusing
from poetmodel.lowered.catalogue import CATALOGUE
from poetmodel.lowered.fusing import split_fused_updates
from poetmodel.torch.lowering.step import lower

aten = torch.ops.aten

# shape of x, shape of w, stride, padding, dilation, groups
LAYERS = {
    "3x3": ((2, 5, 7, 9), (6, 5, 3, 3), 1, 1, 1, 1),
    "3x3 without padding": ((1, 4, 8, 6), (9, 4, 3, 3), 1, 0, 1, 1),
    "3x3 of wide images": ((2, 4, 3, 14), (9, 4, 3, 3), 1, 1, 1, 1),
    "5x5": ((1, 5, 6, 15), (8, 5, 5, 5), 1, 2, 1, 1),
    "5x5 in groups": ((1, 8, 7, 12), (8, 4, 5, 5), 1, (4, 0), 1, 2),
    "3x5": ((2, 4, 6, 13), (4, 4, 3, 5), (2, 1), 3, 1, 1),
    "3x3 by 2": ((2, 3, 9, 8), (8, 3, 3, 3), 2, 1, 1, 1),
    "3x3 by 3": ((1, 3, 11, 14), (5, 3, 3, 3), 3, 1, 1, 1),
    "dilated": ((1, 4, 11, 12), (4, 4, 3, 3), 1, 2, 2, 1),
    "dilated by 2": ((2, 2, 13, 12), (5, 2, 3, 3), 2, 3, 2, 1),
    "dilated by 3, stride 2": ((1, 2, 13, 14), (4, 2, 3, 2), (2, 4), (3, 1), (3, 2), 1),
    "10x4 by 2, as in speech": ((1, 1, 25, 10), (8, 1, 10, 4), 2, (5, 1), 1, 1),
    "1x1": ((2, 6, 5, 4), (10, 6, 1, 1), 1, 0, 1, 1),
    "1x1 by 2": ((2, 6, 5, 8), (9, 6, 1, 1), 2, 0, 1, 1),
    "1x1 with padding": ((1, 3, 4, 4), (4, 3, 1, 1), 1, 1, 1, 1),
    "1x1 by 2 onto as many places": ((1, 3, 4, 1), (4, 3, 1, 1), 2, (2, 0), 1, 1),
    "grouped": ((2, 6, 7, 6), (15, 2, 3, 3), 1, 1, 1, 3),
    "grouped 1x1": ((2, 8, 3, 5), (12, 4, 1, 1), 1, 0, 1, 2),
    "depthwise": ((2, 5, 7, 8), (5, 1, 3, 3), 1, 1, 1, 5),
    "depthwise by 2": ((1, 6, 12, 9), (6, 1, 3, 3), 2, 1, 1, 6),
    "depthwise, two each": ((2, 3, 6, 6), (6, 1, 3, 3), 1, 1, 1, 3),
    "depthwise, dilated": ((1, 3, 9, 9), (3, 1, 3, 3), 2, 2, 2, 3),
    "window as large as the image": ((2, 4, 5, 5), (3, 4, 5, 5), 1, 0, 1, 1),
    "window larger than the image": ((1, 2, 3, 3), (3, 2, 5, 5), 1, 2, 1, 1),
    "window smaller than the stride": ((1, 3, 11, 11), (4, 3, 2, 2), 3, 0, 1, 1),
    "patches": ((2, 3, 8, 8), (6, 3, 4, 4), 4, 0, 1, 1),
    "padding wider than the window": ((1, 2, 4, 4), (3, 2, 2, 2), 1, 4, 1, 1),
    "one dimension": ((2, 3, 17), (8, 3, 5), 2, 2, 1, 1),
    "one dimension, dilated": ((2, 4, 17), (5, 4, 3), 1, 4, 4, 1),
    "one dimension, depthwise": ((2, 4, 9), (4, 1, 3), 1, 1, 1, 4),
    "one place": ((1, 7, 1, 1), (9, 7, 1, 1), 1, 0, 1, 1),
}
# shape of x, shape of w, stride, padding, dilation, output padding, groups
TRANSPOSED = {
    "transposed by 2": ((2, 3, 5, 4), (3, 5, 3, 3), 2, 1, 1, 1, 1),
    "transposed 2x2 by 2": ((1, 4, 3, 5), (4, 6, 2, 2), 2, 0, 1, 0, 1),
    "transposed 3x3": ((2, 8, 4, 11), (8, 6, 3, 3), 1, 1, 1, 0, 1),
    "transposed, grouped and dilated": ((2, 4, 4, 5), (4, 3, 3, 2), (3, 2), 1, 2, 1, 2),
    "transposed 1x1, padded": ((2, 3, 1, 1), (3, 2, 1, 1), 1, 0, (1, 2), (0, 1), 1),
    "transposed 1x1 by 3, padded": ((2, 3, 3, 4), (3, 2, 1, 1), 1, 0, 3, (2, 1), 1),
    "transposed, one dimension": ((2, 3, 7), (3, 4, 4), 3, 1, 1, 2, 1),
}


def tensors(*shapes):
    """Return random tensors."""
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def geometry(dimensions, *values):
    """Return a list with a number for each dimension."""
    return [[v] * dimensions if isinstance(v, int) else list(v) for v in values]


def operands(name):
    """Return the tensors of a layer, and the arguments after them."""
    x, w, *steps, groups = (LAYERS | TRANSPOSED)[name]
    transposed = name in TRANSPOSED
    sizes = geometry(len(x) - 2, *steps, *([] if transposed else [0]))
    rest = (*sizes[:3], transposed, sizes[3], groups)
    return *tensors(x, w, (w[1] * groups,) if transposed else w[:1]), rest


def check_gradients(x, w, rest, permuted=lambda t: t):
    """Hold the parts of a convolution's gradient to PyTorch's."""
    y = aten.convolution.default(x, w, None, *rest)
    dy = permuted(torch.randn(y.shape, dtype=torch.float64))
    for position in range(3):
        mask = [place == position for place in range(3)]
        check(aten.convolution_backward.default, dy, x, w, [y.shape[1]], *rest, mask)


@pytest.mark.parametrize("name", LAYERS | TRANSPOSED)
def test_convolutions_are_pytorchs(name):
    """Output and gradients are PyTorch's, with a bias and without."""
    x, w, bias, rest = operands(name)
    check(aten.convolution.default, x, w, bias, *rest)
    check(aten.convolution.default, x, w, None, *rest)
    check_gradients(x, w, rest)


def channels_last(tensor):
    """Return a tensor whose channels lie last."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


PERMUTED = ["3x3 by 2", "grouped", "one dimension", "dilated by 2", "window as large as the image"]


@pytest.mark.parametrize("name", [*PERMUTED, "transposed by 2", "transposed, grouped and dilated"])
def test_convolutions_take_permuted_tensors(name):
    """Any of the operands, and the results, may lie with their channels last."""
    a, b, bias, rest = operands(name)
    for first, second in ((channels_last(a), b), (a, channels_last(b))):
        check(aten.convolution.default, first, second, bias, *rest)
        check_gradients(first, second, rest)
    if name in LAYERS:
        check_gradients(a, b, rest, channels_last)
        y = aten.convolution.default(a, b, None, *rest)
        check(aten.convolution.default, a, b, None, *rest, strides={0: channels_last(y).stride()})


def test_gradients_of_tokens_are_permuted():
    """Gradients of patches that became tokens lie token by token; those of a sum are one number."""
    x, w = tensors((2, 3, 8, 8), (6, 3, 4, 4))
    rest = ([4, 4], [0, 0], [1, 1], False, [0, 0], 1)
    check_gradients(x, w, rest, lambda dy: dy.flatten(2).mT.contiguous().mT.view_as(dy))
    check_gradients(x, w, rest, lambda dy: dy[:1, :1, :1, :1].expand(dy.shape))


@settings(max_examples=30)
@given(data=st.data())
def test_any_convolution_is_pytorchs(data):
    """Whatever stride, padding, dilation, window and groups: output and gradients are PyTorch's."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    transposed, groups, each = data.draw(st.booleans()), number(1, 3), number(1, 5)
    stride, dilation, window = ([number(1, 3), number(1, 3)] for _ in range(3))
    padding = [number(0, 3), number(0, 3)]
    extra = [
        number(0, max(s, d) - 1) if transposed else 0 for s, d in zip(stride, dilation, strict=True)
    ]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, window, strict=True)]
    if transposed:
        least = [max(1, -(-(2 * p - r - e + 1) // s) + 1)
                 for p, r, e, s in zip(padding, reach, extra, stride, strict=True)]  # fmt: skip
    else:
        least = [max(1, r - 2 * p) for r, p in zip(reach, padding, strict=True)]
    size = [number(low, low + 6) for low in least]
    channels = groups * number(1, 5)
    w = (channels, each, *window) if transposed else (groups * each, channels // groups, *window)
    a, b, bias = tensors((number(1, 2), channels, *size), w, (groups * each,))
    rest = (stride, padding, dilation, transposed, extra, groups)
    check(aten.convolution.default, a, b, bias, *rest)
    check_gradients(a, b, rest)


def test_gradients_of_a_layer_are_computed_once():
    """Each gradient of a layer is computed by one call, and none that is not read."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 2, 3))
    inputs = (torch.randn(2, 1, 8, 8), torch.ones(()))
    step = lower(model, lambda y, t: (y * t).sum(), inputs)
    assert list_kernels(step).count("pm_conv2d_dw") == 2
    assert list_kernels(step).count("pm_conv2d_dx") == 1
    written = {c.arguments[0].buffer for calls in step.calls for c in calls}
    assert written == {tensor.name for node in step.graph.nodes for tensor in node.outputs}


@pytest.mark.slow
@parametrize_parts(3)
def test_filters_of_every_layer_have_the_bits_of_two_nodes(part, tmp_path, monkeypatch):
    """Whatever the windows, strides, groups: all but those whose gradient lies in another order."""
    require_programs(Target.HOST)
    torch.manual_seed(0)
    layers = list(part.select(LAYERS.values()))

    def squares(weights, x):
        """Apply each layer to the first elements of the input; padding is 0."""
        total = 0 * x.sum()
        for weight, (image, _, *rest) in zip(weights, layers, strict=True):
            convolution = functional.conv1d if len(image) == 3 else functional.conv2d
            given = x[: math.prod(image)].view(image)
            total = total + convolution(given, weight, None, *rest).square().mean()
        return total

    every = [torch.nn.Parameter(torch.randn(layer[1])) for layer in layers]
    model = FunctionModule(
        lambda own, x: squares(own.weights, x), weights=torch.nn.ParameterList(every)
    )
    elements = max(math.prod(layer[0]) for layer in layers)
    inputs = (torch.randn(elements), torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    monkeypatch.setattr(fusing, "is_gradient_largest", lambda _step, _node: True)
    step = lower(model, lambda y, t: y * t, inputs, optimizer=optimizer)
    fused = [c for calls in step.calls for c in calls if CATALOGUE[c.kernel].fuses]
    assert len(fused) >= len(layers) - 2
    data = b"".join(x.numpy().tobytes() for x in inputs)
    expected = compute_state(split_fused_updates(step), tmp_path / "two", data, 1)
    assert compute_state(step, tmp_path / "one", data, 1, {"ram": "100%"}) == expected
    options = {"ram": "50%", "device": "nano33ble"}
    mapped = compute_state(step, tmp_path / "mapped", data, 1, options, ("DRIVER=ram",))
    assert mapped == expected
