"""From a rule on what stays in RAM to a schedule that recomputes, or pages in, what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.graph import Phase
from poetmodel.schedule import GraphIdentity, paged_at_once
from poetmodel.solve.trimming import trim
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule

FORWARD: Final = frozenset({Phase.INPUT, Phase.FORWARD, Phase.LOSS})
"""Phases of the forward pass; what comes after reads what it saved."""


def realize(
    graph: Graph,
    keep: Callable[[int, int], bool],
    demand: Callable[[int], Iterable[int]] = lambda _: (),
    *,
    stored: Collection[int] = (),
) -> Schedule:
    """Return the schedule that keeps what a rule says and recomputes what is missing.

    Parameters
    ----------
    graph : Graph
        The training graph.
    keep : callable
        From a stage and a tensor of a recomputable node of the forward pass to whether the tensor
        stays in RAM when that stage is over. Those of other nodes stay while they may be needed.
    demand : callable, optional
        From a stage to the tensors that shall be in RAM in it besides what its node reads.
    stored : collection of int, optional
        Tensors that are paged out when they are made first, and paged in where they are missing.

    Returns
    -------
    Schedule
        Valid by the rules of execution. In each stage all that is missing is recomputed once, or
        paged in; keeps and transfers that serve nothing are struck out.
    """
    free = droppable(graph)
    until = last_needs(graph, free)
    ram: set[int] = set()
    computed: list[list[int]] = []
    kept: list[list[int]] = []
    paged: list[list[int]] = []
    for t in range(len(graph.nodes)):
        check_time_limit()
        kept.append(sorted(ram))
        again, fetched = _missing(graph, ram, (*graph.inputs_of[t], *demand(t)), stored)
        computed.append([*again, t])
        paged.append(sorted(fetched))
        made = {i for k in (*again, t) for i in graph.outputs_of[k]}
        have = ram | made | fetched
        ram = {i for i in have if until[i] > t and (i not in free or keep(t, i))}
    identity = GraphIdentity.of(graph)
    return trim(graph, paged_at_once(graph, R=computed, S_RAM=kept, M_in=paged, identity=identity))


def droppable(graph: Graph) -> frozenset[int]:
    """Return the tensors that can be made again: of recomputable forward nodes, samples aside."""
    return frozenset(
        i
        for i, k in enumerate(graph.node_of)
        if graph.nodes[k].recomputable
        and not graph.nodes[k].on_aux
        and graph.nodes[k].phase in FORWARD - {Phase.INPUT}
    )


def last_forward_uses(graph: Graph) -> tuple[int, ...]:
    """Return for each tensor the last node of the forward pass that reads it, or its own node."""
    return tuple(
        max((k for k in users if graph.nodes[k].phase in FORWARD), default=graph.node_of[i])
        for i, users in enumerate(graph.users_of)
    )


def begin_of_backward(graph: Graph) -> int:
    """Return the first node after the forward pass; the number of nodes where there is none."""
    phases = (k for k, node in enumerate(graph.nodes) if node.phase not in FORWARD)
    return next(phases, len(graph.nodes))


def recompute_once(
    graph: Graph, saved: Collection[int], groups: Collection[range] = ()
) -> Schedule:
    """Return the schedule that saves some tensors and recomputes the others when they are read.

    Parameters
    ----------
    graph : Graph
        The training graph.
    saved : collection of int
        Tensors that stay from the forward to the backward pass.
    groups : collection of range, optional
        Ranges of nodes that are recomputed together: when one of their tensors is missing, so are
        made all that will still be read.

    Returns
    -------
    Schedule
        Every node is recomputed at most once: what is recomputed, and what is saved, stays until
        nothing more is made from it.
    """
    begin, last = begin_of_backward(graph), last_forward_uses(graph)
    final = tuple(users[-1] if users else -1 for users in graph.users_of)
    group_of = {k: group for group in groups for k in group}
    stays = set(saved)

    def keep(t: int, i: int) -> bool:
        return i in stays or t < last[i] or t >= begin

    def demand(t: int) -> Iterable[int]:
        read = [group_of.get(graph.node_of[i]) for i in graph.inputs_of[t] if i not in stays]
        for group in read if t >= begin else ():
            for k in group or ():
                yield from (i for i in graph.outputs_of[k] if final[i] >= t)

    return realize(graph, keep, demand)


def last_needs(graph: Graph, free: Collection[int]) -> list[int]:
    """Return for each tensor the last stage that may read it.

    Parameters
    ----------
    graph : Graph
        The training graph.
    free : collection of int
        The tensors that may be recomputed.
    """
    again = {graph.node_of[i] for i in free}
    until = list(graph.node_of)
    for i in range(len(until) - 1, -1, -1):
        for k in graph.users_of[i]:
            made = graph.outputs_of[k] if k in again else ()
            until[i] = max(until[i], k, *(until[j] for j in made))
    return until


def _missing(
    graph: Graph, ram: Collection[int], wanted: Iterable[int], stored: Collection[int]
) -> tuple[list[int], set[int]]:
    """Return the nodes to compute, ascending, and the tensors to page in for what is wanted."""
    again: set[int] = set()
    fetched: set[int] = set()
    todo = list(wanted)
    while todo:
        i = todo.pop()
        k = graph.node_of[i]
        if i in ram or k in again or i in fetched:
            continue
        if i in stored:
            fetched.add(i)
        else:
            again.add(k)
            todo.extend(graph.inputs_of[k])
    return sorted(again), fetched
