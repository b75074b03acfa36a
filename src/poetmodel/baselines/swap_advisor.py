"""SwapAdvisor: a genetic search over sets of tensors to swap."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.engine import select_best_schedule
from poetmodel.baselines.homes import schedule_with_homes
from poetmodel.baselines.paging import (
    IdleInterval,
    execute_evictions,
    find_idle_intervals,
    relieved_stages,
    require_within_budget,
    transfer_costs,
)
from poetmodel.baselines.registry import METHODS
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes, checkpoint_all_profile
from poetmodel.problem import Problem, Quantity

if TYPE_CHECKING:
    from poetmodel.schedule import Schedule

POPULATION: Final = 32
"""Number of swap sets in a generation."""
GENERATIONS: Final = 60
"""Maximum number of generations."""
STALL_GENERATIONS: Final = 15
"""Number of generations without an improvement after which the search ends."""
MUTATIONS: Final = 2
"""Average number of flipped bits of a child."""

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""Individual: whether a tensor is evicted in each idle interval."""
Fitness = tuple[int, float, float]
"""Result of `_GeneticSearch._compute_fitness`; smaller is better."""


def swap_advisor(problem: Problem, *, seed: int = 0) -> Schedule:
    """Search by a genetic algorithm for the set of swaps with minimum cost.

    Equal seeds produce equal schedules, unless a time limit stops the search. If keep-all meets the
    budget, it is returned without a search.

    An individual is a set of idle intervals in which tensors are evicted. Each is repaired as by
    the paper's swap planner: for the stage with the largest excess over the budget, the tensor
    whose next use is latest is evicted, until all stages fit. Then unnecessary evictions are
    removed, the costliest page-in first. The initial population has the repaired empty set and
    repaired random sets. Parents win tournaments of two. A child has the intervals of one parent up
    to a random stage, those of the other parent after it, and a few flipped bits. The best two
    individuals survive.

    Interpretations. The paper searches operator orders and memory pools, from which swaps follow;
    here the order is given and RAM is not fragmented, so that only the swaps are searched. The
    paper's simulator measures the time of a training step; here the fitness is the cost of
    transfers in the minimized quantity (energy if that is RAM or user-defined). Fewer bytes above
    the storage limit count more than lower costs. If the time is minimized and transfers overlap
    computations, a second search charges only the time that is not hidden by the swap's interval
    or, for all swaps together, by a whole pass. Homes of state are those of
    `StateHomes.EITHER`.
    """
    return schedule_with_homes(
        METHODS["swap-advisor"].state_homes,
        problem,
        (partial(_search_swaps, seed=seed),),
        may_overwrite=True,
    )


def _search_swaps(problem: Problem, *, seed: int, overwrites: bool = False) -> Schedule:
    if checkpoint_all_peak_bytes(problem.graph) <= problem.usable_ram_bytes:
        return execute_evictions(problem, {})
    if not problem.can_page:
        raise MethodNotApplicableError("it swaps tensors, and the problem allows no paging")
    overlaps = problem.minimize == Quantity.TIME and problem.is_overlapping
    searches = (
        _GeneticSearch(problem, seed, hides_transfers=hides_transfers, overwrites=overwrites)
        for hides_transfers in ((False, True) if overlaps else (False,))
    )
    return select_best_schedule(problem, (search.find_schedule for search in searches))


