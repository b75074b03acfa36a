"""Convolutions, linear layers and matrix products."""

from __future__ import annotations

from poetmodel.errors import InputError
from poetmodel.graph.zoo.declaration import Declaration, Gradient
from poetmodel.graph.zoo.values import Value, Weight
from poetmodel.graph.zoo.windows import window_grid


def conv2d(
    name: str,
    x: Value,
    *,
    channels: int,
    kernel: int,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    bias: bool = False,
) -> Declaration:
    """Declare a two-dimensional convolution.

    The gradient of the weights reads the input and the arriving gradient, that of the input only
    the latter and the weights. A bias costs no FLOP forward (sums start from it) and one per
    element of the arriving gradient backward.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value, shape (batch, channels, height, width)
        Input.
    channels : int
        Channels of the result.
    kernel, stride, padding : int
        Of the window, the same in both directions.
    groups : int
        Number of separate convolutions; as many as channels is a depthwise one.
    bias : bool
        Whether a bias is added.

    Notes
    -----
    No workspace: the kernel is taken to be direct. One that copies windows side by side (im2col)
    would need ``kernel**2`` times the input of a group.
    """
    batch, channels_in = x.shape[:2]
    if channels % groups or channels_in % groups:
        msg = f"{name}: {channels_in} and {channels} channels do not split into {groups} groups"
        raise InputError(msg)
    grid = window_grid(name, x, kernel=kernel, stride=stride, padding=padding)
    y = x.made(name, batch, channels, *grid)
    weight = Weight(
        name=f"{name}.weight",
        shape=(channels, channels_in // groups, kernel, kernel),
        item_bytes=x.item_bytes,
    )
    return _affine("conv2d", name, x, y, weight=weight, bias_size=channels if bias else 0)


def linear(
    name: str, x: Value, *, features: int, bias: bool = True, tied_to: str | None = None
) -> Declaration:
    """Declare a fully connected layer over the last dimension.

    What its backward reads and what a bias costs is as for a convolution.

    Parameters
    ----------
    name : str
        Of the node.
    x : Value, shape (..., features_in)
        Input.
    features : int
        Features of the result.
    bias : bool
        Whether a bias is added.
    tied_to : str, optional
        Name of a weight of shape (features, features_in) to use in place of an own one.
    """
    *rows, features_in = x.shape
    y = x.made(name, *rows, features)
    weight = Weight(
        name=tied_to or f"{name}.weight", shape=(features, features_in), item_bytes=x.item_bytes
    )
    return _affine("linear", name, x, y, weight=weight, bias_size=features if bias else 0)


def _affine(
    op: str, name: str, x: Value, y: Value, *, weight: Weight, bias_size: int
) -> Declaration:
    """Declare a sum of weighted inputs: one row of the weight makes one element of the result."""
    weights = [weight]
    if bias_size:
        weights.append(Weight(name=f"{name}.bias", shape=(bias_size,), item_bytes=x.item_bytes))
    macs = y.size * (weight.size // weight.shape[0])
    return Declaration(
        name=name,
        op=op,
        inputs=(x,),
        outputs=(y,),
        weights=tuple(weights),
        macs=macs,
        gradients=(
            Gradient(
                part="weight",
                of=None,
                saved=(x,),
                flops=2 * macs + (y.size if bias_size else 0),
                weight_bytes_moved=sum(weight.bytes for weight in weights),
            ),
            Gradient(part="input", of=x, flops=2 * macs, weight_bytes_moved=weight.bytes),
        ),
    )


def matmul(name: str, left: Value, right: Value, *, transpose_right: bool = False) -> Declaration:
    """Declare a batched product of two computed matrices.

    The gradient of each side reads the other side. Operands and result may lie in memory in any
    order of their dimensions, so splitting and merging attention heads are views.

    Parameters
    ----------
    name : str
        Of the node.
    left : Value, shape (..., n, k)
        Left operand.
    right : Value, shape (..., k, m), or (..., m, k) where transposed
        Right operand.
    transpose_right : bool
        Whether the right operand is transposed.
    """
    *batch, n, k = left.shape
    *batch_right, k_right, m = right.shape
    if transpose_right:
        k_right, m = m, k_right
    if (batch, k) != (batch_right, k_right):
        msg = f"{name}: shapes {left.shape} and {right.shape} cannot be multiplied"
        raise InputError(msg)
    y = left.made(name, *batch, n, m)
    macs = y.size * k
    return Declaration(
        name=name,
        op="matmul",
        inputs=(left, right),
        outputs=(y,),
        macs=macs,
        gradients=(
            Gradient(part="left", of=left, saved=(right,), flops=2 * macs),
            Gradient(part="right", of=right, saved=(left,), flops=2 * macs),
        ),
    )
