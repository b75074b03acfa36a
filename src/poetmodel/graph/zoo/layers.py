"""Groups of operators that several models share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.errors import InputError
from poetmodel.graph.zoo.operators import (
    activation,
    batch_norm,
    conv2d,
    cross_entropy,
    dropout,
    dropout_mask,
    linear,
)

if TYPE_CHECKING:
    from poetmodel.graph.structure import Graph
    from poetmodel.graph.zoo.declaration import Value
    from poetmodel.graph.zoo.tape import Tape


def image(tape: Tape, image_size: int, *, channels: int = 3) -> Value:
    """Add a batch of square images."""
    return tape.input("input", tape.batch_size, channels, image_size, image_size)


def conv_bn(tape: Tape, x: Value, names: tuple[str, str], *, kernel: int, **sizes: int) -> Value:
    """Add a convolution that keeps the size (over the stride), without bias, and its batch norm.

    `sizes` are the other sizes of `conv2d`: `channels`, `stride` and `groups`.
    """
    convolution = conv2d(names[0], x, kernel=kernel, padding=kernel // 2, bias=False, **sizes)
    x = tape.record(convolution)
    return tape.record(batch_norm(names[1], x))


def activate(tape: Tape, name: str, x: Value, kind: str = "relu") -> Value:
    """Add an activation function."""
    return tape.record(activation(name, x, kind=kind))


def drop(tape: Tape, name: str, x: Value, *, rate: float) -> Value:
    """Add the two nodes of dropout, or none where nothing is dropped."""
    given: object = rate
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1:
        raise InputError(f"dropout: expected a number from 0 to below 1, got {rate!r}")
    if rate == 0:
        return x
    return tape.record(dropout(name, x, tape.record(dropout_mask(f"{name}.mask", x))))


def classify(tape: Tape, name: str, x: Value, *, classes: int) -> Graph:
    """Add the last linear layer, the labels and the loss, and return the training graph."""
    logits = tape.record(linear(name, x, features=classes))
    labels = tape.indices("labels", *logits.shape[:-1])
    return tape.differentiate(cross_entropy("loss", logits, labels))
