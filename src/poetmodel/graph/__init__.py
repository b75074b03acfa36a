"""Training graphs: structure, files, memory bounds, and built-in networks."""

from poetmodel.graph.memory import (
    Floor,
    articulation_points,
    checkpoint_all_peak_bytes,
    checkpoint_all_profile,
    floor,
    inference_profile,
)
from poetmodel.graph.node import Node, Phase, Tensor, operation
from poetmodel.graph.structure import Graph

__all__ = [
    "Floor",
    "Graph",
    "Node",
    "Phase",
    "Tensor",
    "articulation_points",
    "checkpoint_all_peak_bytes",
    "checkpoint_all_profile",
    "floor",
    "inference_profile",
    "operation",
]
