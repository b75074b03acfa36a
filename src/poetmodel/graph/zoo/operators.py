"""The operators of the zoo: functions that declare one use of an operator.

To add an operator, write a function that returns a `Declaration`: shapes, FLOP, memory traffic,
workspace, weights and the parts of the backward pass. `Tape.record` appends the declaration to the
forward pass, and `Tape.differentiate` makes the nodes. `name` is the name of the forward node.
Images have the shape (batch, channels, height, width). Windows have the same `kernel`, `stride` and
`padding` in both directions, unless stated otherwise. Flattening and reshaping are not operators:
`Value.flatten` and `Value.view` add no node. Each function states the shapes for which it raises
`InputError`; a wrong number of dimensions is not checked.
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
    window_output_size,
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
    """Declare a convolution of images, also a grouped or depthwise one, as operator ``conv2d``.

    A bias costs no FLOP forward (sums start from it); its gradient costs one FLOP per element of
    the incoming gradient. The workspace is 0: the kernel is assumed direct, without unfolding
    windows (im2col, ``kernel**2`` times the input of a group). For `padding`, see
    `window_output_size`.
    """
    batch, channels_in = x.shape[:2]
    if channels % groups or channels_in % groups:
        raise InputError(
            f"{name}: {channels_in} and {channels} channels do not split into {groups} groups"
        )
    output_size = window_output_size(name, x, kernel=kernel, stride=stride, padding=padding)
    kernel_sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    y = x.new_value(name, batch, channels, *output_size)
    weight = Weight(
        name=f"{name}.weight",
        shape=(channels, channels_in // groups, *kernel_sides),
        item_bytes=x.item_bytes,
    )
    return _declare_affine("conv2d", name, x, y, weight=weight, bias_size=channels if bias else 0)


def linear(
    name: str, x: Value, *, features: int, bias: bool = True, tied_to: str | None = None
) -> Declaration:
    """Declare a fully connected layer over the last dimension.

    `tied_to` names an existing weight of shape (features, features_in) to share; the bias is not
    shared. Reads and FLOP of bias and backward pass are those of `conv2d`.
    """
    *leading_sizes, features_in = x.shape
    y = x.new_value(name, *leading_sizes, features)
    weight = Weight(
        name=tied_to or f"{name}.weight", shape=(features, features_in), item_bytes=x.item_bytes
    )
    return _declare_affine("linear", name, x, y, weight=weight, bias_size=features if bias else 0)


def _declare_affine(
    op: str, name: str, x: Value, y: Value, *, weight: Weight, bias_size: int
) -> Declaration:
    """Declare an operator that multiplies its input by a weight and adds a bias (if not size 0)."""
    weights = [weight]
    macs = y.size * (weight.size // weight.shape[0])
    parts = [Gradient(suffix="weight", target=weight, saved=(x,), flops=2 * macs)]
    if bias_size:
        bias = Weight(name=f"{name}.bias", shape=(bias_size,), item_bytes=x.item_bytes)
        weights.append(bias)
        parts.append(Gradient(suffix="bias", target=bias, flops=y.size))
    return Declaration(
        name=name,
        op=op,
        inputs=(x,),
        outputs=(y,),
        weights=tuple(weights),
        macs=macs,
        parts=(*parts, Gradient(suffix="input", target=x, reads=(weight,), flops=2 * macs)),
    )


def matmul(name: str, left: Value, right: Value, *, transpose_right: bool = False) -> Declaration:
    """Declare a batched product of two computed matrices, (..., n, k) and (..., k, m).

    With `transpose_right`, the right one is (..., m, k). Operands may have any strides, so
    splitting and merging attention heads are views.
    """
    *batch, n, k = left.shape
    *batch_right, k_right, m = right.shape
    if transpose_right:
        k_right, m = m, k_right
    if (batch, k) != (batch_right, k_right):
        raise InputError(f"{name}: shapes {left.shape} and {right.shape} cannot be multiplied")
    y = left.new_value(name, *batch, n, m)
    macs = y.size * k
    return Declaration(
        name=name,
        op="matmul",
        inputs=(left, right),
        outputs=(y,),
        macs=macs,
        parts=(
            Gradient(suffix="left", target=left, saved=(right,), flops=2 * macs),
            Gradient(suffix="right", target=right, saved=(left,), flops=2 * macs),
        ),
    )


def embedding(name: str, ids: Value, *, rows: int, features: int, item_bytes: int) -> Declaration:
    """Declare a lookup in a `rows` x `features` table; forward reads only the ids' rows."""
    y = ids.new_value(name, *ids.shape, features, item_bytes=item_bytes)
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
                suffix="weight",
                target=table,
                saved=(ids,),
                flops=y.size,
                accumulation_bytes_moved=2 * y.bytes,
            ),
        ),
    )


