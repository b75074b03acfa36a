"""Sliding windows of convolutions and poolings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.errors import InputError

if TYPE_CHECKING:
    from poetmodel.graph.zoo.values import Value


def window_grid(
    name: str, image: Value, *, kernel: int, stride: int, padding: int
) -> tuple[int, int]:
    """Return height and width of what a window gives that slides over an image.

    Parameters
    ----------
    name : str
        Of the operator, for the error.
    image : Value, shape (batch, channels, height, width)
        What it slides over.
    kernel, stride, padding : int
        Of the window, the same in both directions.

    Raises
    ------
    InputError
        If the window does not fit.
    """
    height, width = (side + 2 * padding - kernel for side in image.shape[2:])
    if min(height, width) < 0:
        size = "x".join(str(side) for side in image.shape[2:])
        msg = (
            f"{name}: a window of {kernel}x{kernel} does not fit its input of {size} with padding "
            f"{padding}; choose a larger image_size"
        )
        raise InputError(msg)
    return height // stride + 1, width // stride + 1
