"""Kernels of convolutions and of their gradients against PyTorch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.nn import functional  # noqa: E402

from kit.kernel_calls import check, lowered  # noqa: E402
from kit.programs import needs  # noqa: E402
from poetmodel.export import fusing  # noqa: E402
from poetmodel.export.board import Target, build, run  # noqa: E402
from poetmodel.export.exporting import export_step  # noqa: E402
from poetmodel.export.fusing import FUSED, parted  # noqa: E402
from poetmodel.export.step import Call, Ref  # noqa: E402
from poetmodel.torch import CaptureError  # noqa: E402
from poetmodel.torch.lowering.step import lower  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
aten = torch.ops.aten

# shape of x, shape of w, stride, padding, dilation, groups
LAYERS: dict[str, tuple[Any, ...]] = {
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
TRANSPOSED: dict[str, tuple[Any, ...]] = {
    "by 2": ((2, 3, 5, 4), (3, 5, 3, 3), 2, 1, 1, 1, 1),
    "2x2 by 2": ((1, 4, 3, 5), (4, 6, 2, 2), 2, 0, 1, 0, 1),
    "3x3": ((2, 8, 4, 11), (8, 6, 3, 3), 1, 1, 1, 0, 1),
    "grouped and dilated": ((2, 4, 4, 5), (4, 3, 3, 2), (3, 2), 1, 2, 1, 2),
    "one dimension": ((2, 3, 7), (3, 4, 4), 3, 1, 1, 2, 1),
}


def tensors(*shapes: tuple[int, ...]) -> list[Any]:
    """Return random tensors."""
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def geometry(dimensions: int, *values: Any) -> list[list[int]]:
    """Return a list with a number for each dimension."""
    return [[v] * dimensions if isinstance(v, int) else list(v) for v in values]


def cases() -> Any:
    """Yield for each layer its operands, and the arguments after them."""
    for name, (x, w, stride, padding, dilation, groups) in LAYERS.items():
        steps = geometry(len(x) - 2, stride, padding, dilation, 0)
        yield pytest.param(*tensors(x, w, w[:1]), (*steps[:3], False, steps[3], groups), id=name)
    for name, (x, w, stride, padding, dilation, extra, groups) in TRANSPOSED.items():
        steps = geometry(len(x) - 2, stride, padding, dilation, extra)
        rest = (*steps[:3], True, steps[3], groups)
        yield pytest.param(*tensors(x, w, (w[1] * groups,)), rest, id=f"transposed {name}")


def check_gradients(x: Any, w: Any, rest: tuple[Any, ...], permuted: Any = lambda t: t) -> None:
    """Hold the parts of a convolution's gradient to PyTorch's."""
    y = aten.convolution.default(x, w, None, *rest)
    dy = permuted(torch.randn(y.shape, dtype=torch.float64))
    for position in range(3):
        mask = [place == position for place in range(3)]
        check(aten.convolution_backward.default, dy, x, w, [y.shape[1]], *rest, mask)


@pytest.mark.parametrize(("x", "w", "bias", "rest"), list(cases()))
def test_convolutions_are_pytorchs(x: Any, w: Any, bias: Any, rest: tuple[Any, ...]) -> None:
    """Output and gradients are PyTorch's, with a bias and without."""
    check(aten.convolution.default, x, w, bias, *rest)
    check(aten.convolution.default, x, w, None, *rest)
    check_gradients(x, w, rest)