class _GeneticSearch:
    """The genetic search over sets of idle intervals in which tensors are evicted.

    Only intervals that relieve a stage above the budget are searched.
    """

    def __init__(
        self,
        problem: Problem,
        seed: int,
        *,
        hides_transfers: bool = False,
        overwrites: bool = False,
    ) -> None:
        graph = problem.graph
        self.problem = problem
        self.hides_transfers = hides_transfers
        """Whether only transfer time that computations do not hide is charged."""
        self.random = np.random.default_rng(seed)
        self.excess = np.array(checkpoint_all_profile(graph)) - problem.usable_ram_bytes
        """RAM of keep-all minus the budget in each stage [B]; negative in stages that fit."""
        n_excess_before = np.concatenate(([0], np.cumsum(self.excess > 0)))
        relieved = partial(relieved_stages, graph, overwrites=overwrites)
        self.intervals = sorted(
            (
                interval
                for interval in find_idle_intervals(graph, overwrites=overwrites)
                if graph.tensor_bytes[interval.tensor]
                and n_excess_before[interval.after] > n_excess_before[relieved(interval).start]
            ),
            key=lambda interval: (interval.before, interval.tensor),
        )
        tensors = [interval.tensor for interval in self.intervals]
        self.first_stages = np.array(
            [relieved(interval).start for interval in self.intervals], dtype=np.int64
        )
        self.end_stages = np.array([interval.after for interval in self.intervals], dtype=np.int64)
        self.sizes = np.array([graph.tensor_bytes[i] for i in tensors], dtype=np.int64)
        stages = np.arange(len(graph.nodes))
        self.is_relieved = (self.first_stages[:, None] <= stages) & (
            stages < self.end_stages[:, None]
        )
        """Whether an eviction in each interval frees RAM in each stage; shape (intervals,
        stages)."""
        self.freed_bytes = self.is_relieved * self.sizes[:, None]
        """Bytes that an eviction in each interval frees in each stage [B], shape (intervals,
        stages)."""
        for index, interval in enumerate(self.intervals):
            if self.is_relieved[index, interval.before]:
                self.freed_bytes[index, interval.before] = graph.shared_bytes_of[interval.before][
                    interval.tensor
                ]
        page_in_costs, page_out_costs = transfer_costs(problem)
        if problem.minimize == Quantity.WRITES:
            coefficients_of_writes = problem.objective.coefficients
            page_in_costs, page_out_costs = (
                coefficients_of_writes.page_in,
                coefficients_of_writes.page_out,
            )
        self.page_in_costs = np.array([page_in_costs[i] for i in tensors])
        self.tensor_index = np.unique(tensors, return_inverse=True)[1]
        """Index of each interval's tensor in `page_out_costs` and `written_bytes`."""
        self.page_out_costs = np.zeros(self.tensor_index.max(initial=-1) + 1)
        self.written_bytes = np.zeros(len(self.page_out_costs), dtype=np.int64)
        for index, i in enumerate(tensors):
            if i not in graph.on_aux:
                self.page_out_costs[self.tensor_index[index]] = page_out_costs[i]
                self.written_bytes[self.tensor_index[index]] = self.sizes[index]
        stage_ends_s = np.concatenate(([0.0], np.cumsum(problem.table.compute_time_s)))
        first_idle_stages = np.array(
            [interval.before + 1 for interval in self.intervals], dtype=np.int64
        )
        self.interval_s = stage_ends_s[self.end_stages] - stage_ends_s[first_idle_stages]
        """Compute time in each interval [s]."""
        self.pass_s = float(stage_ends_s[-1])
        swap_costs = self.page_in_costs + self.page_out_costs[self.tensor_index]
        self.unhidden_s = np.maximum(0.0, swap_costs - self.interval_s)
        """Time of each swap that its interval does not hide [s]; used only if `hides_transfers`."""
        prices = self.unhidden_s if hides_transfers else self.page_in_costs
        self.order_by_cost = np.lexsort((-self.page_in_costs, -prices))
        """Indices of the intervals by descending page-in cost; with `hides_transfers`, by
        `unhidden_s` first."""

    def find_schedule(self) -> Schedule:
        """Return the schedule of the best set found, within the budget."""
        evictions = dict.fromkeys(self.search_intervals(), True)
        return require_within_budget(self.problem, execute_evictions(self.problem, evictions))

    def search_intervals(self) -> list[IdleInterval]:
        """Run the genetic algorithm; return the intervals of the fittest individual it found."""
        n_intervals = len(self.intervals)
        density = self.random.random(POPULATION)
        population = [self._repair(np.zeros(n_intervals, dtype=bool))]
        population += [
            self._repair(self.random.random(n_intervals) < fraction) for fraction in density[1:]
        ]
        fitness = [self._compute_fitness(mask) for mask in population]
        n_stalled, best_fitness = 0, min(fitness)
        for _ in range(GENERATIONS):
            if n_stalled >= STALL_GENERATIONS or not n_intervals:
                break
            order = sorted(range(len(population)), key=fitness.__getitem__)
            children = [population[index] for index in order[:2]]
            while len(children) < POPULATION:
                children.append(self._repair(self._make_child(population, fitness)))
            population, fitness = children, [self._compute_fitness(mask) for mask in children]
            n_stalled, best_fitness = (
                (0, min(fitness)) if min(fitness) < best_fitness else (n_stalled + 1, best_fitness)
            )
        best_mask = population[min(range(len(population)), key=fitness.__getitem__)]
        return [
            interval
            for interval, is_evicted in zip(self.intervals, best_mask, strict=True)
            if is_evicted
        ]

    def _make_child(self, population: list[Mask], fitness: list[Fitness]) -> Mask:
        """Cross two parents, selected by tournament, at a random stage; flip a few random bits."""
        first_parent, second_parent = (
            self._select_by_tournament(population, fitness) for _ in range(2)
        )
        cut = self.random.integers(len(self.excess))
        child = np.where(self.first_stages <= cut, first_parent, second_parent)
        flips = self.random.random(len(child)) < MUTATIONS / len(child)
        return np.not_equal(child, flips)

    def _select_by_tournament(self, population: list[Mask], fitness: list[Fitness]) -> Mask:
        """Return the fitter of two random individuals, which may be the same one."""
        first, second = map(int, self.random.integers(len(population), size=2))
        return population[first if fitness[first] <= fitness[second] else second]

    def _compute_fitness(self, mask: Mask) -> Fitness:
        """Return bytes above the storage limit, unhidden cost, and total cost: less is better."""
        is_paged_out = np.zeros(len(self.page_out_costs), dtype=bool)
        is_paged_out[self.tensor_index[mask]] = True
        limit = self.problem.aux_limit_bytes
        excess_bytes = (
            0 if limit is None else max(0, int(self.written_bytes[is_paged_out].sum()) - limit)
        )
        total_cost = float(self.page_in_costs[mask].sum() + self.page_out_costs[is_paged_out].sum())
        if not self.hides_transfers:
            return excess_bytes, total_cost, total_cost
        return (
            excess_bytes,
            max(float(self.unhidden_s[mask].sum()), total_cost - self.pass_s),
            total_cost,
        )

    def _repair(self, mask: Mask) -> Mask:
        """Return a copy of `mask`: evictions added until all stages fit, needless ones removed."""
        mask = mask.copy()
        excess = self.excess - self.freed_bytes[mask].sum(axis=0)
        while excess.max() > 0:
            check_time_limit()
            candidates = np.flatnonzero(self.is_relieved[:, excess.argmax()] & ~mask)
            if not len(candidates):
                break
            index = candidates[self.end_stages[candidates].argmax()]
            mask[index] = True
            excess -= self.freed_bytes[index]
        for index in self.order_by_cost[mask[self.order_by_cost]]:
            check_time_limit()
            stages = slice(self.first_stages[index], self.end_stages[index])
            if (excess + self.freed_bytes[index])[stages].max() <= 0:
                excess[stages] += self.freed_bytes[index][stages]
                mask[index] = False
        return mask
