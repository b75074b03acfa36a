"""Where decisions can matter: the stages at which a tensor may be used, paged in or recomputed.

Stages may be merged into groups; a group of one stage each is the whole problem.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from poetmodel.problem import DeadlineCounts, Quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.problem import Problem

Stages = Literal["all", "events"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Events:
    """The groups of stages at which each tensor and node has a decision.

    Indices are groups; with one stage a group they are stages.
    """

    group_of: tuple[int, ...]
    """For each stage its group."""
    uses: tuple[tuple[int, ...], ...]
    """For each tensor the groups after its first in which a reader of it may run, ascending."""
    events: tuple[tuple[int, ...], ...]
    """For each tensor the groups at which keeping it may begin or end: ``T(i)``, ascending."""
    recompute: tuple[tuple[int, ...], ...]
    """For each node the groups in which it may be recomputed: ``RS(k)``, ascending."""
    page_in: tuple[tuple[int, ...], ...]
    """For each tensor the groups in which it may be paged in, ascending."""

    def segment(self, i: int, first: int, group: int) -> int | None:
        """Return `a` such that keeping tensor `i` into `group` is segment `a`, or None.

        Parameters
        ----------
        i : int
            Tensor.
        first : int
            Group of its first computation.
        group : int
            The group at whose beginning it would be in RAM.
        """
        events = self.events[i]
        if group <= first or not events or group > events[-1]:
            return None
        return bisect_left(events, group)


def storage_is_limiting(problem: Problem) -> bool:
    """Return whether the storage limit can rule a choice of page-outs out."""
    limit = problem.aux_limit_bytes
    graph = problem.graph
    if limit is None or not problem.can_page:
        return False
    return limit < sum(
        size
        for size, users, k in zip(graph.tensor_bytes, graph.users_of, graph.node_of, strict=True)
        if users and not graph.nodes[k].on_aux
    )


def dominated(problem: Problem, k: int, *, limiting: bool | None = None) -> bool:
    """Return whether paging the outputs of node `k` is never worse than recomputing it.

    Parameters
    ----------
    problem : Problem
        What to decide.
    k : int
        The node.
    limiting : bool, optional
        What `storage_is_limiting` says, where it is known already.

    Notes
    -----
    Replace the recomputations of `k` by one page-out of each read output and one page-in for each
    recomputation: needs no input, and no more RAM at any step. It must be no dearer in every
    quantity that is minimized or limited. Written bytes only grow, so it never holds where they are
    minimized or storage is limiting; where time is a makespan it would load the bus.
    """
    graph = problem.graph
    timed = problem.minimize == Quantity.TIME or problem.deadline_s is not None
    overlap = timed and problem.deadline_counts == DeadlineCounts.OVERLAP
    if limiting is None:
        limiting = storage_is_limiting(problem)
    if not problem.can_page or problem.minimize == Quantity.WRITES or overlap or limiting:
        return False
    outputs = [i for i in graph.outputs_of[k] if graph.users_of[i]]
    stored = graph.nodes[k].on_aux
    counted = [problem.objective.coefficients, *(one.coefficients for one in problem.linear_limits)]
    return all(
        of.compute[k] >= sum(of.page_in[i] + (0.0 if stored else of.page_out[i]) for i in outputs)
        for of in counted
    )


def recomputable_nodes(problem: Problem, *, dominance: bool = True) -> tuple[bool, ...]:
    """Return for each node whether the model must offer its recomputation."""
    graph = problem.graph
    limiting = storage_is_limiting(problem)
    return tuple(
        problem.may_recompute(k)
        and any(graph.users_of[i] for i in graph.outputs_of[k])
        and not (dominance and dominated(problem, k, limiting=limiting))
        for k in range(len(graph.nodes))
    )


def find_events(
    problem: Problem,
    group_of: Sequence[int],
    *,
    recomputable: Sequence[bool],
    stages: Stages = "all",
) -> Events:
    """Return the groups at which decisions can matter.

    Parameters
    ----------
    problem : Problem
        The stated problem.
    group_of : sequence of int, one per stage
        Non-decreasing group numbers from 0.
    recomputable : sequence of bool, one per node
        Which nodes may be recomputed; see `recomputable_nodes`.
    stages : {'all', 'events'}
        ``all`` offers a recomputation in every group between the first computation of a node and
        the last possible use of what it makes: exact. ``events`` offers fewer: a restriction.

    Notes
    -----
    Keeping a tensor is decided from one event to the next. A keep that ends, or a page-in that
    happens, between two uses can as well end at the earlier or happen at the later one, with no
    more RAM at any step; a recomputation cannot be moved like that, for its inputs may be in RAM
    only then, and its transients may only fit then.
    """
    graph = problem.graph
    n = len(graph.nodes)
    extra: list[frozenset[int]] = [frozenset()] * n
    while True:
        uses, recompute = _sweep(problem, group_of, recomputable, stages, extra)
        if stages == "all":
            break
        closure = [extra[k] | _closure(graph.inputs_of[k], recompute[k], uses) for k in range(n)]
        if closure == extra:
            break
        extra = closure
    events = tuple(
        tuple(sorted({*uses[i], *recompute[k]} if recompute[k] else uses[i]))
        for i, k in enumerate(graph.node_of)
    )
    # No event after the last use: nothing is kept for nobody.
    events = tuple(
        tuple(e for e in events[i] if uses[i] and e <= uses[i][-1]) for i in range(len(events))
    )
    page_in = uses if problem.can_page else ((),) * len(uses)
    return Events(
        group_of=tuple(group_of), uses=uses, events=events, recompute=recompute, page_in=page_in
    )


def _sweep(
    problem: Problem,
    group_of: Sequence[int],
    recomputable: Sequence[bool],
    stages: Stages,
    extra: Sequence[frozenset[int]],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Walk from the last node to the first: recomputations of a reader are uses of its inputs."""
    graph = problem.graph
    uses: list[tuple[int, ...]] = [()] * len(graph.tensors)
    recompute: list[tuple[int, ...]] = [()] * len(graph.nodes)
    for k in range(len(graph.nodes) - 1, -1, -1):
        first = group_of[k]
        wanted: set[int] = set()
        for i in graph.outputs_of[k]:
            found = {group_of[j] for j in graph.users_of[i]}
            found.update(*(recompute[j] for j in graph.users_of[i]))
            uses[i] = tuple(sorted(e for e in found if e > first))
            wanted.update(uses[i])
        if not recomputable[k] or not wanted:
            continue
        if stages == "all":
            recompute[k] = tuple(range(first + 1, max(wanted) + 1))
        else:
            last = max(wanted)
            recompute[k] = tuple(sorted(wanted | {e for e in extra[k] if first < e < last}))
    return tuple(uses), tuple(recompute)


def _closure(
    inputs: Sequence[int], recompute: Sequence[int], uses: Sequence[Sequence[int]]
) -> frozenset[int]:
    if not recompute:
        return frozenset()
    return frozenset(e for p in inputs for e in uses[p] if e < recompute[-1])
