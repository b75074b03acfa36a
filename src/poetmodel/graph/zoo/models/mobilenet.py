"""MobileNetV2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.graph.zoo.models.layers import activate, classify, conv_bn, drop, image
from poetmodel.graph.zoo.operators import add, global_avg_pool
from poetmodel.graph.zoo.tape import Settings, Tape
from poetmodel.graph.zoo.values import require_counts

if TYPE_CHECKING:
    from typing import Unpack

    from poetmodel.graph.structure import Graph
    from poetmodel.graph.zoo.values import Value

_STAGES: Final = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, blocks and first stride of each stage (table 2 of the paper)."""

_FIRST: Final = 32
_LAST: Final = 1280


def mobilenetv2(
    *,
    image_size: int = 224,
    classes: int = 1000,
    dropout: float = 0.2,
    **settings: Unpack[Settings],
) -> Graph:
    """Return MobileNetV2 of width 1: 3,504,872 parameters with 1000 classes.

    Parameters
    ----------
    image_size : int
        Side of the square colour image.
    classes : int
        Number of classes.
    dropout : float
        Rate before the last layer; 0 leaves it out.
    **settings
        As the keys of `Settings`.

    Returns
    -------
    Graph
        The training graph.

    References
    ----------
    M. Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018,
    doi:10.1109/CVPR.2018.00474.
    """
    require_counts(image_size=image_size, classes=classes)
    tape = Tape("mobilenetv2", **settings)
    x = _conv(tape, "features.first", image(tape, image_size), channels=_FIRST, kernel=3, stride=2)
    number = 0
    for expansion, channels, blocks, first_stride in _STAGES:
        for place in range(blocks):
            number += 1
            stride = first_stride if place == 0 else 1
            x = _block(tape, f"block{number}", x, expansion, channels, stride)
    x = _conv(tape, "features.last", x, channels=_LAST, kernel=1)
    x = tape.record(global_avg_pool("avgpool", x))
    return classify(tape, "classifier", drop(tape, "drop", x, rate=dropout), classes=classes)


def _block(tape: Tape, name: str, x: Value, expansion: int, channels: int, stride: int) -> Value:
    """Add an inverted residual: expand, filter each channel, project without activation."""
    inner = expansion * x.shape[1]
    y = x
    if expansion > 1:
        y = _conv(tape, f"{name}.expand", y, channels=inner, kernel=1)
    y = _conv(tape, f"{name}.depthwise", y, channels=inner, kernel=3, stride=stride, groups=inner)
    y = conv_bn(tape, y, (f"{name}.project", f"{name}.project.bn"), channels=channels, kernel=1)
    return tape.record(add(f"{name}.add", y, x)) if x.shape == y.shape else y


def _conv(
    tape: Tape,
    name: str,
    x: Value,
    *,
    channels: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
) -> Value:
    names = (name, f"{name}.bn")
    x = conv_bn(tape, x, names, channels=channels, kernel=kernel, stride=stride, groups=groups)
    return activate(tape, f"{name}.relu6", x, "relu6")