def max_pool(
    name: str, x: Value, *, kernel: int, stride: int | None = None, padding: int = 0
) -> Declaration:
    """Declare max pooling; `stride` defaults to `kernel`.

    Outputs are maxima and positions: 1 byte for windows of up to 256 elements, else 4.
    """
    output_size = window_output_size(
        name, x, kernel=kernel, stride=stride or kernel, padding=padding
    )
    y = x.new_value(name, *x.shape[:2], *output_size)
    position_bytes = 1 if kernel**2 <= 2**8 else INDEX_BYTES
    positions = y.new_value(f"{name}.indices", *y.shape, item_bytes=position_bytes)
    return _declare_unary(
        "max_pool",
        x,
        y,
        positions,
        flops=(kernel**2 - 1) * y.size,
        gradient_flops=y.size,
        saved=(positions,),
    )


def global_avg_pool(name: str, x: Value) -> Declaration:
    """Declare the average of each channel; its backward pass reads only the incoming gradient."""
    y = x.new_value(name, *x.shape[:2])
    return _declare_unary("global_avg_pool", x, y, flops=x.size, gradient_flops=x.size)


def select(name: str, x: Value) -> Declaration:
    """Declare a copy of each sample's first row, such as a sequence's first token.

    It copies, because a view would keep the whole sequence in RAM for one row.
    """
    batch, _, features = x.shape
    return _declare_unary(
        "select", x, x.new_value(name, batch, features), flops=0, gradient_flops=0
    )


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

    The backward pass of GELU reads its input, that of the rest the result.
    """
    if kind not in _ACTIVATIONS:
        raise InputError(f"{name}: expected one of {', '.join(_ACTIVATIONS)}, got {kind!r}")
    forward_flops, backward_flops = (flops * x.size for flops in _ACTIVATIONS[kind])
    y = x.new_value(name, *x.shape)
    saved = (x if kind == "gelu" else y,)
    return _declare_unary(
        kind, x, y, flops=forward_flops, gradient_flops=backward_flops, saved=saved, in_place=y
    )


def add(name: str, *terms: Value) -> Declaration:
    """Declare a sum; the result may overwrite the first term, and gradients need no node.

    A term that lacks leading dimensions is broadcast; a node sums its gradient.
    """
    first_term = terms[0]
    for term in terms[1:]:
        if term.shape != first_term.shape[len(first_term.shape) - len(term.shape) :]:
            raise InputError(f"{name}: shapes {first_term.shape} and {term.shape} cannot be added")
    broadcast_indices = [k for k, term in enumerate(terms) if term.shape != first_term.shape]
    y = first_term.new_value(name, *first_term.shape)
    return Declaration(
        name=name,
        op="add",
        inputs=terms,
        outputs=(y,),
        in_place=y,
        other_flops=(len(terms) - 1) * first_term.size,
        parts=tuple(
            Gradient(suffix=f"input{k}", target=terms[k], flops=first_term.size)
            for k in broadcast_indices
        ),
        same_gradient_inputs=tuple(
            term for k, term in enumerate(terms) if k not in broadcast_indices
        ),
    )


def scale(name: str, x: Value) -> Declaration:
    """Declare a product with a constant; its backward pass reads only the incoming gradient."""
    y = x.new_value(name, *x.shape)
    return _declare_unary("scale", x, y, flops=x.size, gradient_flops=x.size, in_place=y)


def dropout_mask(name: str, x: Value) -> Declaration:
    """Declare dropout's mask for `x`, which is not read: 1 byte per element, not recomputable."""
    return Declaration(
        name=name,
        op="dropout_mask",
        outputs=(x.new_value(name, *x.shape, item_bytes=MASK_BYTES),),
        other_flops=x.size,
        recomputable=False,
    )


def dropout(name: str, x: Value, mask: Value) -> Declaration:
    """Declare the node that applies a dropout mask: scale `x` where it is 1, elsewhere return 0.

    A mask is drawn only once, since with another mask the backward pass would not differentiate the
    computed loss. So the node of `dropout_mask` is not recomputable, but this node is: one node
    with both outputs could not be recomputed.
    """
    y, flops = x.new_value(name, *x.shape), 2 * x.size
    return _declare_unary(
        "dropout",
        x,
        y,
        constant_inputs=(mask,),
        flops=flops,
        gradient_flops=flops,
        saved=(mask,),
        in_place=y,
    )


# Per element: maximum, subtract, exponential, sum, then divide (subtract for the logarithm).
_SOFTMAX_FLOPS = 5


