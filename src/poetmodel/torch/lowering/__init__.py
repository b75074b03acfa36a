"""Lowering: the operations of a captured step become calls of kernels that are exported."""

from poetmodel.torch.lowering import (
    convolutions,
    dropout,
    indices,
    linear,
    losses,
    norms,
    pointwise,
    pools,
    reductions,
    resampling,
    shapes,
    updates,
)

__all__ = [
    "convolutions",
    "dropout",
    "indices",
    "linear",
    "losses",
    "norms",
    "pointwise",
    "pools",
    "reductions",
    "resampling",
    "shapes",
    "updates",
]
