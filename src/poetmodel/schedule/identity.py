"""Keys of schedule files, and the identity of the graph of a schedule or plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from poetmodel.errors import InputError
    from poetmodel.graph import Graph

RELATIONS: Final = ("R", "S_RAM", "S_AUX", "M_in", "M_out")
"""Names of the relations of a schedule, as in the paper (POET, ICML 2022, section 5.2)."""

RESIDENT: Final = "resident"
"""Key of the state tensors whose home is RAM."""

FORMAT: Final = "poetmodel-schedule"
"""Value of ``format`` in schedule files."""
VERSION: Final = 1
"""Version of schedule files."""

COSTS: Final = "costs"
"""Key of the digest of the costs that the metrics of a file were computed with."""
OTHER_COSTS: Final = "computed with other costs"
"""Remark on a metric that a file states for other costs."""
OLD_COSTS_NOTE: Final = (
    "the file states no digest of its costs: costs may have changed since it was written"
)
"""Remark on metrics that differ from those of a file without a digest of costs."""
OBJECTIVE_VALUE: Final = "objective.value"
OBJECTIVE_BOUND: Final = "objective.bound"
OBJECTIVE_GAP: Final = "objective.gap"
"""Keys of claims of a file: the value of the objective, its bound, and its gap."""
GAP_TOLERANCE: Final = "problem.gap"
"""Key of the gap tolerance of the solve, a claim of files with status ``optimal``."""
HISTORY: Final = "history"
"""Key of incumbents and bounds over time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphIdentity:
    """Name, hash, nodes and tensors of the graph that a schedule or plan belongs to."""

    name: str
    """Name of the graph."""
    sha256: str
    """SHA-256 of the graph's canonical JSON."""
    nodes: tuple[str, ...] = field(repr=False)
    """Names of the nodes, in order."""
    tensors: tuple[str, ...] = field(repr=False)
    """Names of the tensors, in order."""

    @classmethod
    def from_graph(cls, graph: Graph) -> GraphIdentity:
        """Return name, SHA-256, and names of nodes and tensors of a graph."""
        return cls(
            name=graph.name,
            sha256=graph.sha256,
            nodes=tuple(node.name for node in graph.nodes),
            tensors=tuple(tensor.name for tensor in graph.tensors),
        )

    def check(self, graph: Graph, *, kind: str, error: type[InputError]) -> None:
        """Raise `error` unless `graph` has the SHA-256 of this identity; `kind` names its owner."""
        if self.sha256 != graph.sha256:
            raise error(
                f"the {kind} was made for graph {self.name!r} (sha256 {self.sha256[:12]}...), not "
                f"for this {graph.name!r} (sha256 {graph.sha256[:12]}...); give the graph it was "
                "made for"
            )