def channels_last(tensor: Any) -> Any:
    """Return a tensor whose channels lie last."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


PERMUTED = ["3x3 by 2", "grouped", "one dimension", "dilated by 2", "window as large as the image"]


@pytest.mark.parametrize("name", PERMUTED)
def test_convolutions_take_permuted_tensors(name: str) -> None:
    """Any of the operands, and the results, may lie with their channels last."""
    x, w, stride, padding, dilation, groups = LAYERS[name]
    steps = geometry(len(x) - 2, stride, padding, dilation, 0)
    rest = (*steps[:3], False, steps[3], groups)
    a, b, bias = tensors(x, w, w[:1])
    for first, second in ((channels_last(a), b), (a, channels_last(b))):
        check(aten.convolution.default, first, second, bias, *rest)
        check_gradients(first, second, rest)
    check_gradients(a, b, rest, channels_last)
    y = aten.convolution.default(a, b, None, *rest)
    check(aten.convolution.default, a, b, None, *rest, strides={0: channels_last(y).stride()})


@pytest.mark.parametrize("name", ["by 2", "grouped and dilated"])
def test_transposed_convolutions_take_permuted_tensors(name: str) -> None:
    """Any of the operands may lie with its channels last."""
    x, w, stride, padding, dilation, extra, groups = TRANSPOSED[name]
    steps = geometry(2, stride, padding, dilation, extra)
    rest = (*steps[:3], True, steps[3], groups)
    a, b, bias = tensors(x, w, (w[1] * groups,))
    for first, second in ((channels_last(a), b), (a, channels_last(b))):
        check(aten.convolution.default, first, second, bias, *rest)
        check_gradients(first, second, rest)


def test_gradients_of_tokens_are_permuted() -> None:
    """Gradients of patches that became tokens lie token by token; those of a sum are one number."""
    x, w = tensors((2, 3, 8, 8), (6, 3, 4, 4))
    rest = ([4, 4], [0, 0], [1, 1], False, [0, 0], 1)
    check_gradients(x, w, rest, lambda dy: dy.flatten(2).mT.contiguous().mT.view_as(dy))
    check_gradients(x, w, rest, lambda dy: dy[:1, :1, :1, :1].expand(dy.shape))


def test_three_dimensions_are_refused() -> None:
    """A convolution in three dimensions has no kernel, and is refused by name."""
    x, w = tensors((1, 2, 4, 4, 4), (3, 2, 2, 2, 2))
    rest = ([1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)
    with pytest.raises(CaptureError, match=r"aten\.convolution.*one or two dimensions, got 3"):
        lowered(aten.convolution.default, x, w, None, *rest)


def ranges(
    call: Call, counts: list[int], *, plane: int, filters: int, results: tuple[str, ...]
) -> Any:
    """Yield the calls over ranges of output channels that do what one call does.

    What lies in `results` has a plane for each output channel, or is found there by it.
    """
    place = next(k for k, a in enumerate(call.arguments) if isinstance(a, tuple))
    first = 0
    for count in counts:
        given = list(call.arguments)
        for k, argument in enumerate(given[:place]):
            if isinstance(argument, Ref) and argument.buffer in results:
                size = (plane, filters, 1)[results.index(argument.buffer)]
                given[k] = Ref(argument.buffer, argument.offset + first * size)
        given[place + 2 : place + 4] = [first, count]
        if "_dx" in call.kernel:
            given[-1] = int(first > 0)
        yield Call(call.kernel, tuple(given))
        first += count


@pytest.mark.parametrize(
    "name", ["3x3", "3x3 by 2", "1x1", "grouped", "depthwise", "depthwise, two each"]
)
def test_layers_may_be_done_in_ranges_of_channels(name: str) -> None:
    """Calls over ranges of output channels leave the bits of the one call over all."""
    x_shape, w_shape, stride, padding, dilation, groups = LAYERS[name]
    x, w, bias = tensors(x_shape, w_shape, w_shape[:1])
    steps = geometry(2, stride, padding, dilation, 0)
    rest = (*steps[:3], False, steps[3], groups)
    y = aten.convolution.default(x, w, bias, *rest)
    dy = torch.randn_like(y)
    sizes = {"plane": y[0, 0].numel(), "filters": w[0].numel()}
    back = (aten.convolution_backward.default, dy, x, w, [w_shape[0]], *rest)
    cases = [
        (
            lowered(aten.convolution.default, x, w, bias, *rest),
            "output_0",
            "operand_1",
            "operand_2",
        ),
        (lowered(*back, [True, False, False]), "operand_0", "operand_2", ""),
        (lowered(*back, [False, True, False]), "operand_0", "output_1", ""),
    ]
    for ours, *results in cases:
        (call,) = ours.operation.calls
        for counts in ([1, w_shape[0] - 1], [2] * (w_shape[0] // 2) + [1] * (w_shape[0] % 2)):
            calls = list(ranges(call, counts, results=tuple(results), **sizes))
            for position, whole in ours.execute().items():
                assert torch.equal(ours.execute(calls)[position], whole), (call.kernel, counts)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("size", "stride", "dilation", "extra"),
    [
        ((1, 1), (1, 1), (1, 2), (0, 1)),
        ((3, 4), (1, 1), (3, 3), (2, 1)),
        ((3, 4), (2, 2), (3, 3), (2, 2)),
    ],
)
def test_output_padding_may_be_as_wide_as_the_dilation(
    size: tuple[int, int], stride: Any, dilation: Any, extra: Any, bias: bool
) -> None:
    """A window of one pixel reaches none of it: there the bias stands alone."""
    x, w, b = tensors((2, 3, *size), (3, 2, 1, 1), (2,))
    rest = (list(stride), [0, 0], list(dilation), True, list(extra), 1)
    check(aten.convolution.default, x, w, b if bias else None, *rest)


@settings(max_examples=30)
@given(data=st.data())
def test_any_convolution_is_pytorchs(data: st.DataObject) -> None:
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


def test_gradients_of_a_layer_are_computed_once() -> None:
    """Of each layer every gradient is made by one call, and nothing is made that nobody wants."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 2, 3))
    inputs = (torch.randn(2, 1, 8, 8), torch.ones(()))
    step = lower(model, lambda y, t: (y * t).sum(), inputs)
    kernels = [call.kernel for calls in step.calls for call in calls]
    assert kernels.count("pm_conv2d_dw") == 2
    assert kernels.count("pm_conv2d_dx") == 1
    written = {c.arguments[0].buffer for calls in step.calls for c in calls}
    assert written == {tensor.name for node in step.graph.nodes for tensor in node.outputs}


