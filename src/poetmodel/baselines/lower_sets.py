"""Chains of lower sets: the recomputation of Kusumoto et al. for any forward graph."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.baselines.engine import bisected, cheapest
from poetmodel.baselines.homes import all_in_ram, forward_only
from poetmodel.baselines.paging import within_budget
from poetmodel.clock import check_time_limit
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.heuristics.execution import begin_of_backward, droppable, recompute_once
from poetmodel.schedule import checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

EXACT, PRUNED = FAMILIES = ("exact", "pruned")
"""Variants of `lower_sets`: all lower sets, or those of what a single node needs."""
MAX_SETS: Final = 1000
"""Most lower sets of the exact family."""
LABELS: Final = 8192
"""Most undominated chains, of all lower sets together, that the dynamic program goes on with."""
MIN_LABELS: Final = 4
"""The fewest that it goes on with for each lower set."""
LIMITS: Final = 32
"""Limits of the estimated peak that are tried, in equal steps up to that of keep-all."""


@all_in_ram
@forward_only
def lower_sets(problem: Problem, family: str = "") -> Schedule:
    """Recompute the segments between lower sets, chosen by a dynamic program.

    A lower set of the forward pass has, with each node, all nodes from which that is computed. An
    increasing chain of lower sets ends with the whole forward pass and divides it into segments.
    The boundary of a lower set, its nodes that others outside read, is saved. All other nodes of a
    segment are dropped and recomputed for its backward pass. So a chain costs the time of all nodes
    that are in no boundary. What it takes is estimated as in the paper, segment by segment: what is
    saved before, twice the segment (its tensors and their gradients), the readers of the lower set
    outside it, and what else these readers read.

    Among the chains whose estimates keep a limit, the dynamic program finds those that no other one
    dominates in cost and saved bytes. The paper takes one of two: the chain of least cost
    (time-centric), or that of the fewest saved bytes (memory-centric). Its estimates are not the
    simulator's peaks, in which tensors leave after their last use. So `LIMITS` limits are tried,
    and of the undominated chains of each limit the one that saves most and keeps the budget is
    found by bisection. The best schedule seen is returned.

    The `family` says which lower sets are considered: ``exact`` all of them, up to `MAX_SETS`;
    ``pruned`` for each node the set of what it needs. Without one, it is ``exact`` where that is
    possible, else ``pruned``.

    Interpretations. The nodes are those of the forward pass that may be recomputed; others are
    saved and counted nowhere. The last segment is not recomputed, as the backward pass begins with
    it; the paper recomputes it. Nodes run in the order of the graph, and what is dropped is
    recomputed where it is read. For each lower set the program goes on with a part of `LABELS`
    chains, at least four: it is exact as long as no more are undominated.

    Takes time in proportion to the lower sets times `LABELS`, for each limit, and the cube of their
    number once.
    """
    if family not in ("", *FAMILIES):
        raise InputError(f"family {family!r}: expected one of {', '.join(FAMILIES)}")
    graph = problem.graph
    if checkpoint_all_peak_bytes(graph) <= problem.usable_ram_bytes:
        return checkpoint_all(graph)
    table = LowerSets(graph, problem.table.compute_time_s, family)
    realized: Callable[[frozenset[int]], Schedule] = cache(partial(recompute_once, graph))

    def within(limit_bytes: int) -> Schedule:
        chains = table.front(limit_bytes)[::-1]  # those that save least first
        best = bisected(
            problem,
            lambda number: realized(chains[number].saved),
            len(chains) // 2,
            len(chains) - 1,
        )
        if best is None:
            raise MethodNotApplicableError(
                f"no chain of its {len(table.sets):,} lower sets keeps within the "
                f"{problem.usable_ram_bytes:,} B that tensors may use"
            )
        return within_budget(problem, best)

    limits = sorted(range(1, LIMITS + 1), key=lambda n: (-(n & -n), n))  # coarse steps first
    return cheapest(problem, (partial(within, table.total_bytes * n // LIMITS) for n in limits))


class SetChain(NamedTuple):
    """An increasing chain of lower sets, the last one being the whole forward pass."""

    sets: tuple[frozenset[int], ...]
    """Nodes of each set."""
    saved: frozenset[int]
    """Tensors of the boundaries and of the last segment."""
    cost_s: float
    """Time of what is recomputed [s]."""
    saved_bytes: int
    """Bytes of the boundaries [B]."""


class LowerSets:
    """Lower sets of the recomputable forward pass, and what the segments between them take."""

    def __init__(self, graph: Graph, times_s: Sequence[float], family: str = "") -> None:
        begin = begin_of_backward(graph)
        self.graph = graph
        self.nodes = sorted({k for i in droppable(graph) if (k := graph.node_of[i]) < begin})
        """Recomputable nodes of the forward pass."""
        place = {k: p for p, k in enumerate(self.nodes)}
        self.before = [
            sum(1 << place[j] for j in {graph.node_of[i] for i in graph.inputs_of[k]} & set(place))
            for k in self.nodes
        ]
        """For each place the places that its node reads, as bits."""
        masks = self._masks(graph.name, family)
        self.sets = [self._members(mask) for mask in masks]
        """Places of each lower set, the smaller ones first."""
        count = len(self.nodes)
        member = np.zeros((len(masks), count))
        for row, places in zip(member, self.sets, strict=True):
            row[places] = 1.0
        edges = np.zeros((count, count))
        for q, mask in enumerate(self.before):
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
        self.edge = edge = member * (outside @ edges.T > 0)
        """Whether each place is in the boundary of each lower set, shape (sets, places)."""
        readers = outside * (member @ edges > 0)
        beside = outside * (readers @ edges.T > 0)
        self.within = (member @ member.T) >= member.sum(axis=1)[:, None]
        """Whether the first lower set is part of the second one, shape (sets, sets)."""
        np.fill_diagonal(self.within, val=False)
        grown = partial(_grown, member, edge)
        self.saved_bytes = grown(sizes)
        """What the boundary of the second set adds to what is saved, shape (sets, sets) [B]."""
        whole_s = member @ times
        self.cost_s = np.maximum(0.0, whole_s[None, :] - whole_s[:, None] - grown(times))
        """Time to recompute the segment between two sets, none of the last one [s]."""
        self.cost_s[:, -1] = 0.0
        whole_bytes = member @ sizes
        self.peak_bytes = 2 * (whole_bytes[None, :] - whole_bytes[:, None])
        """Estimated peak of the segment's backward pass beside what is saved before it [B]."""
        self.peak_bytes += (readers @ sizes + beside @ sizes)[None, :]
        self.total_bytes = max(1, 2 * int(sizes.sum()))
        """The limit at which nothing is recomputed [B]."""

    def front(self, limit_bytes: int) -> list[SetChain]:
        """Return the chains within a limit that none dominates, the one of least cost first."""
        last = len(self.sets) - 1
        most = max(MIN_LABELS, LABELS // len(self.sets))
        ends, parents = np.zeros(1, dtype=np.int64), np.full(1, -1)
        costs, saved = np.zeros(1), np.zeros(1)
        for j in range(1, last + 1):
            check_time_limit()
            fits = self.within[ends, j] & (saved + self.peak_bytes[ends, j] <= limit_bytes)
            origins = np.flatnonzero(fits)
            new_costs = costs[origins] + self.cost_s[ends[origins], j]
            new_saved = saved[origins] + self.saved_bytes[ends[origins], j]
            kept = _select_undominated(new_costs, new_saved, most)
            ends = np.concatenate((ends, np.full(len(kept), j)))
            parents = np.concatenate((parents, origins[kept]))
            costs = np.concatenate((costs, new_costs[kept]))
            saved = np.concatenate((saved, new_saved[kept]))
        found = [label for label in np.flatnonzero(ends == last).tolist() if label]
        chains = []
        for label in found:
            path, at = [], label
            while at > 0:
                path.append(int(ends[at]))
                at = int(parents[at])
            chains.append(self._chain(path[::-1], float(costs[label]), int(saved[label])))
        return chains

    def _chain(self, path: list[int], cost_s: float, saved_bytes: int) -> SetChain:
        """Return a chain of lower sets, given by their numbers."""
        sets = [frozenset(self.nodes[p] for p in self.sets[j]) for j in path]
        bounds = np.flatnonzero(self.edge[path].any(axis=0)).tolist()
        once = {self.nodes[p] for p in bounds} | sets[-1].difference(*sets[:-1])
        saved = frozenset(i for k in once for i in self.graph.outputs_of[k])
        return SetChain(tuple(sets), saved, cost_s, saved_bytes)

    def _masks(self, name: str, family: str) -> list[int]:
        """Return the lower sets of a family as bits of places, the smaller ones first."""
        masks = None if family == PRUNED else self._all_masks()
        if masks is None and family == EXACT:
            raise MethodNotApplicableError(
                f"graph {name!r} has more than {MAX_SETS:,} lower sets; 'pruned' takes fewer"
            )
        if masks is None:
            masks = {0, (1 << len(self.nodes)) - 1}
            needed: list[int] = []
            for p, mask in enumerate(self.before):
                whole = 1 << p
                for q in self._members(mask):
                    whole |= needed[q]
                needed.append(whole)
            masks.update(needed)
        return sorted(masks, key=lambda mask: (mask.bit_count(), mask))

    def _all_masks(self) -> set[int] | None:
        """Return all lower sets, None where there are more than `MAX_SETS`."""
        masks, todo = {0}, [0]
        while todo:
            check_time_limit()
            mask = todo.pop()
            for p, before in enumerate(self.before):
                longer = mask | 1 << p
                if longer not in masks and before & ~mask == 0:
                    masks.add(longer)
                    todo.append(longer)
            if len(masks) > MAX_SETS:
                return None
        return masks

    @staticmethod
    def _members(mask: int) -> list[int]:
        return [p for p in range(mask.bit_length()) if mask >> p & 1]


def _grown(
    member: NDArray[np.float64], edge: NDArray[np.float64], amounts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the amount of the second set's boundary outside the first set, shape (sets, sets)."""
    weighed = edge * amounts
    grown: NDArray[np.float64] = weighed.sum(axis=1)[None, :] - member @ weighed.T
    return grown


def _select_undominated(
    costs: NDArray[np.float64], saved: NDArray[np.float64], most: int
) -> NDArray[np.int64]:
    """Return the labels of which no other one is as good in both, by rising costs.

    Of more than `most` those stay that save least in equal steps of the costs.
    """
    order = np.lexsort((saved, costs))
    ranked = saved[order]
    before = np.concatenate(([np.inf], np.minimum.accumulate(ranked)))[: len(ranked)]
    order = order[ranked < before]
    if len(order) <= most:
        return order
    steps = np.linspace(costs[order[0]], costs[order[-1]], most)
    # The last label of each step saves least; the first one of all costs least.
    chosen = np.searchsorted(costs[order], steps, side="right") - 1
    thinned: NDArray[np.int64] = order[np.unique(np.concatenate(([0], chosen)))]
    return thinned
