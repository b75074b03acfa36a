"""Restorations: single decisions on a recomputation, a transfer or a state's home on storage."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule


class RestorationKind(StrEnum):
    """Kind of restoration."""

    PAGE_IN = "page_in"
    """The tensor is paged in."""
    PAGE_OUT = "page_out"
    """The tensor is paged out after its first computation, even if no page-in reads it."""
    STORAGE_HOME = "storage_home"
    """The state tensor has its home on storage; the stage is that of the tensor's node."""
    RECOMPUTE = "recompute"
    """The node is recomputed."""

    __hash__ = str.__hash__  # restorations are hashed often, and `Enum.__hash__` is slower


PAGE_IN, PAGE_OUT, STORAGE_HOME, RECOMPUTE = RestorationKind


class Restoration(NamedTuple):
    """A recomputation, a page-in, a page-out that needs no page-in, or a home on storage."""

    stage: int
    item: int
    """The recomputed node, or the tensor for other kinds."""
    kind: RestorationKind

    @classmethod
    def at_its_node(cls, graph: Graph, i: int, kind: RestorationKind) -> Self:
        """Return a page-out or home on storage (`kind`) of tensor `i`, in the stage of its node."""
        return cls(graph.node_of[i], i, kind)


def list_restorations(graph: Graph, schedule: Schedule) -> list[Restoration]:
    """Return a schedule's recomputations, page-ins, homes on storage, then further page-outs."""
    unread_page_outs = {i for _, i in schedule.M_out} - {i for _, i in schedule.M_in}
    unread_page_outs.difference_update(graph.state_of)
    state_on_storage = sorted(set(graph.state_tensors).difference(schedule.resident))
    return [
        *(Restoration(t, k, RECOMPUTE) for t, k in schedule.R if k < t),
        *(Restoration(t, i, PAGE_IN) for t, i in schedule.M_in),
        *(Restoration.at_its_node(graph, i, STORAGE_HOME) for i in state_on_storage),
        *(Restoration.at_its_node(graph, i, PAGE_OUT) for i in sorted(unread_page_outs)),
    ]
