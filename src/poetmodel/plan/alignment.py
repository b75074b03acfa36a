"""Alignment of addresses: rounding of sizes, and the alignment that a device needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.errors import PlanError, quote

if TYPE_CHECKING:
    from poetmodel.device import Device
    from poetmodel.graph import Graph

ALIGNMENT: Final = 16
"""Default alignment of offsets [B]."""


def round_up(size_bytes: int, alignment: int) -> int:
    """Return a size rounded up to a multiple of the alignment [B]."""
    return -(-size_bytes // alignment) * alignment


def align_sizes(graph: Graph, alignment: int) -> Graph:
    """Return the graph with sizes of tensors and workspaces rounded up to the alignment."""
    nodes = tuple(
        replace(
            node,
            workspace_bytes=round_up(node.workspace_bytes, alignment),
            outputs=tuple(
                replace(tensor, bytes=round_up(tensor.bytes, alignment)) for tensor in node.outputs
            ),
        )
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def device_alignment(device: Device | None) -> int:
    """Return the alignment of offsets on a device [B]: a cache line where DMA meets a data cache.

    A cache line with both DMA and other data could be neither cleaned nor invalidated.
    """
    return ALIGNMENT if device is None else max(ALIGNMENT, device.dma_line_bytes)


def check_alignment(alignment: int) -> None:
    """Raise `PlanError` unless the alignment is a power of two."""
    if alignment < 1 or alignment & (alignment - 1):
        raise PlanError(f"alignment: expected a power of two, got {quote(alignment)}")
