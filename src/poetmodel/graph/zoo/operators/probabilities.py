"""Softmax and the loss."""

from __future__ import annotations

from poetmodel.graph.structure import Phase
from poetmodel.graph.zoo.declaration import Declaration, Gradient
from poetmodel.graph.zoo.values import FLOAT_BYTES, Value

# Per element: maximum, subtract, exponential, sum, then divide (or, for the logarithm, subtract).
_SOFTMAX_FLOPS = 5


def softmax(name: str, x: Value) -> Declaration:
    """Declare softmax over the last dimension; its backward reads its result.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value, shape (..., classes)
        Input.
    """
    y = x.made(name, *x.shape)
    return Declaration(
        name=name,
        op="softmax",
        inputs=(x,),
        outputs=(y,),
        other_flops=_SOFTMAX_FLOPS * x.size,
        # times the result, row sum, subtract, times the result
        gradients=(Gradient(part="input", of=x, saved=(y,), flops=4 * x.size),),
    )


def cross_entropy(name: str, logits: Value, labels: Value) -> Declaration:
    """Declare the mean cross entropy of softmax over the last dimension.

    Its outputs are the loss, a single number, and the logarithms of the probabilities, which its
    backward reads with the labels. The gradient of the loss is 1 and no tensor.

    Parameters
    ----------
    name : str
        Of the node.
    logits : Value, shape (..., classes)
        Unnormalized scores.
    labels : Value, shape (...)
        The right classes.
    """
    loss = logits.made(name, item_bytes=FLOAT_BYTES)
    logs = logits.made(f"{name}.log_probabilities", *logits.shape)
    return Declaration(
        name=name,
        op="cross_entropy",
        phase=Phase.LOSS,
        inputs=(logits, labels),
        outputs=(loss, logs),
        other_flops=_SOFTMAX_FLOPS * logits.size + labels.size,
        # exponential and scale per element; subtract 1 at each label
        gradients=(
            Gradient(
                part="input",
                of=logits,
                saved=(logs, labels),
                flops=2 * logits.size + labels.size,
            ),
        ),
    )
