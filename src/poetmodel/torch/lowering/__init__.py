"""Lowering: convert the operations of a captured step to calls of exported kernels.

Importing the package registers the lowerings of all supported operators.
"""

from poetmodel.torch.lowering import (
    linear,
    losses,
    pointwise,
    quantized,
    reductions,
    shapes,
    spatial,
    tables,
    updates,
)

__all__ = [
    "linear",
    "losses",
    "pointwise",
    "quantized",
    "reductions",
    "shapes",
    "spatial",
    "tables",
    "updates",
]
