"""Int8 sums of two tensors, and their call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.int8.front import QuantizedLayer
from poetmodel.torch.int8.levels import to_float32
from poetmodel.torch.int8.operators import ROUNDING, register_operator, round_to_bytes
from poetmodel.torch.int8.registry import converts, lowers
from poetmodel.torch.int8.values import PendingLayer

if TYPE_CHECKING:
    from torch import Tensor, fx

    from poetmodel.torch.int8.levels import Levels
    from poetmodel.torch.int8.reader import Reader
    from poetmodel.torch.lowering.operands import Lowering

aten: Final = torch.ops.aten


@register_operator(
    f"(Tensor a, Tensor b, float scale_a, int zero_a, float scale_b, int zero_b, {ROUNDING})"
    " -> Tensor",
    lambda a, *_: a.new_empty(a.shape),
)
def q8_add(
    a: Tensor,
    b: Tensor,
    scale_a: float,
    zero_a: int,
    scale_b: float,
    zero_b: int,
    *rounding: Any,
) -> Tensor:
    """Return the sum of two tensors.

    ``clamp(rint(((a - zero_a) * scale_a + (b - zero_b) * scale_b) * inverse) + zero)``.
    """
    real_a = (a.to(torch.int32) - zero_a).float() * scale_a
    real_b = (b.to(torch.int32) - zero_b).float() * scale_b
    return round_to_bytes(real_a + real_b, *rounding)


@converts(aten.add.Tensor, aten.add_.Tensor)
def _convert_add(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a sum of two quantized values of equal shape, without a factor ``alpha``."""
    x, y, factor = (*node.args, node.kwargs.get("alpha", 1))[:3]
    sources = tuple(reader.read_quantized(node, operand) for operand in (x, y))
    has_one_shape = reader.read_shape(node, x) == reader.read_shape(node, y)
    if factor != 1 or not has_one_shape or sources[0].flattened_shape != sources[1].flattened_shape:
        reader.refuse(node, "expected the sum of two quantized tensors of one shape, with alpha=1")
    input_scales_and_zeros = tuple(
        number
        for source in sources
        for number in (to_float32(source.levels.scale), source.levels.zero)
    )

    def make_layer(levels: Levels) -> QuantizedLayer:
        return QuantizedLayer("add", {}, (*input_scales_and_zeros, *levels.rounding))

    return PendingLayer(
        node=node, inputs=sources, make_layer=make_layer, flattened_shape=sources[0].flattened_shape
    )


@lowers("add")
def _lower_add(op: Lowering) -> None:
    a, b = map(op.value, op.args[:2])
    op.can_overwrite_operand = True
    op.call("pm_q8_add", op.output(), a, b, a.elements, *op.args[2:])
