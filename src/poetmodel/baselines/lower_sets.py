"""Lower sets: recomputation of any forward graph by Kusumoto et al. (NeurIPS 2019)."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.baselines.engine import best_schedule, bisect_budget
from poetmodel.baselines.homes import all_in_ram, forward_only
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
"""Variants of `lower_sets`: all lower sets, or only the sets of ancestors of single nodes."""
MAX_SETS: Final = 1000
"""Maximum number of lower sets of the exact family."""
MAX_LABELS: Final = 8192
"""Maximum number of undominated chains that the dynamic program extends, over all lower sets."""
MIN_LABELS: Final = 4
"""Minimum number of undominated chains that are extended for each lower set."""
N_LIMITS: Final = 32
"""Number of limits of the estimated peak that are tried, in equal steps up to that of keep-all."""


@all_in_ram
@forward_only
def lower_sets(problem: Problem, family: str = "") -> Schedule:
    """Recompute the segments between lower sets, chosen by a dynamic program.

    A lower set contains with each node all nodes from which it is computed. An increasing chain of
    lower sets ends with the whole forward pass and divides it into segments. The boundary of a
    lower set consists of its nodes that are read from outside, and is saved. All other nodes of a
    segment are dropped and recomputed for its backward pass. So the cost of a chain is the time of
    all nodes that are in no boundary. Its memory is estimated as in the paper, segment by segment:
    the tensors saved before, twice the segment (its tensors and their gradients), the readers of
    the lower set outside it, and the other inputs of these readers.

    Among the chains whose estimates meet a limit, the dynamic program finds those that no other
    chain dominates in cost and saved bytes. The paper takes one of two: the chain of minimum cost
    (time-centric), or that of minimum saved bytes (memory-centric). Its estimates are not the
    simulator's peaks, in which tensors leave after their last use. So `N_LIMITS` limits are tried;
    of the undominated chains of each limit, bisection finds the one that saves most and meets the
    budget. The best schedule seen is returned.

    The `family` selects the lower sets: ``exact`` all of them, up to `MAX_SETS`; ``pruned`` for
    each node the set of its ancestors. The default is ``exact`` if possible, else ``pruned``.

    Interpretations. The nodes are the recomputable nodes of the forward pass; others are saved and
    not counted. The last segment is not recomputed, because the backward pass begins with it; the
    paper recomputes it. Nodes run in the order of the graph, and dropped tensors are recomputed
    where they are read. For each lower set the program extends a fraction of `MAX_LABELS` chains,
    at least four. The program is exact if no more chains are undominated.

    The run time is proportional to the number of lower sets times `MAX_LABELS`, for each limit, and
    once to the cube of that number.
    """
    if family not in ("", *FAMILIES):
        raise InputError(f"family {family!r}: expected one of {', '.join(FAMILIES)}")
    graph = problem.graph
    if checkpoint_all_peak_bytes(graph) <= problem.usable_ram_bytes:
        return checkpoint_all(graph)
    table = LowerSets(graph, problem.table.compute_time_s, family)
    schedule_of: Callable[[frozenset[int]], Schedule] = cache(partial(recompute_once, graph))

    def best_within(limit_bytes: int) -> Schedule:
        """Return the best schedule of the undominated chains within a limit of the estimate."""
        chains = table.undominated_chains(limit_bytes)[::-1]  # in ascending order of saved bytes
        best = bisect_budget(
            problem,
            lambda number: schedule_of(chains[number].saved),
            len(chains) // 2,
            len(chains) - 1,
        )
        if best is None:
            raise MethodNotApplicableError(
                f"no chain of its {len(table.sets):,} lower sets keeps within the "
                f"{problem.usable_ram_bytes:,} B that tensors may use"
            )
        return require_within_budget(problem, best)

    limits = sorted(range(1, N_LIMITS + 1), key=lambda n: (-(n & -n), n))  # coarse steps first
    return best_schedule(
        problem, (partial(best_within, table.total_bytes * n // N_LIMITS) for n in limits)
    )


class SetChain(NamedTuple):
    """Increasing chain of lower sets; the last one is the whole forward pass."""

    sets: tuple[frozenset[int], ...]
    """Nodes of each set."""
    saved: frozenset[int]
    """Tensors of the boundaries and of the last segment."""
    cost_s: float
    """Time of all recomputations [s]."""
    saved_bytes: int
    """Bytes of the boundaries [B]."""


class LowerSets:
    """Lower sets of the recomputable forward pass; costs and peaks of the segments between them."""

    def __init__(self, graph: Graph, times_s: Sequence[float], family: str = "") -> None:
        """List the lower sets of a family, and compute costs and peaks between each pair."""
        begin = first_backward_node(graph)
        self.graph = graph
        self.nodes = sorted(
            {k for i in evictable_tensors(graph) if (k := graph.node_of[i]) < begin}
        )
        """Recomputable nodes of the forward pass."""
        index_of = {k: p for p, k in enumerate(self.nodes)}
        self.inputs_mask = [
            sum(
                1 << index_of[j]
                for j in {graph.node_of[i] for i in graph.inputs_of[k]} & set(index_of)
            )
            for k in self.nodes
        ]
        """For each node, by its index in `nodes`, the bit mask of the nodes that it reads."""
        masks = self._masks(graph.name, family)
        self.sets = [self._members(mask) for mask in masks]
        """Node indices of each lower set, smaller sets first."""
        count = len(self.nodes)
        member = np.zeros((len(masks), count))
        for row, members in zip(member, self.sets, strict=True):
            row[members] = 1.0
        edges = np.zeros((count, count))
        for q, mask in enumerate(self.inputs_mask):
            edges[self._members(mask), q] = 1.0
        sizes = np.array(
            [
                sum(graph.tensor_bytes[i] for i in graph.outputs_of[k] if graph.users_of[i])
                for k in self.nodes
            ],
            dtype=np.float64,
        )
        times = np.array([times_s[k] for k in self.nodes])
        outside = 1.0 - member
        self.is_in_boundary = is_in_boundary = member * (outside @ edges.T > 0)
        """Whether each node is in the boundary of each lower set, shape (sets, nodes)."""
        readers = outside * (member @ edges > 0)
        other_inputs = outside * (readers @ edges.T > 0)
        self.is_subset = (member @ member.T) >= member.sum(axis=1)[:, None]
        """Whether the first lower set is a proper subset of the second one, shape (sets, sets)."""
        np.fill_diagonal(self.is_subset, val=False)
        added_by_boundary = partial(_boundary_outside, member, is_in_boundary)
        self.saved_bytes = added_by_boundary(sizes)
        """Bytes that the boundary of the second set adds to the saved ones, shape (sets, sets)
        [B]."""
        set_time_s = member @ times
        self.cost_s = np.maximum(
            0.0, set_time_s[None, :] - set_time_s[:, None] - added_by_boundary(times)
        )
        """Time to recompute the segment between two sets; 0 for the last segment [s]."""
        self.cost_s[:, -1] = 0.0
        set_bytes = member @ sizes
        self.peak_bytes = 2 * (set_bytes[None, :] - set_bytes[:, None])
        """Estimated peak of the segment's backward pass, without tensors saved before it [B]."""
        self.peak_bytes += (readers @ sizes + other_inputs @ sizes)[None, :]
        self.total_bytes = max(1, 2 * int(sizes.sum()))
        """Limit at which nothing is recomputed [B]."""

    def undominated_chains(self, limit_bytes: int) -> list[SetChain]:
        """Return the undominated chains within a limit, in ascending order of cost."""
        last = len(self.sets) - 1
        max_labels = max(MIN_LABELS, MAX_LABELS // len(self.sets))
        ends, parents = np.zeros(1, dtype=np.int64), np.full(1, -1)
        costs, saved = np.zeros(1), np.zeros(1)
        for j in range(1, last + 1):
            check_time_limit()
            fits = self.is_subset[ends, j] & (saved + self.peak_bytes[ends, j] <= limit_bytes)
            origins = np.flatnonzero(fits)
            new_costs = costs[origins] + self.cost_s[ends[origins], j]
            new_saved = saved[origins] + self.saved_bytes[ends[origins], j]
            kept = _select_undominated(new_costs, new_saved, max_labels)
            ends = np.concatenate((ends, np.full(len(kept), j)))
            parents = np.concatenate((parents, origins[kept]))
            costs = np.concatenate((costs, new_costs[kept]))
            saved = np.concatenate((saved, new_saved[kept]))
        complete_labels = [label for label in np.flatnonzero(ends == last).tolist() if label]
        chains = []
        for label in complete_labels:
            path, current = [], label
            while current > 0:
                path.append(int(ends[current]))
                current = int(parents[current])
            chains.append(self._chain(path[::-1], float(costs[label]), int(saved[label])))
        return chains

    def _chain(self, path: list[int], cost_s: float, saved_bytes: int) -> SetChain:
        """Return the chain through lower sets with the given indices."""
        sets = [frozenset(self.nodes[p] for p in self.sets[j]) for j in path]
        bounds = np.flatnonzero(self.is_in_boundary[path].any(axis=0)).tolist()
        saved_nodes = {self.nodes[p] for p in bounds} | sets[-1].difference(*sets[:-1])
        saved = frozenset(i for k in saved_nodes for i in self.graph.outputs_of[k])
        return SetChain(tuple(sets), saved, cost_s, saved_bytes)

    def _masks(self, name: str, family: str) -> list[int]:
        """Return the bit masks of the lower sets of a family, smaller sets first.

        Raises `MethodNotApplicableError` if the exact family has more than `MAX_SETS` sets.
        """
        masks = None if family == PRUNED else self._all_masks()
        if masks is None and family == EXACT:
            raise MethodNotApplicableError(
                f"graph {name!r} has more than {MAX_SETS:,} lower sets; 'pruned' takes fewer"
            )
        if masks is None:
            masks = {0, (1 << len(self.nodes)) - 1}
            ancestors: list[int] = []
            for p, mask in enumerate(self.inputs_mask):
                closure = 1 << p
                for q in self._members(mask):
                    closure |= ancestors[q]
                ancestors.append(closure)
            masks.update(ancestors)
        return sorted(masks, key=lambda mask: (mask.bit_count(), mask))

    def _all_masks(self) -> set[int] | None:
        """Return the bit masks of all lower sets, or None if there are more than `MAX_SETS`."""
        masks, todo = {0}, [0]
        while todo:
            check_time_limit()
            mask = todo.pop()
            for p, inputs_mask in enumerate(self.inputs_mask):
                longer = mask | 1 << p
                if longer not in masks and inputs_mask & ~mask == 0:
                    masks.add(longer)
                    todo.append(longer)
            if len(masks) > MAX_SETS:
                return None
        return masks

    @staticmethod
    def _members(mask: int) -> list[int]:
        return [p for p in range(mask.bit_length()) if mask >> p & 1]


def _boundary_outside(
    member: NDArray[np.float64], is_in_boundary: NDArray[np.float64], amounts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the amount of the second set's boundary outside the first set, shape (sets, sets)."""
    weighted = is_in_boundary * amounts
    outside: NDArray[np.float64] = weighted.sum(axis=1)[None, :] - member @ weighted.T
    return outside


def _select_undominated(
    costs: NDArray[np.float64], saved: NDArray[np.float64], max_labels: int
) -> NDArray[np.int64]:
    """Return the undominated labels by ascending cost.

    If there are more than `max_labels`, the costs are divided into equal steps, and the label that
    saves least in each step is selected.
    """
    order = np.lexsort((saved, costs))
    sorted_saved = saved[order]
    min_saved_before = np.concatenate(([np.inf], np.minimum.accumulate(sorted_saved)))[
        : len(sorted_saved)
    ]
    order = order[sorted_saved < min_saved_before]
    if len(order) <= max_labels:
        return order
    steps = np.linspace(costs[order[0]], costs[order[-1]], max_labels)
    # The last label of each step has the fewest saved bytes; the first one has the lowest cost.
    selected = np.searchsorted(costs[order], steps, side="right") - 1
    selection: NDArray[np.int64] = order[np.unique(np.concatenate(([0], selected)))]
    return selection
