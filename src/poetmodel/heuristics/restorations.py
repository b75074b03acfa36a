"""What brings a tensor back: one recomputation or page-in each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule


class Restoration(NamedTuple):
    """One recomputation or page-in, or a home on storage for state."""

    stage: int
    item: int
    """The node that is recomputed, or the tensor that is paged in."""
    recompute: bool

    @classmethod
    def page_out(cls, graph: Graph, i: int) -> Self:
        """Return what stands for a page-out of tensor `i` that serves no page-in.

        It is noted as a page-in in the stage of its first computation, where there can be none.
        """
        return cls(graph.node_of[i], i, recompute=False)

    def is_page_out(self, graph: Graph) -> bool:
        """Return whether it stands for a page-out alone."""
        return self._is_at_its_node(graph) and not graph.nodes[self.stage].is_state

    @classmethod
    def storage_home(cls, graph: Graph, i: int) -> Self:
        """Return what stands for a home on storage of state `i`: the page-in of its own node."""
        return cls(graph.node_of[i], i, recompute=False)

    def is_storage_home(self, graph: Graph) -> bool:
        """Return whether it stands for a home of state on storage."""
        return self._is_at_its_node(graph) and graph.nodes[self.stage].is_state

    def _is_at_its_node(self, graph: Graph) -> bool:
        return not self.recompute and self.stage == graph.node_of[self.item]


def restorations_of(graph: Graph, schedule: Schedule) -> list[Restoration]:
    """Return all recomputations, page-ins, homes on storage and page-outs without page-ins.

    What is written back in place of state is part of its home.
    """
    out = {i for _, i in schedule.M_out} - {i for _, i in schedule.M_in}
    out.difference_update(graph.state_of)
    on_storage = sorted(set(graph.state_tensors).difference(schedule.resident))
    return [
        *(Restoration(t, k, recompute=True) for t, k in schedule.R if k < t),
        *(Restoration(t, i, recompute=False) for t, i in schedule.M_in),
        *(Restoration.storage_home(graph, i) for i in on_storage),
        *(Restoration.page_out(graph, i) for i in sorted(out)),
    ]
