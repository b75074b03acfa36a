"""Kernels of layers in int8 that train have the bytes of PyTorch's operators, their definition.

Gradients are whole numbers and scales powers of two: sums are exact, in whatever order.
"""

from itertools import product

import numpy as np
import pytest
import torch

from kit.kernel_calls import Memory, lower_operation
from poetmodel.lowered.calls import Buffer, Call, ConvolutionSizes, DataType, Ref
from poetmodel.lowered.catalogue import CATALOGUE
from poetmodel.torch.int8.gradients import RoundingDraws, update_16_bits
from poetmodel.torch.int8.operators import find_operator
from poetmodel.torch.int8.training import subtract_gradient

GEOMETRIES = [
    ((1, 1), (1, 1, 1, 1), (1, 1)),
    ((2, 2), (0, 1, 1, 2), (1, 1)),
    ((2, 1), (1, 0, 0, 1), (1, 2)),
    ((3, 2), (3, 4, 0, 0), (2, 3)),
]
"""Stride, padding and dilation: all taps somewhere outside, apart, and some that see nothing."""
IMAGE = (9, 8)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def integers(*shape, low=-128):
    """Return random whole numbers of int8."""
    return torch.randint(low, 128, shape, dtype=torch.int8)


def gradients(*shape):
    """Return gradients that are whole numbers, many of them 0."""
    return torch.randint(-9, 10, shape).float()


def scales(count):
    """Return a power of two for each result."""
    return torch.exp2(torch.randint(-9, 3, (count,)).float())


def out_size(window, geometry):
    """Return the places of a window in each direction."""
    stride, padding, dilation = geometry
    return [
        (IMAGE[k] + sum(padding[2 * k : 2 * k + 2]) - dilation[k] * (window[k] - 1) - 1)
        // stride[k]
        + 1
        for k in range(2)
    ]


def same(name, *args):
    """Compare a kernel with its operator: each bit."""
    (found,) = lower_operation(find_operator(name), *args).execute().values()
    wanted = find_operator(name)(*args)
    assert found.shape == wanted.shape
    assert torch.equal(found.to(wanted.dtype), wanted), name
    return wanted


def lists(geometry):
    """Return stride, padding and dilation as operators expect them."""
    return tuple(map(list, geometry))


CONVOLUTIONS = list(product(((8, 8, 1), (6, 10, 2), (3, 5, 1), (12, 8, 4)), GEOMETRIES))


