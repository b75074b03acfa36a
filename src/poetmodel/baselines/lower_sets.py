"""Lower sets: recomputation of any forward graph by Kusumoto et al. (NeurIPS 2019)."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.baselines.engine import bisect_budget, select_best_schedule
from poetmodel.baselines.homes import use_homes_of
from poetmodel.baselines.paging import require_within_budget
from poetmodel.clock import check_time_limit
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.heuristics.execution import evictable_tensors, first_backward_node, recompute_once
from poetmodel.schedule import checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

EXACT, PRUNED = FAMILIES = ("exact", "pruned")
"""Variants of `lower_sets`: all lower sets, or only the empty set, those of single nodes with their
ancestors, and the whole forward pass."""
MAX_SETS: Final = 1000
"""Maximum number of lower sets of the exact family."""
MAX_LABELS: Final = 8192
"""Maximum number of undominated chains to retain over all lower sets, if `MIN_LABELS` permits.

A chain up to a lower set is a *label* of the dynamic program."""
MIN_LABELS: Final = 4
"""Number of undominated chains that may be retained for each lower set in any case."""
N_LIMITS: Final = 32
"""Number of limits on the estimated peak that are tried, in equal steps up to
`LowerSets.total_bytes`."""


@use_homes_of("lower-sets")
def lower_sets(problem: Problem, family: str = "") -> Schedule:
    """Recompute the segments between lower sets, chosen by a dynamic program.

    A lower set contains with each node all nodes from which it is computed. An increasing chain of
    lower sets ends with the whole forward pass and divides it into segments. The boundary of a
    lower set, its nodes that are read from outside, is saved; all other nodes of a segment are
    dropped and recomputed for its backward pass. The cost of a chain is the time of all nodes that
    are in no boundary, except those of the last segment. Its memory is estimated as in the paper,
    segment by segment: the tensors saved before, twice the segment (its tensors and their
    gradients), the outside readers of the lower set, and their other inputs.

    The dynamic program finds the chains within a limit that no other chain dominates in cost and
    saved bytes. The paper selects one of two: the chain of minimum cost (time-centric) or of
    maximum cost, because more recomputation usually saves fewer bytes (memory-centric). Here, all
    undominated chains replace the latter. Estimates are not the simulator's peaks, so `N_LIMITS`
    limits are tried, each with a bisection by saved bytes, and the best schedule within the budget
    is returned.

    The `family` selects the lower sets: ``exact`` all of them, up to `MAX_SETS`; ``pruned`` for
    each node the set of the node and its ancestors, also the empty set and the whole forward pass.
    The default is ``exact`` if there are at most `MAX_SETS` lower sets, else ``pruned``.

    Interpretations. All state is in RAM. The nodes are the recomputable nodes of the forward pass;
    other nodes are saved and not counted. The last segment is not recomputed, because the backward
    pass begins with it; the paper recomputes it. Dropped tensors are recomputed where they are
    read. For each lower set, at most an equal fraction of `MAX_LABELS` chains, or `MIN_LABELS` if
    that is more, are retained. The program is exact if no more chains are undominated.
    """
    if family not in ("", *FAMILIES):
        raise InputError(f"family {family!r}: expected one of {', '.join(FAMILIES)}")
    graph = problem.graph
    if checkpoint_all_peak_bytes(graph) <= problem.usable_ram_bytes:
        return checkpoint_all(graph)
    sets = LowerSets(graph, problem.table.compute_time_s, family)
    schedule_of: Callable[[frozenset[int]], Schedule] = cache(partial(recompute_once, graph))

    def best_schedule_within(limit_bytes: int) -> Schedule:
        """Return the best schedule of the chains whose estimated peak is within a limit."""
        chains = sets.undominated_chains(limit_bytes)[::-1]  # in ascending order of saved bytes
        best = bisect_budget(
            problem,
            lambda index: schedule_of(chains[index].saved),
            len(chains) // 2,
            len(chains) - 1,
        )
        if best is None:
            raise MethodNotApplicableError(
                f"no chain of its {len(sets.sets):,} lower sets fits in the "
                f"{problem.usable_ram_bytes:,} B that tensors may use"
            )
        return require_within_budget(problem, best)

    # Coarse steps first.
    limit_numbers = sorted(range(1, N_LIMITS + 1), key=lambda number: (-(number & -number), number))
    return select_best_schedule(
        problem,
        (
            partial(best_schedule_within, sets.total_bytes * number // N_LIMITS)
            for number in limit_numbers
        ),
    )


class SetChain(NamedTuple):
    """Increasing chain of nonempty lower sets; the last one is the whole forward pass."""

    sets: tuple[frozenset[int], ...]
    """Nodes of each set, by their indices in the graph."""
    saved: frozenset[int]
    """Tensors of the boundaries and of the last segment."""
    cost_s: float
    """Time of all recomputations [s]."""
    saved_bytes: int
    """Bytes of the tensors of the boundaries that have readers [B]."""


class LowerSets:
    """Lower sets of the recomputable forward nodes; costs and peaks of segments between them.

    Nodes of lower sets are indices in `nodes`. Costs and peaks of pairs outside `is_subset` are
    meaningless.
    """

    def __init__(self, graph: Graph, times_s: Sequence[float], family: str = "") -> None:
        first_backward = first_backward_node(graph)
        self.graph = graph
        self.nodes = sorted(
            {k for i in evictable_tensors(graph) if (k := graph.node_of[i]) < first_backward}
        )
        """Recomputable nodes of the forward pass, by their indices in the graph, ascending."""
        position_of = {k: p for p, k in enumerate(self.nodes)}
        self.inputs_mask = [
            sum(
                1 << position_of[j]
                for j in {graph.node_of[i] for i in graph.inputs_of[k]} & set(position_of)
            )
            for k in self.nodes
        ]
        """For each node in `nodes`, the bit mask of the nodes in `nodes` that it reads."""
        masks = self._list_masks(graph.name, family)
        self.sets = [self._members_of(mask) for mask in masks]
        """Positions in `nodes` of the members of each lower set, smaller sets first."""
        n_nodes = len(self.nodes)
        is_member = np.zeros((len(masks), n_nodes))
        for row, members in zip(is_member, self.sets, strict=True):
            row[members] = 1.0
        is_edge = np.zeros((n_nodes, n_nodes))
        for q, mask in enumerate(self.inputs_mask):
            is_edge[self._members_of(mask), q] = 1.0
        sizes = np.array(
            [
                sum(graph.tensor_bytes[i] for i in graph.outputs_of[k] if graph.users_of[i])
                for k in self.nodes
            ],
            dtype=np.float64,
        )
        times = np.array([times_s[k] for k in self.nodes])
        is_outside = 1.0 - is_member
        self.is_in_boundary = is_in_boundary = is_member * (is_outside @ is_edge.T > 0)
        """Whether each node is in the boundary of each lower set, shape (sets, nodes)."""
        is_reader = is_outside * (is_member @ is_edge > 0)
        is_other_input = is_outside * (is_reader @ is_edge.T > 0)
        self.is_subset = (is_member @ is_member.T) >= is_member.sum(axis=1)[:, None]
        """Whether the first lower set is a proper subset of the second one, shape (sets, sets)."""
        np.fill_diagonal(self.is_subset, val=False)
        added_by_boundary = partial(_sum_boundary_outside, is_member, is_in_boundary)
        self.saved_bytes = added_by_boundary(sizes)
        """Bytes of the second set's boundary outside the first set, shape (sets, sets) [B]."""
        set_time_s = is_member @ times
        self.cost_s = np.maximum(
            0.0, set_time_s[None, :] - set_time_s[:, None] - added_by_boundary(times)
        )
        """Time to recompute the segment between two sets, shape (sets, sets) [s].

        0 if the second set is the whole forward pass."""
        self.cost_s[:, -1] = 0.0
        set_bytes = is_member @ sizes
        self.peak_bytes = 2 * (set_bytes[None, :] - set_bytes[:, None])
        """Estimated peak of the segment's backward pass, without tensors saved before it [B].

        Shape (sets, sets)."""
        self.peak_bytes += (is_reader @ sizes + is_other_input @ sizes)[None, :]
        self.total_bytes = max(1, 2 * int(sizes.sum()))
        """Estimated peak of the chain of one segment, which recomputes no node [B]; at least 1."""

    def undominated_chains(self, limit_bytes: int) -> list[SetChain]:
        """Return undominated chains (cost, saved bytes) of peaks up to `limit_bytes`, by cost.

        For each set, at most ``max(MIN_LABELS, MAX_LABELS // len(sets))`` chains are retained.
        """
        last_set = len(self.sets) - 1
        max_labels = max(MIN_LABELS, MAX_LABELS // len(self.sets))
        end_sets, parents = np.zeros(1, dtype=np.int64), np.full(1, -1)
        costs, saved_bytes = np.zeros(1), np.zeros(1)
        for j in range(1, last_set + 1):
            check_time_limit()
            is_extendable = self.is_subset[end_sets, j] & (
                saved_bytes + self.peak_bytes[end_sets, j] <= limit_bytes
            )
            origins = np.flatnonzero(is_extendable)
            new_costs = costs[origins] + self.cost_s[end_sets[origins], j]
            new_saved_bytes = saved_bytes[origins] + self.saved_bytes[end_sets[origins], j]
            selected_labels = _select_undominated(new_costs, new_saved_bytes, max_labels)
            end_sets = np.concatenate((end_sets, np.full(len(selected_labels), j)))
            parents = np.concatenate((parents, origins[selected_labels]))
            costs = np.concatenate((costs, new_costs[selected_labels]))
            saved_bytes = np.concatenate((saved_bytes, new_saved_bytes[selected_labels]))
        complete_labels = [
            label for label in np.flatnonzero(end_sets == last_set).tolist() if label
        ]
        chains = []
        for label in complete_labels:
            path, current_label = [], label
            while current_label > 0:
                path.append(int(end_sets[current_label]))
                current_label = int(parents[current_label])
            chains.append(
                self._make_chain(path[::-1], float(costs[label]), int(saved_bytes[label]))
            )
        return chains

    def _make_chain(self, path: list[int], cost_s: float, saved_bytes: int) -> SetChain:
        """Return the chain of the lower sets with the indices in `path`."""
        sets = [frozenset(self.nodes[p] for p in self.sets[j]) for j in path]
        boundary_positions = np.flatnonzero(self.is_in_boundary[path].any(axis=0)).tolist()
        saved_nodes = {self.nodes[p] for p in boundary_positions} | sets[-1].difference(*sets[:-1])
        saved_tensors = frozenset(i for k in saved_nodes for i in self.graph.outputs_of[k])
        return SetChain(tuple(sets), saved_tensors, cost_s, saved_bytes)

    def _list_masks(self, name: str, family: str) -> list[int]:
        """Return lower sets as bit masks over `nodes`, smaller first; `name` is the graph's."""
        masks = None if family == PRUNED else self._list_all_masks()
        if masks is None and family == EXACT:
            raise MethodNotApplicableError(
                f"graph {name!r} has more than {MAX_SETS:,} lower sets; 'pruned' takes fewer"
            )
        if masks is None:
            masks = {0, (1 << len(self.nodes)) - 1}
            ancestors: list[int] = []
            for p, mask in enumerate(self.inputs_mask):
                closure = 1 << p
                for q in self._members_of(mask):
                    closure |= ancestors[q]
                ancestors.append(closure)
            masks.update(ancestors)
        return sorted(masks, key=lambda mask: (mask.bit_count(), mask))

    def _list_all_masks(self) -> set[int] | None:
        """Return all lower sets, from empty to full, as bit masks; None above `MAX_SETS`."""
        masks, pending_masks = {0}, [0]
        while pending_masks:
            check_time_limit()
            mask = pending_masks.pop()
            for p, inputs_mask in enumerate(self.inputs_mask):
                extended_mask = mask | 1 << p
                if extended_mask not in masks and inputs_mask & ~mask == 0:
                    masks.add(extended_mask)
                    pending_masks.append(extended_mask)
            if len(masks) > MAX_SETS:
                return None
        return masks

    @staticmethod
    def _members_of(mask: int) -> list[int]:
        return [p for p in range(mask.bit_length()) if mask >> p & 1]


def _sum_boundary_outside(
    is_member: NDArray[np.float64],
    is_in_boundary: NDArray[np.float64],
    amounts: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return at ``[a, b]`` the sum of `amounts` over the boundary of set `b` outside set `a`."""
    amounts_in_boundary = is_in_boundary * amounts
    sums: NDArray[np.float64] = (
        amounts_in_boundary.sum(axis=1)[None, :] - is_member @ amounts_in_boundary.T
    )
    return sums


def _select_undominated(
    costs: NDArray[np.float64], saved_bytes: NDArray[np.float64], max_labels: int
) -> NDArray[np.int64]:
    """Return the positions of labels undominated in cost and saved bytes, by ascending cost.

    Above `max_labels`, only the one with the fewest saved bytes in each equal interval of costs.
    """
    order = np.lexsort((saved_bytes, costs))
    sorted_saved_bytes = saved_bytes[order]
    min_saved_before = np.concatenate(([np.inf], np.minimum.accumulate(sorted_saved_bytes)))[
        : len(sorted_saved_bytes)
    ]
    order = order[sorted_saved_bytes < min_saved_before]
    if len(order) <= max_labels:
        return order
    steps = np.linspace(costs[order[0]], costs[order[-1]], max_labels)
    # The last label of each step has the fewest saved bytes; the first one has the lowest cost.
    last_in_step = np.searchsorted(costs[order], steps, side="right") - 1
    labels: NDArray[np.int64] = order[np.unique(np.concatenate(([0], last_in_step)))]
    return labels
