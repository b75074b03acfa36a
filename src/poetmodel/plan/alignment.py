"""Alignment of addresses: sizes and graphs rounded up to it, and that of a device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.errors import PlanError, shown

if TYPE_CHECKING:
    from poetmodel.device import Device
    from poetmodel.graph import Graph

ALIGNMENT: Final = 16
"""Offsets are multiples of this unless another alignment is wanted [B]."""


def aligned(size_bytes: int, alignment: int) -> int:
    """Return a size rounded up to a multiple of the alignment."""
    return -(-size_bytes // alignment) * alignment


def aligned_graph(graph: Graph, alignment: int) -> Graph:
    """Return a graph with the sizes that its tensors and workspaces have in a block."""
    nodes = tuple(
        replace(
            node,
            workspace_bytes=aligned(node.workspace_bytes, alignment),
            outputs=tuple(
                replace(tensor, bytes=aligned(tensor.bytes, alignment)) for tensor in node.outputs
            ),
        )
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def alignment_on(device: Device | None) -> int:
    """Return what offsets on a device are multiples of [B].

    Where DMA moves memory behind a data cache that is a cache line too: a line that holds a part
    of what is moved and a part of something else cannot be cleaned or discarded.
    """
    return ALIGNMENT if device is None else max(ALIGNMENT, device.dma_line_bytes)


def check_alignment(alignment: int) -> None:
    """Raise `PlanError` unless this is a power of two."""
    if alignment < 1 or alignment & (alignment - 1):
        raise PlanError(f"alignment: expected a power of two, got {shown(alignment)}")