@pytest.mark.parametrize(("sizes", "geometry"), CONVOLUTIONS, ids=str)
def test_gradients_of_convolutions(sizes, geometry):
    """Gradients of input and weight, with groups, at edges of images and of blocks of 4."""
    channels, results, groups = sizes
    weight = integers(results, 3, 3, channels // groups, low=-127)
    gradient = gradients(2, *out_size((3, 3), geometry), results)
    placed = (*lists(geometry), groups)
    same("convolution_input_gradient", gradient, weight, scales(results), list(IMAGE), *placed)
    x = integers(2, *IMAGE, channels)
    same("convolution_weight_gradient", gradient, x, 0.25, -7, [3, 3], *placed)


@pytest.mark.parametrize(("channels", "geometry"), list(product((8, 7), GEOMETRIES)), ids=str)
def test_gradients_of_depthwise_convolutions(channels, geometry):
    """Each channel has its own window, and its own scale."""
    weight = integers(3, 2, channels, low=-127)
    gradient = gradients(2, *out_size((3, 2), geometry), channels)
    placed = lists(geometry)
    given = (gradient, weight, scales(channels), list(IMAGE), *placed, channels)
    same("convolution_input_gradient", *given)
    x = integers(2, *IMAGE, channels)
    same("depthwise_weight_gradient", gradient, x, 0.5, 99, [3, 2], *placed)


@pytest.mark.parametrize("shape", [(1,), (9,), (2, 3, 3)], ids=str)
def test_gradients_of_layers_of_pixels(shape):
    """Gradients of 1 x 1 convolutions and linear layers: blocks of 4 pixels and the rest."""
    for channels, results in ((8, 12), (7, 5)):
        gradient, x = gradients(*shape, results), integers(*shape, channels)
        weight = integers(results, channels, low=-127)
        same("pointwise_input_gradient", gradient, weight, scales(results))
        same("pointwise_weight_gradient", gradient, x, 2.0, -128)


@pytest.mark.parametrize("padding", [0, 1])
def test_gradients_of_pools(padding):
    """Means share a gradient, the first of equal maxima gets it, also of reals, bit for bit."""
    x = integers(2, *IMAGE, 5)
    x[x % 4 > 0] = -128
    pads = [padding, padding, 0, padding]
    for window, stride, dilation in (((3, 2), (2, 1), (1, 1)), ((2, 3), (1, 1), (2, 1))):
        numbers = (list(window), list(stride), pads, list(dilation))
        y = find_operator("maximum")(x, *numbers)
        gradient = gradients(*y.shape)
        gradient[gradient == 0] = 0.5
        same("maximum_gradient", gradient, x, y, *numbers)
    shape = (2, *out_size((3, 3), ((2, 2), pads, (1, 1))), 5)
    same("average_gradient", gradients(*shape) * 9, list(IMAGE), [3, 3], [2, 2], pads)
    same("average_gradient", gradients(2, 1, 1, 5) * 72, list(IMAGE), list(IMAGE), [1, 1], [0] * 4)


def test_masks_and_starts():
    """A byte at a limit has no gradient; a sum begins with the zero of its input."""
    gradient, y = gradients(3, 4, 5), integers(3, 4, 5)
    gradient[0, 0] = torch.nan
    for low, high in ((-128, 127), (-3, 90)):
        (found,) = lower_operation(find_operator("mask"), gradient, y, low, high).execute().values()
        wanted = find_operator("mask")(gradient, y, low, high)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num().double())
    for shape in ((5, 7), (3, 3, 6), (6, 3, 2, 4)):
        same("start", integers(*shape, low=-127), -128)


# -- updates ---------------------------------------------------------------------------------------
def numbers_of_updates():
    """Return weights, residuals and gradients: ties, limits, huge ones, NaN."""
    count = 4000
    whole = torch.randint(-127 * 256, 127 * 256 + 1, (count,))
    whole[:8] = torch.tensor([-32512, 32512, -128, 127, 128, -129, 0, 1])
    change = torch.randn(count) * 3
    change[::4] = torch.randint(-999, 999, change[::4].shape) / 512  # every second one a tie
    ends = [1e30, -1e30, torch.nan, torch.inf, -torch.inf, 3e38, -0.0, 1e-45]
    change[3 : 3 + 4 * len(ends) : 4] = torch.tensor(ends)
    high = (whole + 128) >> 8
    return high.to(torch.int8), (whole - 256 * high).to(torch.int8), change


def updated(state, gradient, scale, *numbers):
    """Return the state after a kernel: weights, and residuals if there are any."""
    types = {"w": DataType.INT8, "r": DataType.INT8, "g": DataType.REAL, "s": DataType.REAL}
    given = {**dict(zip("wr", state, strict=False)), "g": gradient, "s": scale}
    memory = Memory(
        {name: Buffer(elements=x.numel(), type=types[name]) for name, x in given.items()}
    )
    for name, tensor in given.items():
        memory[name][...] = tensor.flatten().numpy()
    kernel = "pm_q8_sgd" if len(state) > 1 else "pm_q8_stochastic"
    memory.execute([Call(kernel, (*map(Ref, given), *numbers))])
    return [torch.from_numpy(memory[name]).view_as(state[0]) for name in "wr"[: len(state)]]


def test_updates_at_ties_and_limits():
    """16-bit updates round ties to even, saturate at limits, and ignore NaN."""
    weight, residual, change = numbers_of_updates()
    one = torch.ones(1)
    sizes = (1, len(change), 0, len(change))
    found = updated((weight, residual), change, one, *sizes, 1.0, 1.0, 0.0)
    update_16_bits(weight, residual, change)
    for mine, theirs in zip(found, (weight, residual), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("decay", "sign"), [(0.0, 1.0), (0.037, 1.0), (0.5, -1.0)])
