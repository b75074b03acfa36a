"""Plans of one graph for calls that wait together, by saved bytes, peaks and time."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import ceil, inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from poetmodel.errors import BudgetError
from poetmodel.problem.infeasibility import insufficient_ram_message
from poetmodel.torch.dynamo.planning import GraphProblem, find_min_ram
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph
    from poetmodel.torch.dynamo.planning import GraphPlan

_PEAKS: Final = (1.0, 1.1, 1.25, 1.5, 2.0)
"""Limits tried for the peak of the plan that saves the fewest bytes, over the smallest peak."""
_SAVED: Final = (0.8, 0.6, 0.4, 0.25, 0.1)
"""Limits tried for the saved bytes, as fractions from the minimum to everything."""
_SOLVES: Final = 12
"""Number of solves among which the time limit of a call is divided."""


class Frontier:
    """Plans of one graph, from the one that saves the fewest bytes to the one that keeps all.

    Parameters
    ----------
    source : GraphProblem
        The graph with its sizes and costs.
    """

    def __init__(self, source: GraphProblem) -> None:
        self.source = source
        self._until_s = inf
        self._known: dict[tuple[int, int], GraphPlan | None] = {}

    @cached_property
    def min_saved_bytes(self) -> int:
        """Bytes that the backward pass needs and that cannot be recomputed [B]."""
        return _min_saved_bytes(self.source.graph, self.source.turn)

    @cached_property
    def min_peak_bytes(self) -> int:
        """Smallest peak found in a short time, including memory beside the plan [B]."""
        source = self.source
        problem = source.problem(MAX_BYTES)

        def find_peak_bytes() -> int | None:
            min_ram_result = find_min_ram(problem, source.settings.gap)
            return (
                None
                if min_ram_result.simulation is None
                else min_ram_result.simulation.peak_ram_bytes
            )

        peak_bytes = source.call.share(source.graph.sha256, find_peak_bytes)
        return source.keep_all_bytes if peak_bytes is None else peak_bytes + source.beside_bytes

    @cached_property
    def keep_all(self) -> GraphPlan:
        """The plan that keeps everything.

        Raises `BudgetError` if no plan was found, for example if budgets of regions are too small.
        """
        peak_bytes = max(self.source.keep_all_bytes, self.source.beside_bytes + 1)
        planned = self._plan_within(peak_bytes, sum(self.source.graph.tensor_bytes))
        if planned is None:
            raise self.source.keep_all_refusal(peak_bytes)
        return planned

    @cached_property
    def tight(self) -> GraphPlan:
        """The plan with the fewest saved bytes, at the smallest peak that was tried."""
        for factor in _PEAKS:
            peak_bytes = min(ceil(factor * self.min_peak_bytes), self.source.keep_all_bytes)
            planned = self._plan_within(peak_bytes, self.min_saved_bytes)
            if planned is not None:
                return planned
        return self._plan_within(self.source.keep_all_bytes, self.min_saved_bytes) or self.keep_all

    def has(self, planned: GraphPlan) -> bool:
        """Return whether a plan is one of this frontier, by identity."""
        return any(planned is plan for plan in self._known.values())

    def plans(self, budget_bytes: int, until_s: float) -> list[GraphPlan]:
        """Return the plans within a budget that are not dominated in peaks, saved bytes and time.

        After `until_s`, on the monotonic clock, solves take at most about a second each.
        """
        self._until_s = until_s
        source = self.source
        keep_all_peaks = self.keep_all.peaks
        min_bytes, max_bytes = self.min_saved_bytes, keep_all_peaks.saved_bytes
        high_bytes = min(budget_bytes, source.keep_all_bytes)
        low_bytes = min(high_bytes, self.tight.record.predicted_peak_bytes)
        middle_bytes = (low_bytes + high_bytes) // 2
        steps = [min_bytes + int(fraction * (max_bytes - min_bytes)) for fraction in _SAVED]
        limits = [(high_bytes, max_bytes), *((high_bytes, saved) for saved in steps)]
        limits += [(low_bytes, max_bytes), (middle_bytes, max_bytes), (middle_bytes, steps[2])]
        candidates = [self.tight, self.keep_all, *(self._plan_within(*limit) for limit in limits)]
        return list(
            _nondominated_plans(
                [planned for planned in candidates if planned is not None], budget_bytes
            )
        )

    def check_budget(self, budget_bytes: int) -> None:
        """Raise `BudgetError` if no plan of the graph alone was found within a budget."""
        min_bytes = min(
            planned.record.predicted_peak_bytes for planned in (self.tight, self.keep_all)
        )
        min_bytes = min(min_bytes, self.min_peak_bytes)
        if min_bytes > budget_bytes:
            raise BudgetError(
                insufficient_ram_message(
                    self.source.name, budget_bytes, enough_bytes=min_bytes, is_proved=False
                )
            )

    def _plan_within(self, peak_bytes: int, saved_bytes: int) -> GraphPlan | None:
        """Return `GraphProblem.plan_within` for two limits, cached."""
        limits = (peak_bytes, saved_bytes)
        if limits not in self._known:
            source = self.source
            until_s = min(monotonic() + source.settings.time_limit / _SOLVES, self._until_s)
            limited_source = replace(source, call=replace(source.call, until_s=until_s))
            self._known[limits] = limited_source.plan_within(*limits)
        return self._known[limits]


def _min_saved_bytes(graph: Graph, turn: int) -> int:
    """Return the bytes of tensors that must be saved at node `turn`, the first backward one.

    These are the tensors of earlier nodes that cannot be recomputed, and that later nodes, or
    recomputations for later nodes, read.
    """
    needed_tensors = {i for k in range(turn, len(graph.nodes)) for i in graph.inputs_of[k]}
    pending = [i for i in needed_tensors if graph.node_of[i] < turn]
    total, visited = 0, set(pending)
    while pending:
        i = pending.pop()
        k = graph.node_of[i]
        if not graph.nodes[k].recomputable:
            total += graph.tensor_bytes[i]
            continue
        new_inputs = set(graph.inputs_of[k]) - visited
        visited |= new_inputs
        pending += new_inputs
    return total


def _nondominated_plans(plans: list[GraphPlan], budget_bytes: int) -> Iterator[GraphPlan]:
    """Yield plans within a budget except dominated ones.

    A plan is dominated if another has no larger peaks, saved bytes and time.
    """
    yielded_sizes: list[tuple[float, ...]] = []
    for planned in sorted(plans, key=lambda plan: (plan.time_s, plan.peaks.saved_bytes)):
        peaks = planned.peaks
        sizes = (peaks.forward_bytes, peaks.saved_bytes, peaks.backward_bytes)
        if max(peaks.forward_bytes, peaks.backward_bytes) > budget_bytes:
            continue
        if any(
            all(a <= b for a, b in zip(other_sizes, sizes, strict=True))
            for other_sizes in yielded_sizes
        ):
            continue
        yielded_sizes.append(sizes)
        yield planned
