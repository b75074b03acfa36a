"""VGG-16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.graph.zoo import operators
from poetmodel.graph.zoo.models.layers import activate, classify, drop, image
from poetmodel.graph.zoo.tape import Settings, Tape
from poetmodel.graph.zoo.values import require_counts

if TYPE_CHECKING:
    from typing import Unpack

    from poetmodel.graph.structure import Graph

_STAGES: Final = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and number of the convolutions before each pooling."""

_HIDDEN: Final = 4096


def vgg16(
    *,
    image_size: int = 224,
    classes: int = 1000,
    batch_norm: bool = False,
    dropout: float = 0.5,
    **settings: Unpack[Settings],
) -> Graph:
    """Return VGG-16 (configuration D): 13 convolutions, then layers of 4096, 4096 and `classes`.

    The first linear layer takes the last feature map as it is: 7 x 7 for an image of 224, so
    138,357,544 parameters with 1000 classes.

    Parameters
    ----------
    image_size : int
        Side of the square colour image, at least 32.
    classes : int
        Number of classes.
    batch_norm : bool
        Whether a batch norm follows each convolution.
    dropout : float
        Rate before the second and third linear layer's input; 0 leaves it out.
    **settings
        As the keys of `Settings`.

    Returns
    -------
    Graph
        The training graph.

    References
    ----------
    K. Simonyan, A. Zisserman, "Very deep convolutional networks for large-scale image
    recognition", ICLR 2015, table 1, arXiv:1409.1556.
    """
    return _vgg("vgg16", image_size, classes, batch_norm=batch_norm, rate=dropout, **settings)


def vgg16_cifar(
    *,
    image_size: int = 32,
    classes: int = 10,
    batch_norm: bool = False,
    dropout: float = 0.5,
    **settings: Unpack[Settings],
) -> Graph:
    """Return VGG-16 for CIFAR-10, with the head of the original: 512-4096-4096-`classes`.

    The five poolings leave one pixel of 512 channels from an image of 32, so 33,638,218
    parameters with 10 classes. (Some variants elsewhere have a single linear layer as their head.)

    Parameters
    ----------
    image_size, classes, batch_norm, dropout, **settings
        As of `vgg16`.

    Returns
    -------
    Graph
        The training graph.
    """
    return _vgg("vgg16-cifar", image_size, classes, batch_norm=batch_norm, rate=dropout, **settings)


def _vgg(
    name: str,
    image_size: int,
    classes: int,
    *,
    batch_norm: bool,
    rate: float,
    **settings: Unpack[Settings],
) -> Graph:
    require_counts(image_size=image_size, classes=classes)
    tape = Tape(name, **settings)
    x = image(tape, image_size)
    for stage, (channels, convolutions) in enumerate(_STAGES, start=1):
        for number in range(1, convolutions + 1):
            here = f"{stage}_{number}"
            x = tape.record(
                operators.conv2d(
                    f"conv{here}", x, channels=channels, kernel=3, padding=1, bias=True
                )
            )
            if batch_norm:
                x = tape.record(operators.batch_norm(f"bn{here}", x))
            x = activate(tape, f"relu{here}", x)
        x = tape.record(operators.max_pool(f"pool{stage}", x, kernel=2))
    x = x.flatten()
    for number in (6, 7):
        x = tape.record(operators.linear(f"fc{number}", x, features=_HIDDEN))
        x = activate(tape, f"relu{number}", x)
        x = drop(tape, f"drop{number}", x, rate=rate)
    return classify(tape, "fc8", x, classes=classes)
