"""Patterns of operators without an int8 operator of their own: activations, padding, shapes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.graph.operators import arguments_with_defaults
from poetmodel.torch.int8.operators import IMAGE_NDIM
from poetmodel.torch.int8.registry import converts
from poetmodel.torch.int8.values import INPUT, PaddedValue, PendingLayer

if TYPE_CHECKING:
    from torch import fx

    from poetmodel.torch.int8.reader import Reader

aten: Final = torch.ops.aten
_N_SIDES = 4
"""Number of sides of an image that a padding of rows and columns extends."""


@converts(
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.dropout.default,
)
def _convert_pass_through(reader: Reader, node: fx.Node) -> Any:
    """Return the value of the operand; refuse dropout in training mode."""
    if node.target is aten.dropout.default and arguments_with_defaults(node)[2]:
        reader.refuse(node, "it draws random numbers; call eval() before exporting the model")
    return reader.values[node.args[0]]


# -- convolutions and linear layers ------------------------------------------------------------


@converts(aten.constant_pad_nd.default, aten.pad.default)
def _convert_padding(reader: Reader, node: fx.Node) -> PaddedValue:
    """Convert a padding of rows and columns with zeros to a padded value; refuse the rest."""
    x, pads, *options = arguments_with_defaults(node)
    value = options[-1] or 0
    mode = options[0] if node.target is aten.pad.default else "constant"
    if value != 0 or mode != "constant" or len(pads) != _N_SIDES or min(pads) < 0:
        reader.refuse(node, "expected padding of rows and columns with zeros, before a convolution")
    left, right, above, below = pads
    operand = INPUT if reader.values.get(x) == INPUT else reader.read_quantized(node, x)
    return PaddedValue(value=operand, padding=(above, below, left, right))


# -- activations -------------------------------------------------------------------------------


@converts(aten.relu.default, aten.relu_.default)
def _convert_relu(reader: Reader, node: fx.Node) -> PendingLayer:
    return reader.clamp_operand(node, 0.0, math.inf)


@converts(
    aten.hardtanh.default,
    aten.hardtanh_.default,
    aten.clamp.default,
    aten.clamp_.default,
    aten.clamp_min.default,
)
def _convert_clamp(reader: Reader, node: fx.Node) -> PendingLayer:
    low, high = (*arguments_with_defaults(node)[1:], None)[:2]
    return reader.clamp_operand(
        node, -math.inf if low is None else float(low), math.inf if high is None else float(high)
    )


@converts(aten.relu6.default)
def _convert_relu6(reader: Reader, node: fx.Node) -> PendingLayer:
    return reader.clamp_operand(node, 0.0, 6.0)


# -- sums, pools and shapes --------------------------------------------------------------------


@converts(aten.flatten.using_ints, aten.view.default, aten.reshape.default)
def _convert_flatten(reader: Reader, node: fx.Node) -> Any:
    """Convert a reshape of images to one row per sample, or of any tensor to its own shape.

    Adds no layer: a linear layer after the reshape reorders its own weight (`flattened_shape`).
    """
    source = reader.read_quantized(node, node.args[0])
    shape, new_shape = reader.read_shape(node, node.args[0]), tuple(node.meta["val"].shape)
    if new_shape == shape:
        return source
    if len(new_shape) != 2 or len(shape) != IMAGE_NDIM or new_shape[0] != shape[0]:  # noqa: PLR2004
        reader.refuse(node, "expected one row per sample, as from flatten(1)")
    return replace(source, flattened_shape=shape[1:])
