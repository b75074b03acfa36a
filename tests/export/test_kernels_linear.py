"""Products of matrices and vectors, losses, and their gradients, against PyTorch."""

import pytest
import torch

from kit.kernel_calls import check, check_call, random_reals

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def lying(rows, columns, how):
    """Return a matrix that lies by rows, by columns, or with gaps."""
    if how == "rows":
        return random_reals(rows, columns)
    if how == "columns":
        return random_reals(columns, rows).t()
    return random_reals(2 * rows, 3 * columns + 1)[::2, 1::3]


SIZES = [
    (1, 1, 1),
    (1, 7, 5),
    (2, 3, 4),
    (5, 4, 6),
    (3, 1, 9),
    (6, 9, 1),
    (1, 8, 1),
    (7, 5, 8),
    (4, 2, 3),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("a", ["rows", "columns", "gaps"])
@pytest.mark.parametrize("b", ["rows", "columns", "gaps"])
def test_products(sizes, a, b):
    """A product of matrices, however they lie, alone and added to a bias or a matrix."""
    m, k, n = sizes
    left, right = lying(m, k, a), lying(k, n, b)
    check(aten.mm.default, left, right)
    check(aten.addmm.default, random_reals(n), left, right)
    check(aten.addmm.default, random_reals(m, n), left, right)


A, C, THREE = random_reals(5, 3), random_reals(3, 6), (random_reals(2, 5, 3), random_reals(2, 3, 6))
IMAGE, PLACES = random_reals(1, 5, 3, 4).permute(0, 3, 1, 2), torch.arange(15).view(1, 3, 5) % 4
CALLS = [
    # an output that lies by columns, or with gaps, is written as it lies
    (aten.mm.default, A, C, {"strides": {0: (1, 5)}}),
    (aten.mm.default, A, C, {"strides": {0: (20, 3)}}),
    (aten.addmm.default, random_reals(6), A, C, {"strides": {0: (1, 5)}}),
    (aten.bmm.default, *THREE, {"strides": {0: (30, 1, 5)}}),
    # what is added and what is multiplied may have factors
    (aten.addmm.default, random_reals(6), A, C, {"beta": 0.5}),
    (aten.addmm.default, random_reals(5, 6), A, C, {"alpha": -2.0}),
    (aten.addmm.default, random_reals(5, 6), A, C, {"beta": 0, "alpha": 0.3}),
    (aten.baddbmm.default, random_reals(2, 5, 6), *THREE, {"beta": 0.5, "alpha": 0.3}),
    # several matrices, permuted and repeated ones among them
    (aten.bmm.default, random_reals(3, 4, 5), random_reals(3, 5, 6)),
    (
        aten.bmm.default,
        random_reals(4, 3, 5).transpose(0, 1),
        random_reals(3, 6, 5).transpose(1, 2),
    ),
    (aten.bmm.default, random_reals(1, 4, 5).expand(3, 4, 5), random_reals(3, 5, 1)),
    (aten.bmm.default, random_reals(1, 4, 5), random_reals(1, 5, 6)),
    (aten.baddbmm.default, random_reals(4, 6), random_reals(3, 4, 5), random_reals(3, 5, 6)),
    # vectors
    (aten.mv.default, random_reals(5, 7), random_reals(7)),
    (aten.mv.default, random_reals(7, 5).t(), random_reals(14)[::2]),
    (aten.addmv.default, random_reals(5), random_reals(5, 7), random_reals(7)),
    (aten.dot.default, random_reals(7), random_reals(14)[::2]),
    # losses of classes that lie apart, and of targets in any order
    (
        aten.nll_loss_forward.default,
        random_reals(4, 3).t(),
        torch.tensor([0, 9, 3, 9, 1])[::2],
        None,
        MEAN,
        -100,
    ),
    (aten.nll_loss2d_forward.default, IMAGE, PLACES.transpose(1, 2), None, MEAN, -100),
]


@pytest.mark.parametrize("operation", CALLS, ids=lambda operation: str(operation[0]))
def test_calls(operation):
    """Operators however their operands lie, with factors, and of vectors."""
    check_call(operation)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize(
    ("name", "numbers"), [("mse_loss", ()), ("smooth_l1_loss", (0.7,)), ("huber_loss", (0.7,))]
)
def test_regression(name, numbers, reduction):
    """Losses of distances, and their gradients; targets lie alike, otherwise, or repeat."""
    x = random_reals(3, 4)
    forward, backward = (getattr(aten, n).default for n in (name, f"{name}_backward"))
    gradient = random_reals(3, 4) if reduction == NONE else torch.tensor(1.3, dtype=torch.float64)
    for y in (random_reals(3, 4) - 1, random_reals(4, 3).t(), x.clone()):
        check(forward, x, y, reduction, *numbers)
        assert check(backward, gradient, x, y, reduction, *numbers).can_overwrite_operand
    if name == "mse_loss":
        check(forward, x, random_reals(4), reduction)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy(reduction, *, weighted):
    """The cross entropy of probabilities, the certain ones among them, and of logits."""
    x, y = random_reals(3, 4).sigmoid(), random_reals(4, 3).t().abs().clamp(max=1)
    x[0, 0], x[0, 1] = 0, 1
    weight = random_reals(4).abs() if weighted else None
    gradient = random_reals(3, 4) if reduction == NONE else torch.tensor(1.3, dtype=torch.float64)
    check(aten.binary_cross_entropy.default, x, y, weight, reduction)
    check(aten.binary_cross_entropy_backward.default, gradient, x, y, weight, reduction)
    positive = random_reals(1, 4).abs() if weighted else None
    logits = 20 * random_reals(3, 4)
    operator = aten.binary_cross_entropy_with_logits.default
    check(operator, logits, y, weight, positive, reduction)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 4, 3, 5)], ids=str)
