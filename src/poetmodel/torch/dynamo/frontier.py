"""Plans of one graph for calls that wait beside others: what they save, their peaks, their time."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import ceil, inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from poetmodel.errors import BudgetError
from poetmodel.problem.infeasibility import refusal
from poetmodel.torch.dynamo.planning import GraphProblem, least_ram
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph
    from poetmodel.torch.dynamo.planning import GraphPlan

_PEAKS: Final = (1.0, 1.1, 1.25, 1.5, 2.0)
"""Limits tried for the peak of the plan that saves least, over the least peak."""
_SAVED: Final = (0.8, 0.6, 0.4, 0.25, 0.1)
"""Limits of what is saved, between the least and everything."""
_SOLVES: Final = 12
"""Solves among which the time limit of a call is divided."""


class Frontier:
    """Plans of one graph, from the one that saves least to the one that keeps everything.

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
    def least_saved_bytes(self) -> int:
        """Size of what the backward pass needs and nothing can compute again [B]."""
        return _least_saved_bytes(self.source.graph, self.source.turn)

    @cached_property
    def least_peak_bytes(self) -> int:
        """Lowest peak that was found in a short time, with what is beside the plan [B]."""
        source = self.source
        problem = source.problem(MAX_BYTES)

        def least() -> int | None:
            found = least_ram(problem, source.wanted.gap)
            return None if found.simulation is None else found.simulation.peak_ram_bytes

        bytes_ = source.call.share(source.graph.sha256, least)
        return source.keep_all_bytes if bytes_ is None else bytes_ + source.beside_bytes

    @cached_property
    def keep_all(self) -> GraphPlan:
        """The plan that keeps everything.

        Raises `BudgetError` if no plan was found, as where regions are to keep less than they can.
        """
        whole_bytes = max(self.source.keep_all_bytes, self.source.beside_bytes + 1)
        planned = self._within(whole_bytes, sum(self.source.graph.tensor_bytes))
        if planned is None:
            raise self.source.refusal_of_whole(whole_bytes)
        return planned

    @cached_property
    def tight(self) -> GraphPlan:
        """The plan that saves least, and of those that were tried the one with the lowest peak."""
        for factor in _PEAKS:
            peak_bytes = min(ceil(factor * self.least_peak_bytes), self.source.keep_all_bytes)
            planned = self._within(peak_bytes, self.least_saved_bytes)
            if planned is not None:
                return planned
        return self._within(self.source.keep_all_bytes, self.least_saved_bytes) or self.keep_all

    def has(self, planned: GraphPlan) -> bool:
        """Return whether a plan is one of this graph."""
        return any(planned is known for known in self._known.values())

    def plans(self, budget_bytes: int, until_s: float) -> list[GraphPlan]:
        """Return plans whose passes are within a budget, none better than another in everything.

        Solves take longer than about a second each only until `until_s`.
        """
        self._until_s = until_s
        source = self.source
        whole = self.keep_all.peaks
        least_bytes, most_bytes = self.least_saved_bytes, whole.saved_bytes
        high_bytes = min(budget_bytes, source.keep_all_bytes)
        low_bytes = min(high_bytes, self.tight.record.predicted_peak_bytes)
        middle_bytes = (low_bytes + high_bytes) // 2
        steps = [least_bytes + int(f * (most_bytes - least_bytes)) for f in _SAVED]
        limits = [(high_bytes, most_bytes), *((high_bytes, saved) for saved in steps)]
        limits += [(low_bytes, most_bytes), (middle_bytes, most_bytes), (middle_bytes, steps[2])]
        found = [self.tight, self.keep_all, *(self._within(*limit) for limit in limits)]
        return list(_undominated([p for p in found if p is not None], budget_bytes))

    def refuse(self, budget_bytes: int) -> None:
        """Raise `BudgetError` if no plan of the graph alone was found within a budget."""
        least_bytes = min(
            planned.record.predicted_peak_bytes for planned in (self.tight, self.keep_all)
        )
        least_bytes = min(least_bytes, self.least_peak_bytes)
        if least_bytes > budget_bytes:
            raise BudgetError(
                refusal(self.source.name, budget_bytes, enough_bytes=least_bytes, is_proved=False)
            )

    def _within(self, peak_bytes: int, saved_bytes: int) -> GraphPlan | None:
        limits = (peak_bytes, saved_bytes)
        if limits not in self._known:
            source = self.source
            until_s = min(monotonic() + source.wanted.time_limit / _SOLVES, self._until_s)
            own = replace(source, call=replace(source.call, until_s=until_s))
            self._known[limits] = own.within(*limits)
        return self._known[limits]


def _least_saved_bytes(graph: Graph, turn: int) -> int:
    """Return the size of what the nodes from `turn` on need of those before that cannot repeat."""
    needed = {i for k in range(turn, len(graph.nodes)) for i in graph.inputs_of[k]}
    pending = [i for i in needed if graph.node_of[i] < turn]
    total, reached = 0, set(pending)
    while pending:
        i = pending.pop()
        k = graph.node_of[i]
        if not graph.nodes[k].recomputable:
            total += graph.tensor_bytes[i]
            continue
        new = set(graph.inputs_of[k]) - reached
        reached |= new
        pending += new
    return total


def _undominated(plans: list[GraphPlan], budget_bytes: int) -> Iterator[GraphPlan]:
    """Yield the plans within a budget that no other equals or beats in peaks, saved and time."""
    kept: list[tuple[float, ...]] = []
    for planned in sorted(plans, key=lambda each: (each.time_s, each.peaks.saved_bytes)):
        peaks = planned.peaks
        form = (peaks.forward_bytes, peaks.saved_bytes, peaks.backward_bytes)
        if max(peaks.forward_bytes, peaks.backward_bytes) > budget_bytes:
            continue
        if any(all(a <= b for a, b in zip(other, form, strict=True)) for other in kept):
            continue
        kept.append(form)
        yield planned
