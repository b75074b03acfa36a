"""Residual networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.graph.zoo.models.layers import activate, classify, conv_bn, image
from poetmodel.graph.zoo.operators import add, global_avg_pool, max_pool
from poetmodel.graph.zoo.tape import Settings, Tape
from poetmodel.graph.zoo.values import require_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Unpack

    from poetmodel.graph.structure import Graph
    from poetmodel.graph.zoo.values import Value

    Block = Callable[[Tape, str, Value, int, int], Value]

_WIDTHS: Final = (64, 128, 256, 512)
"""Channels of the four stages."""

_EXPANSION: Final = 4
"""Channels that a bottleneck puts out, over those inside."""


def resnet18(*, image_size: int = 224, classes: int = 1000, **settings: Unpack[Settings]) -> Graph:
    """Return ResNet-18: 11,689,512 parameters with 1000 classes.

    Parameters
    ----------
    image_size : int
        Side of the square colour image.
    classes : int
        Number of classes.
    **settings
        As the keys of `Settings`.

    Returns
    -------
    Graph
        The training graph.

    References
    ----------
    K. He et al., "Deep residual learning for image recognition", CVPR 2016, table 1,
    doi:10.1109/CVPR.2016.90.
    """
    return _resnet("resnet18", _basic, (2, 2, 2, 2), image_size, classes, **settings)


def resnet18_cifar(
    *, image_size: int = 32, classes: int = 10, **settings: Unpack[Settings]
) -> Graph:
    """Return ResNet-18 for CIFAR-10: a 3 x 3 first convolution of stride 1 and no max pooling.

    It has 11,173,962 parameters with 10 classes.

    Parameters
    ----------
    image_size, classes, **settings
        As of `resnet18`.

    Returns
    -------
    Graph
        The training graph.
    """
    return _resnet(
        "resnet18-cifar", _basic, (2, 2, 2, 2), image_size, classes, small=True, **settings
    )


def resnet50(*, image_size: int = 224, classes: int = 1000, **settings: Unpack[Settings]) -> Graph:
    """Return ResNet-50 with the stride in the 3 x 3 convolutions ("v1.5", as torchvision has it).

    It has 25,557,032 parameters with 1000 classes.

    Parameters
    ----------
    image_size, classes, **settings
        As of `resnet18`.

    Returns
    -------
    Graph
        The training graph.
    """
    return _resnet("resnet50", _bottleneck, (3, 4, 6, 3), image_size, classes, **settings)


def _resnet(
    name: str,
    block: Block,
    depths: Sequence[int],
    image_size: int,
    classes: int,
    *,
    small: bool = False,
    **settings: Unpack[Settings],
) -> Graph:
    require_counts(image_size=image_size, classes=classes)
    tape = Tape(name, **settings)
    x = image(tape, image_size)
    kernel, stride = (3, 1) if small else (7, 2)
    x = conv_bn(tape, x, ("conv1", "bn1"), channels=_WIDTHS[0], kernel=kernel, stride=stride)
    x = activate(tape, "relu", x)
    if not small:
        x = tape.record(max_pool("maxpool", x, kernel=3, stride=2, padding=1))
    for stage, (width, depth) in enumerate(zip(_WIDTHS, depths, strict=True), start=1):
        for number in range(depth):
            stride = 2 if stage > 1 and number == 0 else 1
            x = block(tape, f"layer{stage}.{number}", x, width, stride)
    return classify(tape, "fc", tape.record(global_avg_pool("avgpool", x)), classes=classes)


def _basic(tape: Tape, name: str, x: Value, width: int, stride: int) -> Value:
    """Add two 3 x 3 convolutions with a skip connection."""
    y = _conv(tape, name, 1, x, channels=width, kernel=3, stride=stride)
    y = activate(tape, f"{name}.relu1", y)
    y = _conv(tape, name, 2, y, channels=width, kernel=3)
    return _join(tape, name, x, y, stride)


def _bottleneck(tape: Tape, name: str, x: Value, width: int, stride: int) -> Value:
    """Add convolutions of 1 x 1, 3 x 3 and 1 x 1 with a skip connection."""
    y = _conv(tape, name, 1, x, channels=width, kernel=1)
    y = activate(tape, f"{name}.relu1", y)
    y = _conv(tape, name, 2, y, channels=width, kernel=3, stride=stride)
    y = activate(tape, f"{name}.relu2", y)
    y = _conv(tape, name, 3, y, channels=_EXPANSION * width, kernel=1)
    return _join(tape, name, x, y, stride)


def _conv(
    tape: Tape, name: str, number: int, x: Value, *, channels: int, kernel: int, stride: int = 1
) -> Value:
    names = (f"{name}.conv{number}", f"{name}.bn{number}")
    return conv_bn(tape, x, names, channels=channels, kernel=kernel, stride=stride)


def _join(tape: Tape, name: str, x: Value, y: Value, stride: int) -> Value:
    """Add the skip connection, projected where the shape changes, the sum and its ReLU."""
    if x.shape != y.shape:
        names = (f"{name}.downsample.conv", f"{name}.downsample.bn")
        x = conv_bn(tape, x, names, channels=y.shape[1], kernel=1, stride=stride)
    return activate(tape, f"{name}.relu", tape.record(add(f"{name}.add", y, x)))
