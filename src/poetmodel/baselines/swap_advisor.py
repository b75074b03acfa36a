"""SwapAdvisor: a genetic search over sets of tensors to swap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.engine import best_schedule
from poetmodel.baselines.homes import in_best_homes
from poetmodel.baselines.paging import (
    IdleInterval,
    execute_evictions,
    idle_intervals,
    relieved_stages,
    require_within_budget,
    transfer_costs,
)
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes, checkpoint_all_profile
from poetmodel.problem import Problem, Quantity

if TYPE_CHECKING:
    from poetmodel.schedule import Schedule

POPULATION: Final = 32
"""Number of swap sets in a generation."""
GENERATIONS: Final = 60
STALL_GENERATIONS: Final = 15
"""Number of generations without an improvement after which the search ends."""
MUTATIONS: Final = 2
"""Average number of flipped bits of a child."""

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Fitness = tuple[int, float, float]


@in_best_homes
def swap_advisor(problem: Problem, *, seed: int = 0) -> Schedule:
    """Search for the cheapest set of tensors to swap with a genetic algorithm.

    The same seed gives the same schedule.

    An individual is a set of idle intervals: tensors that are evicted between two uses. Each is
    repaired like the plans of the paper's swap planner: for a stage that does not fit, the tensor
    whose next use is latest is evicted. Then unnecessary evictions are removed, the costliest
    first. The initial population has this plan and random ones. Parents win tournaments of two. A
    child has the intervals of one parent up to a random stage and those of the other parent after
    it, and a few flipped bits. The best two individuals survive.

    Interpretations. The paper searches operator orders and memory pools, from which swaps follow;
    here the order is given and RAM is not fragmented, so that only the swaps are searched. The
    paper's simulator measures the time of a step; here the fitness of an individual is the cost of
    its transfers in the minimized quantity (energy if RAM is minimized). Exceeding the storage
    limit is penalized.

    If the time is minimized and transfers overlap computations, a second search charges only the
    time that is not hidden, and the better schedule is returned. A swap is hidden by computations
    in its interval, and all swaps together by a whole pass.

    The run time is O(generations * population * intervals * stages) operations of numpy arrays,
    with at most `GENERATIONS` * `POPULATION` repairs.
    """
    if checkpoint_all_peak_bytes(problem.graph) <= problem.usable_ram_bytes:
        return execute_evictions(problem, {})
    if not problem.can_page:
        raise MethodNotApplicableError("it swaps tensors, and the problem allows no paging")
    overlaps = problem.minimize == Quantity.TIME and problem.is_overlapping
    searches = (
        _GeneticSearch(problem, seed, hides_transfers=hides_transfers)
        for hides_transfers in ((False, True) if overlaps else (False,))
    )
    return best_schedule(problem, (search.schedule for search in searches))


class _GeneticSearch:
    """The genetic search over sets of idle intervals in which tensors are evicted."""

    def __init__(self, problem: Problem, seed: int, *, hides_transfers: bool = False) -> None:
        """Compute the bytes that each eviction frees, and its cost."""
        graph = problem.graph
        self.problem = problem
        self.hides_transfers = hides_transfers
        """Whether only transfer time that computations do not hide is charged."""
        self.random = np.random.default_rng(seed)
        self.excess = np.array(checkpoint_all_profile(graph)) - problem.usable_ram_bytes
        n_excess_before = np.concatenate(([0], np.cumsum(self.excess > 0)))
        self.intervals = sorted(
            (
                interval
                for interval in idle_intervals(graph, includes_overwritten=True)
                if graph.tensor_bytes[interval.tensor]
                and n_excess_before[interval.after]
                > n_excess_before[relieved_stages(graph, interval).start]
            ),
            key=lambda interval: (interval.before, interval.tensor),
        )
        tensors = [interval.tensor for interval in self.intervals]
        self.first = np.array(
            [relieved_stages(graph, interval).start for interval in self.intervals], dtype=np.int64
        )
        self.end = np.array([interval.after for interval in self.intervals], dtype=np.int64)
        self.sizes = np.array([graph.tensor_bytes[i] for i in tensors], dtype=np.int64)
        stages = np.arange(len(graph.nodes))
        self.is_relieved = (self.first[:, None] <= stages) & (stages < self.end[:, None])
        self.relief = self.is_relieved * self.sizes[:, None]
        """Bytes that evicting in each interval frees in each stage, shape (intervals, stages)
        [B]."""
        for index, interval in enumerate(self.intervals):
            if self.is_relieved[index, interval.before]:
                self.relief[index, interval.before] = graph.shared_bytes_of[interval.before][
                    interval.tensor
                ]
        cost_in, cost_out = transfer_costs(problem)
        if problem.minimize == Quantity.WRITES:
            writes = problem.objective.coefficients
            cost_in, cost_out = writes.page_in, writes.page_out
        self.cost_in = np.array([cost_in[i] for i in tensors])
        self.tensor_index = np.unique(tensors, return_inverse=True)[1]
        self.cost_out = np.zeros(self.tensor_index.max(initial=-1) + 1)
        self.written = np.zeros(len(self.cost_out), dtype=np.int64)
        for index, i in enumerate(tensors):
            if i not in graph.on_aux:
                self.cost_out[self.tensor_index[index]] = cost_out[i]
                self.written[self.tensor_index[index]] = self.sizes[index]
        ends_s = np.concatenate(([0.0], np.cumsum(problem.table.compute_time_s)))
        begins = np.array([interval.before + 1 for interval in self.intervals], dtype=np.int64)
        self.interval_s = ends_s[self.end] - ends_s[begins]
        """Compute time in each interval [s]."""
        self.pass_s = float(ends_s[-1])
        transfer_costs_of = self.cost_in + self.cost_out[self.tensor_index]
        self.unhidden_s = np.maximum(0.0, transfer_costs_of - self.interval_s)
        """Time of each swap that its interval does not hide [s]."""
        prices = self.unhidden_s if hides_transfers else self.cost_in
        self.costliest_first = np.lexsort((-self.cost_in, -prices))

    def schedule(self) -> Schedule:
        """Return the schedule of the best swap set found; raise if it exceeds the budget."""
        pages = dict.fromkeys(self.search(), True)
        return require_within_budget(self.problem, execute_evictions(self.problem, pages))

    def search(self) -> list[IdleInterval]:
        """Run the genetic algorithm and return the best swap set found."""
        count = len(self.intervals)
        density = self.random.random(POPULATION)
        population = [self._repair(np.zeros(count, dtype=bool))]
        population += [self._repair(self.random.random(count) < share) for share in density[1:]]
        fitness = [self._fitness(mask) for mask in population]
        idle, best = 0, min(fitness)
        for _ in range(GENERATIONS):
            if idle >= STALL_GENERATIONS or not count:
                break
            order = sorted(range(len(population)), key=fitness.__getitem__)
            children = [population[index] for index in order[:2]]
            while len(children) < POPULATION:
                children.append(self._repair(self._child(population, fitness)))
            population, fitness = children, [self._fitness(mask) for mask in children]
            idle, best = (0, min(fitness)) if min(fitness) < best else (idle + 1, best)
        winner = population[min(range(len(population)), key=fitness.__getitem__)]
        return [interval for interval, out in zip(self.intervals, winner, strict=True) if out]

    def _child(self, population: list[Mask], fitness: list[Fitness]) -> Mask:
        mother, father = (self._tournament(population, fitness) for _ in range(2))
        cut = self.random.integers(len(self.excess))
        child = np.where(self.first <= cut, mother, father)
        flips = self.random.random(len(child)) < MUTATIONS / len(child)
        return np.not_equal(child, flips)

    def _tournament(self, population: list[Mask], fitness: list[Fitness]) -> Mask:
        first, second = map(int, self.random.integers(len(population), size=2))
        return population[first if fitness[first] <= fitness[second] else second]

    def _fitness(self, mask: Mask) -> Fitness:
        """Return (bytes beyond the storage limit, cost that is not hidden, cost of transfers)."""
        out = np.zeros(len(self.cost_out), dtype=bool)
        out[self.tensor_index[mask]] = True
        limit = self.problem.aux_limit_bytes
        excess_bytes = 0 if limit is None else max(0, int(self.written[out].sum()) - limit)
        total = float(self.cost_in[mask].sum() + self.cost_out[out].sum())
        if not self.hides_transfers:
            return excess_bytes, total, total
        return excess_bytes, max(float(self.unhidden_s[mask].sum()), total - self.pass_s), total

    def _repair(self, mask: Mask) -> Mask:
        """Add evictions until all stages fit, if possible; then remove unnecessary ones."""
        mask = mask.copy()
        excess = self.excess - self.relief[mask].sum(axis=0)
        while excess.max() > 0:
            check_time_limit()
            crossing = np.flatnonzero(self.is_relieved[:, excess.argmax()] & ~mask)
            if not len(crossing):
                break
            gene = crossing[self.end[crossing].argmax()]
            mask[gene] = True
            excess -= self.relief[gene]
        for gene in self.costliest_first[mask[self.costliest_first]]:
            check_time_limit()
            stages = slice(self.first[gene], self.end[gene])
            if (excess + self.relief[gene])[stages].max() <= 0:
                excess[stages] += self.relief[gene][stages]
                mask[gene] = False
        return mask
