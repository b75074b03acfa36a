"""A genetic search over sets of tensors to swap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.engine import cheapest
from poetmodel.baselines.homes import in_best_homes
from poetmodel.baselines.paging import (
    Gap,
    execute_gaps,
    gaps_of,
    relieved,
    transfer_costs,
    within_budget,
)
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes, checkpoint_all_profile
from poetmodel.problem import Problem, Quantity

if TYPE_CHECKING:
    from poetmodel.schedule import Schedule

POPULATION: Final = 32
"""Swap sets of a generation."""
GENERATIONS: Final = 60
STALL_GENERATIONS: Final = 15
"""Generations without a better set after which the search ends."""
MUTATIONS: Final = 2
"""Bits of a child that are flipped, on average."""

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Fitness = tuple[int, float, float]


@in_best_homes
def swap_advisor(problem: Problem, *, seed: int = 0) -> Schedule:
    """Search for the cheapest set of tensors to swap by a genetic algorithm.

    The same seed gives the same schedule.

    An individual is a set of gaps: tensors that are out of RAM between two uses. Each is repaired
    as the paper's swap planner works: where a stage does not fit, the tensor leaves whose next use
    is furthest. Then tensors that need not have left stay, the costliest first. The first
    population has that plan and random ones. Parents win tournaments of two; a child has the gaps
    of one parent up to a random stage and those of the other after it, and a few flipped; the best
    two individuals live on.

    Interpretations. The paper searches operator orders and memory pools, from which swaps follow;
    here the order is given and RAM has no fragments, so that only the swaps are left. Its simulator
    measures the time of a step; here the fitness of an individual is what its transfers add to the
    quantity that the problem minimizes (energy where it minimizes RAM). Storage limits are
    penalized.

    Where the time is minimized and transfers overlap with computing, a second search charges only
    the time that nothing hides, and the better of both schedules is taken. A swap hides behind the
    computing in its gap, and all swaps together behind a whole pass.

    Takes O(generations * population * gaps * stages) operations of numpy arrays, at most
    `GENERATIONS` * `POPULATION` repairs.
    """
    if checkpoint_all_peak_bytes(problem.graph) <= problem.usable_ram_bytes:
        return execute_gaps(problem, {})
    if not problem.can_page:
        raise MethodNotApplicableError("it swaps tensors, and the problem allows no paging")
    overlaps = problem.minimize == Quantity.TIME and problem.is_overlapping
    searches = (
        _GeneticSearch(problem, seed, hidden=hidden)
        for hidden in ((False, True) if overlaps else (False,))
    )
    return cheapest(problem, (search.schedule for search in searches))


class _GeneticSearch:
    def __init__(self, problem: Problem, seed: int, *, hidden: bool = False) -> None:
        graph = problem.graph
        self.problem = problem
        self.hidden = hidden
        """Whether transfers count only as far as no computing hides them."""
        self.random = np.random.default_rng(seed)
        self.excess = np.array(checkpoint_all_profile(graph)) - problem.usable_ram_bytes
        crowded = np.concatenate(([0], np.cumsum(self.excess > 0)))
        self.gaps = sorted(
            (
                gap
                for gap in gaps_of(graph, overwritten=True)
                if graph.tensor_bytes[gap.tensor]
                and crowded[gap.after] > crowded[relieved(graph, gap).start]
            ),
            key=lambda gap: (gap.before, gap.tensor),
        )
        tensors = [gap.tensor for gap in self.gaps]
        self.first = np.array([relieved(graph, gap).start for gap in self.gaps], dtype=np.int64)
        self.end = np.array([gap.after for gap in self.gaps], dtype=np.int64)
        self.sizes = np.array([graph.tensor_bytes[i] for i in tensors], dtype=np.int64)
        stages = np.arange(len(graph.nodes))
        self.across = (self.first[:, None] <= stages) & (stages < self.end[:, None])
        self.relief = self.across * self.sizes[:, None]
        """Bytes that each gap takes off each stage, shape (gaps, stages)."""
        for index, gap in enumerate(self.gaps):
            if self.across[index, gap.before]:
                self.relief[index, gap.before] = graph.shared_bytes_of[gap.before][gap.tensor]
        cost_in, cost_out = transfer_costs(problem)
        if problem.minimize == Quantity.WRITES:
            writes = problem.objective.coefficients
            cost_in, cost_out = writes.page_in, writes.page_out
        self.cost_in = np.array([cost_in[i] for i in tensors])
        self.tensor = np.unique(tensors, return_inverse=True)[1]
        self.cost_out = np.zeros(self.tensor.max(initial=-1) + 1)
        self.written = np.zeros(len(self.cost_out), dtype=np.int64)
        for index, i in enumerate(tensors):
            if i not in graph.on_aux:
                self.cost_out[self.tensor[index]] = cost_out[i]
                self.written[self.tensor[index]] = self.sizes[index]
        ends_s = np.concatenate(([0.0], np.cumsum(problem.table.compute_time_s)))
        begins = np.array([gap.before + 1 for gap in self.gaps], dtype=np.int64)
        self.gap_s = ends_s[self.end] - ends_s[begins]
        """Time of the computing in each gap [s]."""
        self.pass_s = float(ends_s[-1])
        moves = self.cost_in + self.cost_out[self.tensor]
        self.late_s = np.maximum(0.0, moves - self.gap_s)
        """Time of each swap that its gap does not hide [s]."""
        prices = self.late_s if hidden else self.cost_in
        self.costliest_first = np.lexsort((-self.cost_in, -prices))

    def schedule(self) -> Schedule:
        """Return the schedule of the best swap set found."""
        pages = dict.fromkeys(self.run(), True)
        return within_budget(self.problem, execute_gaps(self.problem, pages))

    def run(self) -> list[Gap]:
        """Return the best swap set found."""
        count = len(self.gaps)
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
        return [gap for gap, out in zip(self.gaps, winner, strict=True) if out]

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
        """Return bytes beyond the storage limit, what is not hidden, then the cost of transfers."""
        out = np.zeros(len(self.cost_out), dtype=bool)
        out[self.tensor[mask]] = True
        limit = self.problem.aux_limit_bytes
        over = 0 if limit is None else max(0, int(self.written[out].sum()) - limit)
        total = float(self.cost_in[mask].sum() + self.cost_out[out].sum())
        if not self.hidden:
            return over, total, total
        return over, max(float(self.late_s[mask].sum()), total - self.pass_s), total

    def _repair(self, mask: Mask) -> Mask:
        """Return a minimal set that fits, as far as gaps allow."""
        mask = mask.copy()
        excess = self.excess - self.relief[mask].sum(axis=0)
        while excess.max() > 0:
            check_time_limit()
            crossing = np.flatnonzero(self.across[:, excess.argmax()] & ~mask)
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
