"""Poolings of images, and the choice of one row of a sequence."""

from __future__ import annotations

from poetmodel.graph.zoo.declaration import Declaration, Gradient
from poetmodel.graph.zoo.values import INDEX_BYTES, Value
from poetmodel.graph.zoo.windows import window_grid

_BYTE_VALUES = 256


def max_pool(
    name: str, x: Value, *, kernel: int, stride: int | None = None, padding: int = 0
) -> Declaration:
    """Declare max pooling.

    Its outputs are the maxima and their places; the backward reads only the places. A place is
    the position inside the window: 1 byte for windows of up to 256 elements.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value, shape (batch, channels, height, width)
        Input.
    kernel, padding : int
        Of the window, the same in both directions.
    stride : int, optional
        Of the window; its size by default.
    """
    grid = window_grid(name, x, kernel=kernel, stride=stride or kernel, padding=padding)
    y = x.made(name, *x.shape[:2], *grid)
    place_bytes = 1 if kernel**2 <= _BYTE_VALUES else INDEX_BYTES
    places = y.made(f"{name}.indices", *y.shape, item_bytes=place_bytes)
    return Declaration(
        name=name,
        op="max_pool",
        inputs=(x,),
        outputs=(y, places),
        other_flops=(kernel**2 - 1) * y.size,
        gradients=(Gradient(part="input", of=x, saved=(places,), flops=y.size),),
    )


def avg_pool(
    name: str, x: Value, *, kernel: int, stride: int | None = None, padding: int = 0
) -> Declaration:
    """Declare average pooling; its backward reads only the arriving gradient.

    Parameters
    ----------
    name, x, kernel, stride, padding
        As of `max_pool`.
    """
    grid = window_grid(name, x, kernel=kernel, stride=stride or kernel, padding=padding)
    return _average("avg_pool", name, x, x.made(name, *x.shape[:2], *grid), window=kernel**2)


def global_avg_pool(name: str, x: Value) -> Declaration:
    """Declare the average over each whole channel; its backward reads only the arriving gradient.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value, shape (batch, channels, height, width)
        Input; the result has the shape (batch, channels).
    """
    y = x.made(name, *x.shape[:2])
    return _average("global_avg_pool", name, x, y, window=x.size // y.size)


def _average(op: str, name: str, x: Value, y: Value, *, window: int) -> Declaration:
    return Declaration(
        name=name,
        op=op,
        inputs=(x,),
        outputs=(y,),
        other_flops=window * y.size,
        gradients=(Gradient(part="input", of=x, flops=window * y.size),),
    )


def select(name: str, x: Value) -> Declaration:
    """Declare the copy of each sample's first row, such as a sequence's first token.

    Its backward reads only the arriving gradient and fills the other rows with zeros.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value, shape (batch, length, features)
        Input; the result has the shape (batch, features).

    Notes
    -----
    A copy and not a view: a view would keep the whole sequence for the sake of one row.
    """
    batch, _, features = x.shape
    return Declaration(
        name=name,
        op="select",
        inputs=(x,),
        outputs=(x.made(name, batch, features),),
        gradients=(Gradient(part="input", of=x),),
    )
