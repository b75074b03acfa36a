"""What partial schedules are measured by: the minimized quantity, and the excess over limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.problem import Quantity, deadline_slack_s, energy_slack_j

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.heuristics.partial_schedule import PartialSchedule
    from poetmodel.problem import Problem, TimeSum

_TIE: Final = 1e-4
"""Weight of energy beside another objective, so that it decides between equals."""
_TINY: Final = 1e-9
"""Slack, as a fraction of the whole, that stands for none in a division."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A price for each decision."""

    compute: Sequence[float]
    """For each node, one more computation."""
    page_in: Sequence[float]
    """For each tensor, one page-in."""
    page_out: Sequence[float]
    """For each tensor, its page-out; 0 where it lies on storage from the start."""

    def plus(self, other: Prices, weight: float) -> Prices:
        """Return these prices and others at a weight, added up."""

        def added(one: Sequence[float], two: Sequence[float]) -> tuple[float, ...]:
            return tuple(a + weight * b for a, b in zip(one, two, strict=True))

        return Prices(
            compute=added(self.compute, other.compute),
            page_in=added(self.page_in, other.page_in),
            page_out=added(self.page_out, other.page_out),
        )

    def total(self, partial: PartialSchedule) -> float:
        """Return the price of a partial schedule."""
        nodes = sum(self.compute[k] for again in partial.recomputed for k in again)
        return nodes + sum(
            count * self.page_in[i] + self.page_out[i]
            for i, count in enumerate(partial.page_ins)
            if count
        )


def no_prices(problem: Problem) -> Prices:
    """Return prices of nothing."""
    nothing = (0.0,) * len(problem.graph.tensors)
    return Prices(compute=(0.0,) * len(problem.graph.nodes), page_in=nothing, page_out=nothing)


def energies(problem: Problem) -> Prices:
    """Return energies as prices [J]."""
    tensors = range(len(problem.graph.tensors))
    return _prices(
        problem,
        [problem.compute_charge_j(k) for k in range(len(problem.graph.nodes))],
        [problem.page_in_charge_j(i) for i in tensors] if problem.can_page else [],
        [problem.page_out_charge_j(i) for i in tensors] if problem.can_page else [],
    )


def times(problem: Problem, counted: TimeSum) -> Prices:
    """Return times as prices, as a sum of times counts them [s]."""
    table = problem.table
    return _prices(
        problem,
        [counted.compute * time_s for time_s in table.compute_time_s],
        [counted.transfer * time_s for time_s in table.page_in_time_s],
        [counted.transfer * time_s for time_s in table.page_out_time_s],
    )


def writes(problem: Problem) -> Prices:
    """Return bytes written as prices [B]."""
    sizes = [float(size) for size in problem.graph.tensor_bytes]
    return _prices(problem, [0.0] * len(problem.graph.nodes), [0.0] * len(sizes), sizes)


def _prices(
    problem: Problem, compute: list[float], page_in: list[float], page_out: list[float]
) -> Prices:
    graph = problem.graph
    if not problem.can_page:
        page_in = page_out = [0.0] * len(graph.tensors)
    return Prices(
        compute=tuple(compute),
        page_in=tuple(page_in),
        page_out=tuple(
            0.0 if graph.nodes[k].on_aux else price
            for k, price in zip(graph.node_of, page_out, strict=True)
        ),
    )


class PenalizedObjective:
    """What a problem asks of a partial schedule that fits into RAM.

    Attributes
    ----------
    objective : Prices
        The minimized quantity; for RAM nothing.
    limits : tuple of (Prices, float)
        Limited quantities beyond what every schedule pays, and how much of each there may be.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        energy = energies(problem)
        self.objective, whole = {
            Quantity.ENERGY: (energy, problem.baseline_energy_j),
            Quantity.TIME: (times(problem, problem.time_sum), problem.pass_time_s),
            Quantity.WRITES: (writes(problem), float(sum(problem.graph.tensor_bytes))),
            Quantity.RAM: (no_prices(problem), 1.0),
        }[Quantity(problem.minimize)]
        self._greedy = no_prices(problem).plus(self.objective, 1 / (whole or 1.0))
        if problem.minimize != Quantity.ENERGY:
            self._greedy = self._greedy.plus(energy, _TIE / (problem.baseline_energy_j or 1.0))
        limits: list[tuple[Prices, float, float]] = []
        for counted in problem.deadline_sums if problem.deadline_s is not None else ():
            slack_s = deadline_slack_s(problem, counted)
            limits.append((times(problem, counted), slack_s or 0.0, problem.pass_time_s))
        slack_j = energy_slack_j(problem)
        if slack_j is not None:
            limits.append((energy, slack_j, problem.baseline_energy_j))
        self.limits = tuple((prices, slack) for prices, slack, _ in limits)
        self._penalty = no_prices(problem)
        for prices, slack, whole in limits:
            self._penalty = self._penalty.plus(prices, 1 / max(slack, _TINY * whole, _TINY))

    def prices(self, penalty: float) -> Prices:
        """Return what to be greedy about: the objective, and as much of the limits as is asked.

        Parameters
        ----------
        penalty : float
            How much the use of all that the limits leave counts, beside the whole of the objective
            (the baseline, for energy); infinite to leave the objective out.
        """
        if not self.limits or penalty == 0:
            return self._greedy
        if penalty == float("inf"):
            return self._penalty.plus(self._greedy, _TIE)
        return self._greedy.plus(self._penalty, penalty)

    def balance(self, partial: PartialSchedule) -> float:
        """Return the penalty at which limits weigh as much as the objective."""
        used = self._penalty.total(partial)
        return self._greedy.total(partial) / used if used > 0 else 1.0

    def excess(self, partial: PartialSchedule) -> float:
        """Return by how much limits are exceeded, as fractions of what they leave, summed.

        0 exactly where the partial schedule keeps them all.
        """
        total = 0.0
        for prices, slack in self.limits:
            used = prices.total(partial)
            if used > slack:
                total += (used - slack) / slack if slack > 0 else 1.0 + used
        return total

    def value(self, partial: PartialSchedule) -> float:
        """Return the minimized quantity beyond what every schedule pays, in its own unit."""
        if self.problem.minimize == Quantity.RAM:
            return float(partial.peak_bytes())
        return self.objective.total(partial)
