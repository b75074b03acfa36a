"""Kernels that make planes smaller or larger, and of their gradients, against PyTorch."""

import pytest
import torch

from kit.kernel_calls import check

aten = torch.ops.aten


def layouts(*shape):
    """Return random planes, the same with channels last, and the same as a view of more."""
    x = torch.randn(shape, dtype=torch.float64)
    view = torch.randn((*shape[:-1], shape[-1] + 3), dtype=torch.float64)[..., 1:-2]
    last = [x.contiguous(memory_format=torch.channels_last)] if len(shape) == 4 else []
    return [x, view, *last]


MAX_POOLS = {
    "2x2": ((2, 3, 6, 8), [2, 2]),
    "3x3 by 2": ((1, 4, 9, 7), [3, 3], [2, 2], [1, 1]),
    "dilated": ((2, 2, 9, 10), [3, 2], [2, 1], [1, 1], [2, 3]),
    "rounded up": ((2, 2, 7, 8), [3, 3], [2, 2], [0, 1], [1, 1], True),
    "one row": ((2, 3, 1, 9), [1, 2], [1, 2]),
    "no batch": ((3, 6, 6), [2, 2], [2, 2]),
}


@pytest.mark.parametrize("case", MAX_POOLS.values(), ids=MAX_POOLS)
def test_max_pools_are_pytorchs(case):
    """Values, indices and gradients are PyTorch's."""
    shape, *rest = case
    for x in layouts(*shape):
        check(aten.max_pool2d_with_indices.default, x, *rest)
        y, indices = aten.max_pool2d_with_indices(x, *rest)
        defaults = [[0, 0], rest[0], [0, 0], [1, 1], False]
        whole = rest + defaults[len(rest) :]
        dy = torch.randn_like(y)
        check(aten.max_pool2d_with_indices_backward.default, dy, x, *whole, indices)


def test_max_pools_take_the_first_of_equal_elements():
    """Where elements are equal the index is that of the first, and NaN wins."""
    x = torch.zeros((1, 1, 4, 4), dtype=torch.float64)
    check(aten.max_pool2d_with_indices.default, x, [2, 2])
    x[0, 0, 1, 1] = x[0, 0, 2, 3] = torch.nan
    x[0, 0, 0, 2:] = x[0, 0, 1, 2:] = -torch.inf
    check(aten.max_pool2d_with_indices.default, x, [2, 2])


MEAN_POOLS = {
    "2x2": ((2, 3, 6, 8), [2, 2]),
    "3x3 by 2": ((1, 4, 9, 7), [3, 3], [2, 2], [1, 1]),
    "padding not counted": ((2, 2, 7, 8), [3, 3], [2, 2], [1, 1], False, False),
    "rounded up": ((2, 2, 7, 8), [3, 2], [2, 3], [1, 1], True),
    "rounded up, padding not counted": ((2, 2, 7, 8), [3, 2], [2, 3], [1, 1], True, False),
    "divisor": ((2, 2, 7, 8), [3, 2], [2, 2], [1, 1], False, True, 5),
    "one row": ((2, 3, 1, 9), [1, 3], [1, 2], [0, 1]),
    "no batch": ((3, 6, 6), [2, 2], [2, 2]),
}


@pytest.mark.parametrize("case", MEAN_POOLS.values(), ids=MEAN_POOLS)
def test_mean_pools_are_pytorchs(case):
    """Values and gradients are PyTorch's."""
    shape, *rest = case
    for x in layouts(*shape):
        check(aten.avg_pool2d.default, x, *rest)
        dy = torch.randn_like(aten.avg_pool2d(x, *rest))
        whole = rest + [[0, 0], rest[0], [0, 0], False, True, None][len(rest) :]
        check(aten.avg_pool2d_backward.default, dy, x, *whole)


@pytest.mark.parametrize("size", [[1, 1], [3, 3], [2, 5], [7, 9], [10, 4]])
def test_adaptive_pools_are_pytorchs(size):
    """Values, indices and gradients are PyTorch's, also where windows overlap."""
    for x in layouts(2, 3, 7, 9):
        check(aten._adaptive_avg_pool2d.default, x, size)
        dy = torch.randn_like(aten._adaptive_avg_pool2d(x, size))
        check(aten._adaptive_avg_pool2d_backward.default, dy, x)
        check(aten.adaptive_max_pool2d.default, x, size)
        indices = aten.adaptive_max_pool2d(x, size)[1]
        check(aten.adaptive_max_pool2d_backward.default, dy, x, indices)


SIZES = [
    ((2, 3, 4, 5), (8, 10)),
    ((1, 2, 3, 4), (7, 5)),
    ((2, 2, 6, 7), (3, 4)),
    ((1, 1, 1, 5), (3, 1)),
]


@pytest.mark.parametrize(
    ("two", "one", "aligned"),
    [
        ("upsample_nearest2d", "upsample_nearest1d", ()),
        ("_upsample_nearest_exact2d", "_upsample_nearest_exact1d", ()),
        *(("upsample_bilinear2d", "upsample_linear1d", (aligned,)) for aligned in (True, False)),
    ],
)
@pytest.mark.parametrize(("shape", "size"), SIZES)
def test_larger_and_smaller_planes_are_pytorchs(two, one, aligned, shape, size):
    """Nearest neighbours and interpolation, and gradients, in one dimension and in two."""
    for x in layouts(*shape):
        dy = torch.randn((*shape[:2], *size), dtype=torch.float64)
        check(getattr(aten, two).default, x, size, *aligned)
        check(getattr(aten, f"{two}_backward").default, dy, size, shape, *aligned)
        check(getattr(aten, one).default, x[:, :, 0], size[1:], *aligned)
        line = (*shape[:2], shape[3])
        check(getattr(aten, f"{one}_backward").default, dy[:, :, 0], size[1:], line, *aligned)


def test_factors_count_where_they_are_given():
    """A factor that is no ratio of the sizes is used as in PyTorch."""
    x = torch.randn((1, 2, 5, 6), dtype=torch.float64)
    check(aten.upsample_bilinear2d.default, x, (11, 13), False, 2.3, 2.2)
    check(aten.upsample_nearest2d.default, x, (11, 13), 2.3, 2.2)
    dy = torch.randn((1, 2, 11, 13), dtype=torch.float64)
    check(aten.upsample_bilinear2d_backward.default, dy, (11, 13), x.shape, False, 2.3, 2.2)


@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize("pads", [(1, 2, 0, 3), (2, 2, 2, 2), (-1, 2, 1, -2)])
def test_padding_with_the_image_is_pytorchs(kind, pads):
    """Values and gradients are PyTorch's, in one dimension and in two, and where rows are cut."""
    for x in layouts(2, 3, 5, 6):
        for of, along in ((pads, "2d"), (pads[:2], "1d")):
            part = x if along == "2d" else x[:, 0]
            forward = getattr(aten, f"{kind}_pad{along}").default
            check(forward, part, of)
            dy = torch.randn_like(forward(part, of))
            check(getattr(aten, f"{kind}_pad{along}_backward").default, dy, part, of)


@pytest.mark.parametrize(
    "pads", [(1, 2), (1, 2, 0, 3), (-1, 2, 1, -2), (0, 0, 0, 0, 1, 2), (-1, -2)]
)
def test_padding_with_a_number_is_pytorchs(pads):
    """Any number of dimensions grows or is cut."""
    for x in layouts(2, 3, 5, 6):
        check(aten.constant_pad_nd.default, x, pads, 0.5)
        check(aten.constant_pad_nd.default, x.long(), pads, 3)