class EveryLayer(torch.nn.Module):
    """Convolutions of all kinds, each of the first elements of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(layer[1]) for layer in LAYERS.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the squares of what they make, less what the input is."""
        total = 0 * x.sum()
        for weight, (image, _, *rest) in zip(self.weights, LAYERS.values(), strict=True):
            convolution = functional.conv1d if len(image) == 3 else functional.conv2d
            given = x[: math.prod(image)].view(image)
            total = total + convolution(given, weight, None, *rest).square().mean()
        return total


@pytest.mark.parametrize(
    ("options", "built"),
    [({"ram": "100%"}, ()), ({"ram": "30%", "device": "nano33ble"}, ("DRIVER=ram",))],
    ids=["in RAM", "read in place"],
)
def test_filters_of_every_layer_have_the_bits_of_two_nodes(
    options: dict[str, Any],
    built: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the windows, strides, groups: all but those whose gradient lies in another order."""
    needs(Target.HOST)
    torch.manual_seed(0)
    model = EveryLayer()
    elements = max(math.prod(layer[0]) for layer in LAYERS.values())
    inputs = (torch.randn(elements), torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    monkeypatch.setattr(fusing, "saves_memory", lambda _step, _node: True)
    step = lower(model, lambda y, t: y * t, inputs, optimizer=optimizer)
    assert sum(c.kernel in FUSED.values() for calls in step.calls for c in calls) >= len(LAYERS) - 2
    data = b"".join(x.numpy().tobytes() for x in inputs)
    states = []
    for name, form, how in (("two", parted(step), ()), ("one", step, built)):
        where = {"ram": "100%", "paging": False} if name == "two" else options
        export_step(form, tmp_path / name, gap=0.5, **where)
        program = build(tmp_path / name, Target.HOST, settings=how)
        done = run(program, Target.HOST, tmp_path / name, inputs=data, steps=1, learning_rate=0.05)
        states.append(done.require_success().state)
    assert states[0] == states[1]
