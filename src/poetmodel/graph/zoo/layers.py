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


def conv_bn(
    tape: Tape,
    x: Value,
    names: tuple[str, str],
    *,
    channels: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
) -> Value:
    """Add a convolution that keeps the size (over the stride), without bias, and its batch norm."""
    x = tape.record(
        conv2d(
            names[0],
            x,
            channels=channels,
            kernel=kernel,
            stride=stride,
            padding=kernel // 2,
            groups=groups,
        )
    )
    return tape.record(batch_norm(names[1], x))


def activate(tape: Tape, name: str, x: Value, kind: str = "relu") -> Value:
    """Add an activation function."""
    return tape.record(activation(name, x, kind=kind))


def drop(tape: Tape, name: str, x: Value, *, rate: float) -> Value:
    """Add the two nodes of dropout, or none where nothing is dropped.

    Raises
    ------
    InputError
        If the rate is not a share below 1.
    """
    if not _is_rate(rate):
        msg = f"dropout: expected a number from 0 to below 1, got {rate!r}"
        raise InputError(msg)
    if rate == 0:
        return x
    return tape.record(dropout(name, x, tape.record(dropout_mask(f"{name}.mask", x))))


def _is_rate(rate: object) -> bool:
    return isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate < 1


def classify(tape: Tape, name: str, x: Value, *, classes: int) -> Graph:
    """Add the last linear layer, the labels and the loss, and return the training graph."""
    logits = tape.record(linear(name, x, features=classes))
    labels = tape.indices("labels", *logits.shape[:-1])
    return tape.differentiate(cross_entropy("loss", logits, labels))