def softmax(name: str, x: Value) -> Declaration:
    """Declare softmax over the last dimension; its backward pass reads the result, but not `x`."""
    y = x.new_value(name, *x.shape)
    # Backward, per element: times the result, row sum, subtract, times the result.
    return _declare_unary(
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

    Outputs are the loss, and log probabilities, which the backward pass reads.
    """
    loss = logits.new_value(name, item_bytes=FLOAT_BYTES)
    log_probabilities = logits.new_value(f"{name}.log_probabilities", *logits.shape)
    return _declare_unary(
        "cross_entropy",
        logits,
        loss,
        log_probabilities,
        constant_inputs=(labels,),
        flops=_SOFTMAX_FLOPS * logits.size + labels.size,
        # exponential and scale per element; subtract 1 at each label
        gradient_flops=2 * logits.size + labels.size,
        saved=(log_probabilities, labels),
        in_place=log_probabilities,
        phase=Phase.LOSS,
    )


def mean_squared_error(name: str, x: Value, target: Value) -> Declaration:
    """Declare the mean of squared differences; its backward pass reads `x` and `target`."""
    if x.shape != target.shape:
        raise InputError(f"{name}: shapes {x.shape} and {target.shape} cannot be compared")
    return Declaration(
        name=name,
        op="mean_squared_error",
        inputs=(x, target),
        outputs=(x.new_value(name, item_bytes=FLOAT_BYTES),),
        other_flops=3 * x.size,
        parts=(
            Gradient(suffix="input", target=x, saved=(x, target), flops=2 * x.size, in_place=True),
        ),
        phase=Phase.LOSS,
    )


def _declare_unary(
    op: str,
    x: Value,
    *outputs: Value,
    constant_inputs: tuple[Value, ...] = (),
    flops: int,
    gradient_flops: int,
    saved: tuple[Value, ...] = (),
    in_place: Value | None = None,
    phase: Phase = Phase.FORWARD,
) -> Declaration:
    """Declare an operator without weights and with a gradient for its first input only.

    The output `in_place` may overwrite the first input, the backward node the incoming gradient.
    """
    return Declaration(
        name=outputs[0].name,
        op=op,
        inputs=(x, *constant_inputs),
        outputs=outputs,
        other_flops=flops,
        parts=(
            Gradient(
                suffix="input",
                target=x,
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
# Per element, with known statistics: subtract, scale by deviation and weight, add the bias.
_EVALUATED_NORM_FLOPS = 4
# Per element: sum of the gradient times the normalized input, and sum of the gradient.
_NORM_SUMS_FLOPS = {"weight": 3, "bias": 1}
# Per element: subtract the mean, scale, subtract the two means of the gradient, scale.
_NORM_INPUT_FLOPS = 5


def batch_norm(name: str, x: Value) -> Declaration:
    """Declare batch normalization in training, with batch statistics (float32) per channel.

    In graphs with state, one node computes all gradients, and another updates the running
    statistics, so that the batch norm is recomputable. A batch norm whose weight is not trained
    then normalizes with running statistics, as in evaluation.
    """
    channels = x.shape[1]
    declaration = _declare_normalization(
        "batch_norm", name, x, n_statistics=channels, n_scales=channels
    )
    weight, bias = declaration.weights
    mean, variance = (
        Weight(
            name=f"{name}.running_{statistic}",
            shape=(channels,),
            item_bytes=FLOAT_BYTES,
            trainable=False,
        )
        for statistic in ("mean", "variance")
    )
    untrained_variant = Declaration(
        name=name,
        op="batch_norm_evaluated",
        inputs=(x,),
        outputs=declaration.outputs[:1],
        weights=(weight, bias, mean, variance),
        other_flops=_EVALUATED_NORM_FLOPS * x.size,
        parts=(
            Gradient(suffix="bias", target=bias, flops=x.size),
            Gradient(
                suffix="input", target=x, reads=(weight, variance), flops=x.size, in_place=True
            ),
        ),
        is_one_kernel=True,
        in_place=declaration.in_place,
    )
    return replace(
        declaration, running_statistics=(mean, variance), untrained_variant=untrained_variant
    )


def layer_norm(name: str, x: Value) -> Declaration:
    """Declare layer normalization over the last dimension, with statistics per row.

    As `batch_norm` in training, without running statistics.
    """
    features = x.shape[-1]
    return _declare_normalization(
        "layer_norm", name, x, n_statistics=x.size // features, n_scales=features
    )


def _declare_normalization(
    op: str, name: str, x: Value, *, n_statistics: int, n_scales: int
) -> Declaration:
    """Declare a normalization with `n_statistics` means, and weight and bias of size `n_scales`."""
    y = x.new_value(name, *x.shape)
    mean, inverse_deviation = (
        x.new_value(f"{name}.{statistic}", n_statistics, item_bytes=FLOAT_BYTES)
        for statistic in ("mean", "inverse_deviation")
    )
    saved = (x, mean, inverse_deviation)
    weights = {
        kind: Weight(name=f"{name}.{kind}", shape=(n_scales,), item_bytes=x.item_bytes)
        for kind in _NORM_SUMS_FLOPS
    }
    sum_flops = {kind: flops * x.size for kind, flops in _NORM_SUMS_FLOPS.items()}
    return Declaration(
        name=name,
        op=op,
        inputs=(x,),
        outputs=(y, mean, inverse_deviation),
        weights=tuple(weights.values()),
        other_flops=_NORM_FLOPS * x.size,
        parts=(
            Gradient(
                suffix="weight", target=weights["weight"], saved=saved, flops=sum_flops["weight"]
            ),
            Gradient(suffix="bias", target=weights["bias"], flops=sum_flops["bias"]),
            Gradient(
                suffix="input",
                target=x,
                saved=saved,
                reads=(weights["weight"],),
                flops=sum(sum_flops.values()) + _NORM_INPUT_FLOPS * x.size,
                shared_flops=tuple(sum_flops.items()),
                in_place=True,
            ),
        ),
        is_one_kernel=True,
        in_place=y,
    )