def test_updates_have_the_bits_of_eager(decay, sign, bits):
    """Rates, scales of each result, weight decay, draws, of whatever real numbers."""
    *both, gradient = (x.view(2, 40, 50) for x in numbers_of_updates())
    rate = float(np.float32(0.3))
    draws = RoundingDraws(update=7, site=3, seed=2**32 - 5)
    rounding = (draws.site, draws.seed - 2**32, draws.update, 4, 0)
    for shape, sizes in (((80, 50), (80, 50)), ((4, 20, 50), (50, 1))):
        state = [x.reshape(shape).clone() for x in both[: bits // 8]]
        gradients_ = gradient.reshape(shape).clone()
        scale = torch.rand(sizes[0]) * 0.1
        numbers = (*sizes, 0, 4000, *(rounding if bits == 8 else ()), rate, sign, decay)
        found = updated(state, gradients_, scale, *numbers)
        subtract_gradient(state, sign * gradients_, scale, rate, weight_decay=decay, draws=draws)
        for mine, theirs in zip(found, state, strict=True):
            assert torch.equal(mine, theirs)


FUSED = {
    name: row.fuses for name, row in CATALOGUE.items() if row.fuses and name.startswith("pm_q8_")
}
"""Gradient kernel and update kernel that each fused int8 kernel replaces."""


@pytest.mark.parametrize("fused", FUSED)
def test_updates_in_place_have_the_bits_of_two_calls(fused):
    """A kernel that makes a gradient and updates with it is both, also in parts of any size."""
    kernel, update = FUSED[fused]
    depthwise, pixels = "depthwise" in kernel, 60
    channels, results = (10, 10) if depthwise else (10, 6)
    groups = channels if depthwise else 2
    sizes = ConvolutionSizes(channels, 5, 6, results, 3, 6, 3, 3, 2, 1, 1, 1, 1, 1, groups)
    count, shape = sizes.results * sizes.window * sizes.group_channels, (tuple(sizes), 2)
    places = 2 * sizes.out_plane
    if "pointwise" in kernel:
        count, shape, places = channels * results, (pixels, channels, results), pixels
    given = {
        "w": integers(count, low=-127), "r": integers(count), "x": integers(pixels * channels),
        "g": torch.randn(places * results), "s": torch.rand(results), "d": torch.zeros(count),
    }  # fmt: skip
    state = "wr" if update == "pm_q8_sgd" else "w"
    numbers = (*(() if len(state) > 1 else (2, 5, 1, 1, 0)), 0.7, 1.0, 0.01)
    made = (Ref("g"), Ref("x"), *shape, 0.02, -3)

    def changed(*calls):
        kinds = {torch.int8: DataType.INT8, torch.float32: DataType.REAL}
        memory = Memory(
            {n: Buffer(elements=x.numel(), type=kinds[x.dtype]) for n, x in given.items()}
        )
        for name, tensor in given.items():
            memory[name][...] = tensor.numpy()
        memory.execute(calls)
        return np.concatenate([memory[name] for name in "wr"])

    def parts(size):
        for first in range(0, count, size):
            n = min(size, count - first)
            own = [Ref(name, first) for name in state]
            yield Call(fused, (*own, *made[:2], Ref("s"), *made[2:], first, n, *numbers))

    per = (results, 1 if depthwise else count // results)
    two = [
        Call(kernel, (Ref("d"), *made, channels if depthwise else count)),
        Call(update, (*map(Ref, f"{state}ds"), *per, 0, count, *numbers)),
    ]
    wanted = changed(*two)
    assert (wanted[:count] != given["w"].numpy()).any()
    for size in (count, 7, 32):
        np.testing.assert_array_equal(changed(*parts(size)), wanted, f"{kernel} by {size}")
