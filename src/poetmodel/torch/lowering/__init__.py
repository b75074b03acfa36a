"""Lowering: convert the operations of a captured step to calls of exported kernels.

Importing the package registers the lowerings of all supported operators.
"""

from poetmodel.torch.lowering import (
    linear,
    pointwise,
    quantized,
    reductions,
    shapes,
    spatial,
    tables,
)

__all__ = ["linear", "pointwise", "quantized", "reductions", "shapes", "spatial", "tables"]
