"""Lowering: the operations of a captured step become calls of kernels that are exported."""

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
