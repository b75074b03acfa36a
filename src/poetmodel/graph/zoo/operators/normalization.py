"""Batch and layer normalization."""

from __future__ import annotations

from poetmodel.graph.zoo.declaration import Declaration, Gradient
from poetmodel.graph.zoo.values import FLOAT_BYTES, Value, Weight

# Per element: mean 1, variance 3, then subtract, scale by deviation and weight, add the bias.
_FORWARD_FLOPS = 8
# Per element: sums of the gradient (1) and of the gradient times the normalized input (3).
_SUMS_FLOPS = 4
# Per element: subtract the mean, scale, subtract the two means of the gradient, scale.
_INPUT_FLOPS = 5


def batch_norm(name: str, x: Value) -> Declaration:
    """Declare batch normalization in training: statistics per channel, from the batch.

    Its outputs are the result and, in single precision, mean and inverse deviation; both parts of
    its backward read these two, the input and the arriving gradient.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value, shape (batch, channels, height, width)
        Input.

    Notes
    -----
    Running statistics belong to inference and are no tensors here. Whoever runs a schedule updates
    them at the first computation only: computing the node again gives the same outputs.
    """
    channels = x.shape[1]
    return _normalize("batch_norm", name, x, statistics=channels, scales=channels)


def layer_norm(name: str, x: Value) -> Declaration:
    """Declare layer normalization over the last dimension: statistics per row.

    Outputs and backward are as for `batch_norm`.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value, shape (..., features)
        Input.
    """
    features = x.shape[-1]
    return _normalize("layer_norm", name, x, statistics=x.size // features, scales=features)


def _normalize(op: str, name: str, x: Value, *, statistics: int, scales: int) -> Declaration:
    mean, inverse_deviation = (
        x.made(f"{name}.{what}", statistics, item_bytes=FLOAT_BYTES)
        for what in ("mean", "inverse_deviation")
    )
    saved = (x, mean, inverse_deviation)
    weight, bias = (
        Weight(name=f"{name}.{what}", shape=(scales,), item_bytes=x.item_bytes)
        for what in ("weight", "bias")
    )
    return Declaration(
        name=name,
        op=op,
        inputs=(x,),
        outputs=(x.made(name, *x.shape), mean, inverse_deviation),
        weights=(weight, bias),
        other_flops=_FORWARD_FLOPS * x.size,
        gradients=(
            Gradient(
                part="weight",
                of=None,
                saved=saved,
                flops=_SUMS_FLOPS * x.size,
                weight_bytes_moved=weight.bytes + bias.bytes,
            ),
            Gradient(
                part="input",
                of=x,
                saved=saved,
                flops=(_SUMS_FLOPS + _INPUT_FLOPS) * x.size,
                weight_bytes_moved=weight.bytes,
            ),
        ),
        shared_flops=_SUMS_FLOPS * x.size,
    )