def test_negative_log_likelihood(shape, reduction, *, weighted):
    """The loss of classes of vectors, batches and images; some targets are ignored."""
    x = random_reals(*shape)
    places = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.arange(2, 2 + max(1, torch.Size(places).numel())).view(places) % 4
    weight = random_reals(8)[::2].abs() if weighted else None
    name = "nll_loss2d" if len(shape) > 2 else "nll_loss"
    for ignored in (-100, 3):
        arguments = (target, weight, reduction, ignored)
        forward = getattr(aten, f"{name}_forward").default
        check(forward, x, *arguments)
        _, total = forward(x, *arguments)
        gradient = (
            random_reals(*places) if reduction == NONE else torch.tensor(1.3, dtype=torch.float64)
        )
        check(getattr(aten, f"{name}_backward").default, gradient, x, *arguments, total)


# -- norms -----------------------------------------------------------------------------------------
SHAPES = {
    "images": (2, 6, 5, 4),
    "one image": (1, 4, 3, 3),
    "one dimension": (3, 4, 7),
    "rows": (5, 4),
}
EPSILON = 1e-5


def normal(*shape):
    """Return a random tensor, not around zero."""
    return torch.randn(shape, dtype=torch.float64) * 2 + 3


def layouts(tensor):
    """Return a tensor, and one of the same values whose channels lie last."""
    if tensor.ndim < 3:
        return [tensor]
    return [tensor, tensor.movedim(1, -1).contiguous().movedim(-1, 1)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batch_norm_is_pytorchs(shape, affine):
    """Training and evaluation, running statistics and gradients are PyTorch's."""
    channels = shape[1]
    w, b = (normal(channels), normal(channels)) if affine else (None, None)
    mean, variance = normal(channels), normal(channels).abs()
    masks = [[True] * 3, [True, False, False]]
    masks += [[False, True, True], [False, True, False], [True, False, True]] if affine else []
    for x in layouts(normal(*shape)):
        for training in (True, False):
            check(
                aten._native_batch_norm_legit_functional.default,
                *(x, w, b, mean, variance, training, 0.3, EPSILON),
            )
        check(aten._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, EPSILON)
        own = (x, w, b, mean, variance, 0.1, EPSILON)
        check(aten._native_batch_norm_legit_no_training.default, *own)
        dy = torch.randn_like(x)
        _, center, scale = aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, EPSILON)
        for training in (True, False):
            for mask in masks:
                check(
                    aten.native_batch_norm_backward.default,
                    *(dy, x, w, mean, variance, center, scale, training, EPSILON, mask),
                )


def test_norms_take_permuted_tensors():
    """Tensors of a norm may lie in different orders, and a gradient may be one number."""
    x = normal(2, 4, 3, 5)
    _, mean, scale = aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, EPSILON)
    number = torch.tensor(0.5, dtype=torch.float64)
    for dy in (*layouts(normal(2, 4, 3, 5)), number.expand(2, 4, 3, 5)):
        rest = (None, None, None, mean, scale, True, EPSILON, [True, False, False])
        check(aten.native_batch_norm_backward.default, dy, x, *rest)
    w, b = normal(6), normal(6)
    x, dy = (normal(2, 6, 10).transpose(1, 2) for _ in range(2))
    check(aten.native_layer_norm.default, x, [6], w, b, EPSILON)
    _, mean, scale = aten.native_layer_norm(x, [6], w, b, EPSILON)
    for back in (dy, dy.contiguous()):
        rest = (mean, scale, w, b, [True, True, True])
        check(aten.native_layer_norm_backward.default, back, x, [6], *rest)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_batch_norm_keeps_digits(offset):
    """Values far from zero lose no more digits than their difference from the mean must."""
    x = torch.randn((2, 3, 40, 40), dtype=torch.float64) + offset
    arguments = (aten._native_batch_norm_legit.no_stats, x, None, None, True, 0.1, EPSILON)
    check(*arguments, tolerance=1e-12 if offset == 0 else 1e-9)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "inner"), [((2, 5, 6), 1), ((7, 4), 1), ((2, 3, 4, 5), 2), ((6,), 1), ((2, 4), 2)]
)
def test_layer_norm_is_pytorchs(shape, inner, affine):
    """Result, statistics and gradients are PyTorch's."""
    own = list(shape[len(shape) - inner :])
    w, b = (normal(*own), normal(*own)) if affine else (None, None)
    x, dy = normal(*shape), normal(*shape)
    check(aten.native_layer_norm.default, x, own, w, b, EPSILON)
    _, mean, scale = aten.native_layer_norm(x, own, w, b, EPSILON)
    masks = [[True, True, True], [False, False, True]] if affine else []
    for mask in ([True, False, False], *masks):
        check(aten.native_layer_norm_backward.default, dy, x, own, mean, scale, w, b, mask)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_is_pytorchs(groups, affine):
    """Result, statistics and gradients are PyTorch's."""
    w, b = (normal(6), normal(6)) if affine else (None, None)
    for x in layouts(normal(3, 6, 4, 5)):
        check(aten.native_group_norm.default, x, w, b, 3, 6, 20, groups, EPSILON)
        _, mean, scale = aten.native_group_norm(x, w, b, 3, 6, 20, groups, EPSILON)
        rest = (mean, scale, w, 3, 6, 20, groups)
        masks = [[True, False, False]] if x.is_contiguous() else []  # PyTorch crashes on others
        masks += [[True, True, True]] if affine else []
        for mask in masks:
            dy = torch.randn_like(x)
            check(aten.native_group_norm_backward.default, dy, x, *rest, mask)
