"""Keys of schedule files, and the identity of the graph that a schedule or plan was made for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from poetmodel.errors import InputError
    from poetmodel.graph import Graph

RELATIONS: Final = ("R", "S_RAM", "S_AUX", "M_in", "M_out")
"""The relations of a schedule, as the paper names them (POET, ICML 2022, section 5.2)."""

RESIDENT: Final = "resident"
"""Key of a schedule file for the state tensors whose home is RAM."""

FORMAT: Final = "poetmodel-schedule"
VERSION: Final = 1

OBJECTIVE_VALUE: Final = "objective.value"
OBJECTIVE_BOUND: Final = "objective.bound"
OBJECTIVE_GAP: Final = "objective.gap"
"""Claims of a file: the minimized quantity, its bound, and its gap."""
PROVED_GAP: Final = "problem.gap"
"""The gap that was asked for, of a file that claims an optimum."""
HISTORY: Final = "history"
"""Key of a schedule file for how incumbent and bound met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphIdentity:
    """Which graph a schedule belongs to."""

    name: str
    sha256: str
    """SHA-256 of its canonical JSON."""
    nodes: tuple[str, ...] = field(repr=False)
    """Their names, in order."""
    tensors: tuple[str, ...] = field(repr=False)
    """Their names, in order."""

    @classmethod
    def of(cls, graph: Graph) -> GraphIdentity:
        """Return the identity of a graph."""
        return cls(
            name=graph.name,
            sha256=graph.sha256,
            nodes=tuple(node.name for node in graph.nodes),
            tensors=tuple(tensor.name for tensor in graph.tensors),
        )

    def check(self, graph: Graph, *, kind: str, error: type[InputError]) -> None:
        """Raise an error unless what was made (a schedule, a plan) is for this graph."""
        if self.sha256 != graph.sha256:
            raise error(
                f"the {kind} was made for graph {self.name!r} (sha256 {self.sha256[:12]}...), not "
                f"for this {graph.name!r} (sha256 {graph.sha256[:12]}...); give the graph it was "
                "made for"
            )
