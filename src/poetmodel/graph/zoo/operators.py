"""The operators of the zoo, each a function that declares one use of it.

A new operator is one function more: it states shapes, FLOP, memory traffic, workspace, weights and
the parts of its backward as a `Declaration`, and `Tape.record` makes the nodes. `name` is the name
of the forward node. Images have the shape (batch, channels, height, width), and windows over them
the same `kernel`, `stride` and `padding` in both directions, unless said otherwise. Flattening and
reshaping are no operators: `Value.flatten` and `Value.view` cost nothing and add no node. The
backward of a norm needs sums over what it normalizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError
from poetmodel.graph.node import Phase
from poetmodel.graph.zoo.declaration import (
    FLOAT_BYTES,
    INDEX_BYTES,
    MASK_BYTES,
    Declaration,
    Gradient,
    Value,
    Weight,
    window_grid,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal


def conv2d(
    name: str,
    x: Value,
    *,
    channels: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    padding: int | Literal["same"] = 0,
    groups: int = 1,
    bias: bool = False,
) -> Declaration:
    """Declare a convolution of images; with as many `groups` as channels it is a depthwise one.

    The gradient of the weights reads the input and the arriving gradient, that of the input only
    the latter and the weights. A bias costs no FLOP forward (sums start from it) and one per
    element of the arriving gradient backward. No workspace: the kernel is taken to be direct. One
    that copies windows side by side (im2col) would need ``kernel**2`` times the input of a group.
    A window may have two sides, height and width.
    """
    batch, channels_in = x.shape[:2]
    if channels % groups or channels_in % groups:
        raise InputError(
            f"{name}: {channels_in} and {channels} channels do not split into {groups} groups"
        )
    grid = window_grid(name, x, kernel=kernel, stride=stride, padding=padding)
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    y = x.made(name, batch, channels, *grid)
    weight = Weight(
        name=f"{name}.weight",
        shape=(channels, channels_in // groups, *sides),
        item_bytes=x.item_bytes,
    )
    return _affine("conv2d", name, x, y, weight=weight, bias_size=channels if bias else 0)


def linear(
    name: str, x: Value, *, features: int, bias: bool = True, tied_to: str | None = None
) -> Declaration:
    """Declare a fully connected layer over the last dimension.

    `tied_to` names a weight of shape (features, features_in) to use in place of an own one. What
    the backward reads and what a bias costs is as for a convolution.
    """
    *rows, features_in = x.shape
    y = x.made(name, *rows, features)
    weight = Weight(
        name=tied_to or f"{name}.weight", shape=(features, features_in), item_bytes=x.item_bytes
    )
    return _affine("linear", name, x, y, weight=weight, bias_size=features if bias else 0)


def _affine(
    op: str, name: str, x: Value, y: Value, *, weight: Weight, bias_size: int
) -> Declaration:
    """Declare a sum of weighted inputs: one row of the weight makes one element of the result."""
    weights = [weight]
    macs = y.size * (weight.size // weight.shape[0])
    parts = [Gradient(part="weight", of=weight, saved=(x,), flops=2 * macs)]
    if bias_size:
        bias = Weight(name=f"{name}.bias", shape=(bias_size,), item_bytes=x.item_bytes)
        weights.append(bias)
        parts.append(Gradient(part="bias", of=bias, flops=y.size))
    return Declaration(
        name=name,
        op=op,
        inputs=(x,),
        outputs=(y,),
        weights=tuple(weights),
        macs=macs,
        parts=(*parts, Gradient(part="input", of=x, reads=(weight,), flops=2 * macs)),
    )


def matmul(name: str, left: Value, right: Value, *, transpose_right: bool = False) -> Declaration:
    """Declare a batched product of two computed matrices, (..., n, k) and (..., k, m).

    The gradient of each side reads the other side. Operands and result may lie in memory in any
    order of their dimensions, so splitting and merging attention heads are views.
    """
    *batch, n, k = left.shape
    *batch_right, k_right, m = right.shape
    if transpose_right:
        k_right, m = m, k_right
    if (batch, k) != (batch_right, k_right):
        raise InputError(f"{name}: shapes {left.shape} and {right.shape} cannot be multiplied")
    y = left.made(name, *batch, n, m)
    macs = y.size * k
    return Declaration(
        name=name,
        op="matmul",
        inputs=(left, right),
        outputs=(y,),
        macs=macs,
        parts=(
            Gradient(part="left", of=left, saved=(right,), flops=2 * macs),
            Gradient(part="right", of=right, saved=(left,), flops=2 * macs),
        ),
    )


def embedding(name: str, ids: Value, *, rows: int, features: int, item_bytes: int) -> Declaration:
    """Declare the look-up of rows of a table of `rows` times `features`.

    The gradient of the table reads the ids and the arriving gradient and is added row by row to
    the resident buffer; ids have none.
    """
    y = ids.made(name, *ids.shape, features, item_bytes=item_bytes)
    table = Weight(name=f"{name}.weight", shape=(rows, features), item_bytes=item_bytes)
    return Declaration(
        name=name,
        op="embedding",
        inputs=(ids,),
        outputs=(y,),
        weights=(table,),
        weight_bytes_moved=y.bytes,
        parts=(
            Gradient(
                part="weight", of=table, saved=(ids,), flops=y.size, added_bytes_moved=2 * y.bytes
            ),
        ),
    )


def max_pool(
    name: str, x: Value, *, kernel: int, stride: int | None = None, padding: int = 0
) -> Declaration:
    """Declare max pooling; the stride is the size of the window by default.

    Its outputs are the maxima and their places; the backward reads only the places. A place is
    the position inside the window: 1 byte for windows of up to 256 elements.
    """
    grid = window_grid(name, x, kernel=kernel, stride=stride or kernel, padding=padding)
    y = x.made(name, *x.shape[:2], *grid)
    place_bytes = 1 if kernel**2 <= 2**8 else INDEX_BYTES
    places = y.made(f"{name}.indices", *y.shape, item_bytes=place_bytes)
    forward = (kernel**2 - 1) * y.size
    return _unary("max_pool", x, y, places, flops=forward, gradient_flops=y.size, saved=(places,))


def avg_pool(
    name: str, x: Value, *, kernel: int, stride: int | None = None, padding: int = 0
) -> Declaration:
    """Declare average pooling; its backward reads only the arriving gradient."""
    grid = window_grid(name, x, kernel=kernel, stride=stride or kernel, padding=padding)
    y = x.made(name, *x.shape[:2], *grid)
    work = kernel**2 * y.size
    return _unary("avg_pool", x, y, flops=work, gradient_flops=work)


def global_avg_pool(name: str, x: Value) -> Declaration:
    """Declare the average of each channel; its backward reads only the arriving gradient."""
    y = x.made(name, *x.shape[:2])
    return _unary("global_avg_pool", x, y, flops=x.size, gradient_flops=x.size)


def select(name: str, x: Value) -> Declaration:
    """Declare the copy of each sample's first row, such as a sequence's first token.

    Its backward reads only the arriving gradient and fills the other rows with zeros. It is a copy
    and not a view: a view would keep the whole sequence for the sake of one row.
    """
    batch, _, features = x.shape
    return _unary("select", x, x.made(name, batch, features), flops=0, gradient_flops=0)


_ACTIVATIONS: Final[Mapping[str, tuple[int, int]]] = {
    "relu": (1, 1),
    "relu6": (2, 2),
    "tanh": (1, 3),
    # x / 2 * (1 + erf(x / sqrt 2)); backward: Phi(x) 4, x * phi(x) 5, sum and product 2
    "gelu": (5, 11),
}
"""FLOP per element, forward and backward."""


def activation(name: str, x: Value, *, kind: str) -> Declaration:
    """Declare an activation function: ``relu``, ``relu6``, ``tanh`` or ``gelu``.

    The backward of GELU reads the function's input; the others read their result, which the next
    layer keeps anyway. Both directions may be computed in place.
    """
    if kind not in _ACTIVATIONS:
        raise InputError(f"{name}: expected one of {', '.join(_ACTIVATIONS)}, got {kind!r}")
    forward, backward = (flops * x.size for flops in _ACTIVATIONS[kind])
    y = x.made(name, *x.shape)
    saved = (x if kind == "gelu" else y,)
    return _unary(kind, x, y, flops=forward, gradient_flops=backward, saved=saved, in_place=y)


def add(name: str, *terms: Value) -> Declaration:
    """Declare a sum, such as that of a residual connection.

    Its backward reads nothing and computes nothing: the arriving gradient *is* the gradient of
    every term, so it is passed on without a node or a copy. Only for a term that lacks leading
    dimensions of the first (it is repeated along them) a node sums the gradient over them. The
    first term has the shape of the result.
    """
    first = terms[0]
    for term in terms[1:]:
        if term.shape != first.shape[len(first.shape) - len(term.shape) :]:
            raise InputError(f"{name}: shapes {first.shape} and {term.shape} cannot be added")
    repeated = [k for k, term in enumerate(terms) if term.shape != first.shape]
    y = first.made(name, *first.shape)
    return Declaration(
        name=name,
        op="add",
        inputs=terms,
        outputs=(y,),
        in_place=y,
        other_flops=(len(terms) - 1) * first.size,
        parts=tuple(Gradient(part=f"input{k}", of=terms[k], flops=first.size) for k in repeated),
        passes=tuple(term for k, term in enumerate(terms) if k not in repeated),
    )


def scale(name: str, x: Value) -> Declaration:
    """Declare a product with a constant; its backward reads only the arriving gradient."""
    y = x.made(name, *x.shape)
    return _unary("scale", x, y, flops=x.size, gradient_flops=x.size, in_place=y)


def dropout_mask(name: str, x: Value) -> Declaration:
    """Declare the drawing of a mask of the shape of `x`, which is not read; see `dropout`."""
    return Declaration(
        name=name,
        op="dropout_mask",
        outputs=(x.made(name, *x.shape, item_bytes=MASK_BYTES),),
        other_flops=x.size,
        recomputable=False,
    )


def dropout(name: str, x: Value, mask: Value) -> Declaration:
    """Declare dropout: the input where the mask says so, scaled up, and zero elsewhere.

    The rule: a mask is drawn once. Drawn again it would be another one, and the gradient would
    not be that of the loss; so `dropout_mask` is not recomputable, and its mask (1 byte per
    element) is kept or paged until the backward has read it. Applying a mask gives the same every
    time, so this node, whose result is larger, may be recomputed. As one node with two outputs
    neither could be.
    """
    y, work = x.made(name, *x.shape), 2 * x.size
    return _unary(
        "dropout",
        x,
        y,
        also=(mask,),
        flops=work,
        gradient_flops=work,
        saved=(mask,),
        in_place=y,
    )


# Per element: maximum, subtract, exponential, sum, then divide (or, for the logarithm, subtract).
_SOFTMAX_FLOPS = 5


def softmax(name: str, x: Value) -> Declaration:
    """Declare softmax over the last dimension; its backward reads its result."""
    y = x.made(name, *x.shape)
    # Backward, per element: times the result, row sum, subtract, times the result.
    return _unary(
        "softmax",
        x,
        y,
        flops=_SOFTMAX_FLOPS * x.size,
        gradient_flops=4 * x.size,
        saved=(y,),
        in_place=y,
    )


def cross_entropy(name: str, logits: Value, labels: Value) -> Declaration:
    """Declare the mean cross entropy of softmax over the last dimension.

    Its outputs are the loss, a single number, and the logarithms of the probabilities, which its
    backward reads with the labels. The gradient of the loss is 1 and no tensor.
    """
    loss = logits.made(name, item_bytes=FLOAT_BYTES)
    logs = logits.made(f"{name}.log_probabilities", *logits.shape)
    return _unary(
        "cross_entropy",
        logits,
        loss,
        logs,
        also=(labels,),
        flops=_SOFTMAX_FLOPS * logits.size + labels.size,
        # exponential and scale per element; subtract 1 at each label
        gradient_flops=2 * logits.size + labels.size,
        saved=(logs, labels),
        in_place=logs,
        phase=Phase.LOSS,
    )


def mean_squared_error(name: str, x: Value, target: Value) -> Declaration:
    """Declare the mean of squared differences; its backward reads both sides.

    Forward subtracts, squares and adds, backward subtracts and scales.
    """
    if x.shape != target.shape:
        raise InputError(f"{name}: shapes {x.shape} and {target.shape} cannot be compared")
    return Declaration(
        name=name,
        op="mean_squared_error",
        inputs=(x, target),
        outputs=(x.made(name, item_bytes=FLOAT_BYTES),),
        other_flops=3 * x.size,
        parts=(Gradient(part="input", of=x, saved=(x, target), flops=2 * x.size, in_place=True),),
        phase=Phase.LOSS,
    )


def _unary(
    op: str,
    x: Value,
    *outputs: Value,
    also: tuple[Value, ...] = (),
    flops: int,
    gradient_flops: int,
    saved: tuple[Value, ...] = (),
    in_place: Value | None = None,
    phase: Phase = Phase.FORWARD,
) -> Declaration:
    """Declare an operator without weights, and with the gradient of one input.

    Its first output is the result; `also` are inputs without a gradient. The output `in_place` may
    take over the memory of the input, and so may its backward in its turn.
    """
    return Declaration(
        name=outputs[0].name,
        op=op,
        inputs=(x, *also),
        outputs=outputs,
        other_flops=flops,
        parts=(
            Gradient(
                part="input",
                of=x,
                saved=saved,
                flops=gradient_flops,
                in_place=in_place is not None,
            ),
        ),
        in_place=in_place,
        phase=phase,
    )


# Per element: mean 1, variance 3, then subtract, scale by deviation and weight, add the bias.
_NORM_FLOPS = 8
# Per element, statistics given: subtract, scale by deviation and weight, add the bias.
_EVALUATED_NORM_FLOPS = 4
# Per element: the sum of the gradient times the normalized input, and that of the gradient.
_NORM_SUMS_FLOPS = {"weight": 3, "bias": 1}
# Per element: subtract the mean, scale, subtract the two means of the gradient, scale.
_NORM_INPUT_FLOPS = 5


def batch_norm(name: str, x: Value) -> Declaration:
    """Declare batch normalization in training: statistics per channel, from the batch.

    Its outputs are the result and, in single precision, mean and inverse deviation; all parts of
    its backward read these two, the input and the arriving gradient.

    Running statistics are tensors only where state is in the graph. Then a node of its own renews
    them from mean and inverse deviation, so that the batch norm itself may be computed again. One
    whose weight is not trained normalizes with them, as in evaluation: it has no statistics of the
    batch, and its backward scales the arriving gradient and reads no input.
    """
    channels = x.shape[1]
    declared = _normalize("batch_norm", name, x, statistics=channels, scales=channels)
    weight, bias = declared.weights
    mean, variance = (
        Weight(
            name=f"{name}.running_{what}",
            shape=(channels,),
            item_bytes=FLOAT_BYTES,
            trainable=False,
        )
        for what in ("mean", "variance")
    )
    evaluated = Declaration(
        name=name,
        op="batch_norm_evaluated",
        inputs=(x,),
        outputs=declared.outputs[:1],
        weights=(weight, bias, mean, variance),
        other_flops=_EVALUATED_NORM_FLOPS * x.size,
        parts=(
            Gradient(part="bias", of=bias, flops=x.size),
            Gradient(part="input", of=x, reads=(weight, variance), flops=x.size, in_place=True),
        ),
        joint=True,
        in_place=declared.in_place,
    )
    return replace(declared, running=(mean, variance), evaluated=evaluated)


def layer_norm(name: str, x: Value) -> Declaration:
    """Declare layer normalization over the last dimension: statistics per row.

    Outputs and backward are as for `batch_norm`; there are no running statistics.
    """
    features = x.shape[-1]
    return _normalize("layer_norm", name, x, statistics=x.size // features, scales=features)


def _normalize(op: str, name: str, x: Value, *, statistics: int, scales: int) -> Declaration:
    y = x.made(name, *x.shape)
    mean, inverse_deviation = (
        x.made(f"{name}.{what}", statistics, item_bytes=FLOAT_BYTES)
        for what in ("mean", "inverse_deviation")
    )
    saved = (x, mean, inverse_deviation)
    weights = {
        what: Weight(name=f"{name}.{what}", shape=(scales,), item_bytes=x.item_bytes)
        for what in _NORM_SUMS_FLOPS
    }
    sums = {what: flops * x.size for what, flops in _NORM_SUMS_FLOPS.items()}
    return Declaration(
        name=name,
        op=op,
        inputs=(x,),
        outputs=(y, mean, inverse_deviation),
        weights=tuple(weights.values()),
        other_flops=_NORM_FLOPS * x.size,
        parts=(
            Gradient(part="weight", of=weights["weight"], saved=saved, flops=sums["weight"]),
            Gradient(part="bias", of=weights["bias"], flops=sums["bias"]),
            Gradient(
                part="input",
                of=x,
                saved=saved,
                reads=(weights["weight"],),
                flops=sum(sums.values()) + _NORM_INPUT_FLOPS * x.size,
                spared=tuple(sums.items()),
                in_place=True,
            ),
        ),
        joint=True,
        in_place=y,
    )
