"""Restorations of a tensor: one recomputation or page-in each."""

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
    """The tensor is paged out for its own sake, in the stage that makes it."""
    STORAGE_HOME = "storage_home"
    """The tensor, which is state, has its home on storage; the stage is that of its node."""
    RECOMPUTE = "recompute"
    """The node is recomputed."""

    __hash__ = str.__hash__  # restorations are hashed often, and that of members takes a call


PAGE_IN, PAGE_OUT, STORAGE_HOME, RECOMPUTE = RestorationKind


class Restoration(NamedTuple):
    """One recomputation or page-in, a page-out that serves none, or a home on storage for state."""

    stage: int
    item: int
    """The node that is recomputed, or else the tensor."""
    kind: RestorationKind

    @classmethod
    def at_its_node(cls, graph: Graph, i: int, kind: RestorationKind) -> Self:
        """Return the page-out, or the home on storage, of tensor `i`."""
        return cls(graph.node_of[i], i, kind)


def restorations_of(graph: Graph, schedule: Schedule) -> list[Restoration]:
    """Return all recomputations, page-ins, homes on storage and page-outs without page-ins.

    What is written back in place of state is part of its home.
    """
    out = {i for _, i in schedule.M_out} - {i for _, i in schedule.M_in}
    out.difference_update(graph.state_of)
    on_storage = sorted(set(graph.state_tensors).difference(schedule.resident))
    return [
        *(Restoration(t, k, RECOMPUTE) for t, k in schedule.R if k < t),
        *(Restoration(t, i, PAGE_IN) for t, i in schedule.M_in),
        *(Restoration.at_its_node(graph, i, STORAGE_HOME) for i in on_storage),
        *(Restoration.at_its_node(graph, i, PAGE_OUT) for i in sorted(out)),
    ]
