"""The norms, operators whose backward needs sums over what it normalizes."""

from __future__ import annotations

from dataclasses import replace

from poetmodel.graph.zoo.declaration import FLOAT_BYTES, Declaration, Gradient, Value, Weight

# Per element: mean 1, variance 3, then subtract, scale by deviation and weight, add the bias.
_FORWARD_FLOPS = 8
# Per element, statistics given: subtract, scale by deviation and weight, add the bias.
_EVALUATED_FLOPS = 4
# Per element: the sum of the gradient times the normalized input, and that of the gradient.
_SUMS_FLOPS = {"weight": 3, "bias": 1}
# Per element: subtract the mean, scale, subtract the two means of the gradient, scale.
_INPUT_FLOPS = 5


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
        other_flops=_EVALUATED_FLOPS * x.size,
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
        for what in _SUMS_FLOPS
    }
    sums = {what: flops * x.size for what, flops in _SUMS_FLOPS.items()}
    return Declaration(
        name=name,
        op=op,
        inputs=(x,),
        outputs=(y, mean, inverse_deviation),
        weights=tuple(weights.values()),
        other_flops=_FORWARD_FLOPS * x.size,
        parts=(
            Gradient(part="weight", of=weights["weight"], saved=saved, flops=sums["weight"]),
            Gradient(part="bias", of=weights["bias"], flops=sums["bias"]),
            Gradient(
                part="input",
                of=x,
                saved=saved,
                reads=(weights["weight"],),
                flops=sum(sums.values()) + _INPUT_FLOPS * x.size,
                spared=tuple(sums.items()),
                in_place=True,
            ),
        ),
        joint=True,
        in_place=y,
    )
