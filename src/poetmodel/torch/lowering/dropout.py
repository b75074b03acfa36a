"""Dropout: masks of random numbers that come again within a step, as ``pm_random.h`` says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from poetmodel.torch.lowering.operands import copy, fill, table
from poetmodel.torch.lowering.registry import lowers

if TYPE_CHECKING:
    from torch import fx

    from poetmodel.torch.lowering.registry import Lowering

aten: Final = torch.ops.aten
_RANDOM: Final = (aten.native_dropout.default, aten.bernoulli.p)


def _site(node: fx.Node) -> int:
    """Return which of the random operators of its graph a node is."""
    sites = [each for each in node.graph.nodes if each.target in _RANDOM]
    return sites.index(node)


def _threshold(dropped_ratio: float) -> int:
    """Return what the 24 bits of an element that is dropped are below."""
    return round(dropped_ratio * 2**24)


@lowers(aten.native_dropout.default)
def _lower_native_dropout(op: Lowering) -> None:
    x, ratio, train = op.args
    x, out, mask = op.value(x), op.output(0), op.output(1)
    op.elementwise = True
    if train is False or ratio == 0:
        copy(op, out, x)
        fill(op, mask, 1)
        return
    factor = 0.0 if ratio == 1 else 1.0 / (1.0 - ratio)
    shape = table(op, out, mask, x)
    op.call("pm_dropout", out, mask, x, shape, _site(op.node), _threshold(ratio), factor)


@lowers(aten.bernoulli.p)
def _lower_bernoulli(op: Lowering) -> None:
    out = op.output()
    number = _threshold(1.0 - op.args[1])
    op.call("pm_bernoulli", out, out.elements, _site(op.node), number)
