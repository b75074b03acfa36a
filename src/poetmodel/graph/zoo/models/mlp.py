"""Multi-layer perceptrons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.graph.zoo.models.layers import activate, classify, image
from poetmodel.graph.zoo.operators import linear
from poetmodel.graph.zoo.tape import Settings, Tape
from poetmodel.graph.zoo.values import require_counts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from poetmodel.graph.structure import Graph


def mlp(
    *,
    image_size: int = 28,
    channels: int = 1,
    hidden: Sequence[int] = (300, 100),
    classes: int = 10,
    **settings: Unpack[Settings],
) -> Graph:
    """Return a perceptron with ReLU; by default LeNet-300-100 on 28 x 28 images.

    Parameters
    ----------
    image_size, channels : int
        Side and channels of the square image.
    hidden : sequence of int
        Widths of the hidden layers.
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
    Y. LeCun et al., "Gradient-based learning applied to document recognition", Proc. IEEE 86(11),
    1998, section III.C.4, doi:10.1109/5.726791.
    """
    require_counts(image_size=image_size, channels=channels, classes=classes)
    require_counts(**{f"hidden[{k}]": width for k, width in enumerate(hidden)})
    tape = Tape("mlp", **settings)
    x = image(tape, image_size, channels=channels).flatten()
    for number, width in enumerate(hidden, start=1):
        x = tape.record(linear(f"fc{number}", x, features=width))
        x = activate(tape, f"relu{number}", x)
    return classify(tape, f"fc{len(hidden) + 1}", x, classes=classes)
