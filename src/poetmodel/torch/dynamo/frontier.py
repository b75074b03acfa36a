"""Plans of one graph for calls that wait together for their backward passes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import ceil, inf
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.torch.planning.task import LeastRam, find_min_ram
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph
    from poetmodel.solver import SolveResult
    from poetmodel.torch.dynamo.planning import GraphPlan, GraphProblem

_PEAK_FACTORS: Final = (1.0, 1.1, 1.25, 1.5, 2.0)
"""Limits on the peak that are tried for the plan with the fewest saved bytes, relative to the
smallest peak."""
_SAVED_FRACTIONS: Final = (0.8, 0.6, 0.4, 0.25, 0.1)
"""Limits on the saved bytes that are tried, as fractions of the range from the minimum to
keep-all."""
_N_SOLVES: Final = 12
"""Number of solves by which the time limit of a call is divided."""


class KnownPlan(NamedTuple):
    """A plan of a graph, as another process can make it again."""

    limits: tuple[int, int]
    """Limits of the peak and of the saved bytes by which it was found [B]."""
    result: SolveResult


class Frontier:
    """Plans of a graph, from the fewest saved bytes to keep-all; solved on demand."""

    def __init__(self, graph_problem: GraphProblem) -> None:
        self.graph_problem = graph_problem
        self._until_s = inf
        """Time at which the current search for plans ends, on the monotonic clock [s]."""
        self._plan_by_limits: dict[tuple[int, int], GraphPlan | None] = {}
        """Result of `GraphProblem.plan_within`, by its limits."""
        self._adopted_plans: dict[tuple[int, int], GraphPlan] = {}
        """Plans by results of another process, by their limits."""
        self._lock = Lock()
        """Held while a plan is found, so that all threads get the same."""

    @cached_property
    def min_saved_bytes(self) -> int:
        """Bytes saved for the backward pass if all recomputable tensors are recomputed [B]."""
        return _min_saved_bytes(self.graph_problem.graph, self.graph_problem.n_forward_operations)

    @cached_property
    def min_peak_bytes(self) -> int:
        """Smallest peak that `find_min_ram` found, or else the keep-all peak [B]."""
        graph_problem = self.graph_problem
        problem = graph_problem.make_problem(MAX_BYTES)

        simulation = find_min_ram(problem, graph_problem.settings.gap).simulation
        return (
            graph_problem.keep_all_bytes
            if simulation is None
            else simulation.peak_ram_bytes + graph_problem.extra_bytes
        )

    @cached_property
    def keep_all_plan(self) -> GraphPlan:
        """The plan within the keep-all peak; without regions it keeps every tensor."""
        peak_bytes = max(self.graph_problem.keep_all_bytes, self.graph_problem.extra_bytes + 1)
        graph_plan = self._plan_within(peak_bytes, sum(self.graph_problem.graph.tensor_bytes))
        if graph_plan is None:
            raise self.graph_problem.make_keep_all_error(peak_bytes)
        return graph_plan

    @cached_property
    def tight_plan(self) -> GraphPlan:
        """The plan with `min_saved_bytes` at the smallest tried peak, or else `keep_all_plan`."""
        for factor in _PEAK_FACTORS:
            peak_bytes = min(ceil(factor * self.min_peak_bytes), self.graph_problem.keep_all_bytes)
            graph_plan = self._plan_within(peak_bytes, self.min_saved_bytes)
            if graph_plan is not None:
                return graph_plan
        return (
            self._plan_within(self.graph_problem.keep_all_bytes, self.min_saved_bytes)
            or self.keep_all_plan
        )

    def agree(self) -> None:
        """Find the tight plan, and that which keeps all, in the first process for all."""

        def find() -> tuple[int, list[KnownPlan]]:
            plans = (self.tight_plan, self.keep_all_plan)
            return self.min_peak_bytes, [self.describe(graph_plan) for graph_plan in plans]

        graph_problem = self.graph_problem
        min_peak_bytes, known_plans = graph_problem.call.ranks.share(
            graph_problem.graph.sha256, find
        )
        self.min_peak_bytes = min_peak_bytes
        self.tight_plan, self.keep_all_plan = map(self.adopt, known_plans)

    def describe(self, graph_plan: GraphPlan) -> KnownPlan:
        """Return what `adopt` of another process needs for a plan of this frontier."""
        limits = next(limits for limits, plan in self._plan_by_limits.items() if plan is graph_plan)
        return KnownPlan(limits, graph_plan.result)

    def adopt(self, known_plan: KnownPlan) -> GraphPlan:
        """Return the plan that another process has found, as one of this frontier."""
        limits, result = known_plan
        own_plan = self._plan_by_limits.get(limits)
        if own_plan is not None and own_plan.result is result:
            return own_plan
        if limits not in self._adopted_plans:
            graph_plan = self.graph_problem.plan_within(*limits, result)
            if graph_plan is None:
                raise AssertionError("a plan of another process is within the limits of its search")
            self._adopted_plans[limits] = graph_plan
        return self._adopted_plans[limits]

    def contains(self, graph_plan: GraphPlan) -> bool:
        """Return whether a plan is among those that this frontier has found, by identity."""
        known_plans = (*self._plan_by_limits.values(), *self._adopted_plans.values())
        return any(graph_plan is plan for plan in known_plans)

    def find_plans(self, budget_bytes: int, until_s: float) -> list[GraphPlan]:
        """Return the plans within a budget that no faster one dominates, fastest first.

        A faster plan dominates if its peaks and saved bytes are not larger. Solves for nine pairs
        of limits until `until_s` [s, monotonic clock], each for at least `MIN_SOLVE_S`.
        """
        self._until_s = until_s
        try:
            return list(_nondominated_plans(self._find_candidates(budget_bytes), budget_bytes))
        finally:
            self._until_s = inf

    def _find_candidates(self, budget_bytes: int) -> list[GraphPlan]:
        """Return the plans that `find_plans` compares, with repetitions; some exceed the budget."""
        graph_problem = self.graph_problem
        keep_all_peaks = self.keep_all_plan.peaks
        low_saved_bytes, high_saved_bytes = self.min_saved_bytes, keep_all_peaks.saved_bytes
        high_peak_bytes = min(budget_bytes, graph_problem.keep_all_bytes)
        low_peak_bytes = min(high_peak_bytes, self.tight_plan.record.predicted_peak_bytes)
        middle_peak_bytes = (low_peak_bytes + high_peak_bytes) // 2
        saved_limits_bytes = [
            low_saved_bytes + int(fraction * (high_saved_bytes - low_saved_bytes))
            for fraction in _SAVED_FRACTIONS
        ]
        limits = [
            (high_peak_bytes, high_saved_bytes),
            *((high_peak_bytes, limit) for limit in saved_limits_bytes),
        ]
        limits += [
            (low_peak_bytes, high_saved_bytes),
            (middle_peak_bytes, high_saved_bytes),
            (middle_peak_bytes, saved_limits_bytes[2]),
        ]
        candidates = [
            self.tight_plan,
            self.keep_all_plan,
            *(self._plan_within(*pair) for pair in limits),
        ]
        return [graph_plan for graph_plan in candidates if graph_plan is not None]

    def check_budget(self, budget_bytes: int) -> None:
        """Raise `BudgetError` if all known peaks exceed a budget."""
        min_bytes = min(
            graph_plan.record.predicted_peak_bytes
            for graph_plan in (self.tight_plan, self.keep_all_plan)
        )
        min_bytes = min(min_bytes, self.min_peak_bytes)
        if min_bytes > budget_bytes:
            raise self.graph_problem.make_error(budget_bytes, LeastRam(min_bytes))

    def _plan_within(self, peak_bytes: int, saved_bytes: int) -> GraphPlan | None:
        """Return `GraphProblem.plan_within` for two limits; the result, also None, is cached."""
        limits = (peak_bytes, saved_bytes)
        with self._lock:
            if limits not in self._plan_by_limits:
                graph_problem = self.graph_problem
                until_s = min(
                    monotonic() + graph_problem.settings.time_limit_s / _N_SOLVES, self._until_s
                )
                limited_problem = replace(
                    graph_problem, call=replace(graph_problem.call, until_s=until_s)
                )
                self._plan_by_limits[limits] = limited_problem.plan_within(*limits)
            return self._plan_by_limits[limits]


def _min_saved_bytes(graph: Graph, first_backward_node: int) -> int:
    """Return the bytes saved for the backward pass with everything recomputable recomputed [B]."""
    needed_tensors = {
        i for k in range(first_backward_node, len(graph.nodes)) for i in graph.inputs_of[k]
    }
    pending = [i for i in needed_tensors if graph.node_of[i] < first_backward_node]
    saved_bytes, visited = 0, set(pending)
    while pending:
        i = pending.pop()
        k = graph.node_of[i]
        if not graph.nodes[k].recomputable:
            saved_bytes += graph.tensor_bytes[i]
            continue
        new_inputs = set(graph.inputs_of[k]) - visited
        visited |= new_inputs
        pending += new_inputs
    return saved_bytes


def _nondominated_plans(plans: list[GraphPlan], budget_bytes: int) -> Iterator[GraphPlan]:
    """Yield plans in a budget, fastest first; each faster one has a larger peak, or saves more."""

    def sort_key(graph_plan: GraphPlan) -> tuple[float, ...]:
        """Return a key by which no plan is before one that dominates it."""
        peaks = graph_plan.peaks
        sizes = (peaks.saved_bytes, peaks.forward_bytes, peaks.backward_bytes)
        return (graph_plan.time_s, *sizes)

    yielded_sizes: list[tuple[float, ...]] = []
    for graph_plan in sorted(plans, key=sort_key):
        peaks = graph_plan.peaks
        sizes = (peaks.forward_bytes, peaks.saved_bytes, peaks.backward_bytes)
        if max(peaks.forward_bytes, peaks.backward_bytes) > budget_bytes:
            continue
        if any(
            all(faster_size <= size for faster_size, size in zip(faster_sizes, sizes, strict=True))
            for faster_sizes in yielded_sizes
        ):
            continue
        yielded_sizes.append(sizes)
        yield graph_plan
