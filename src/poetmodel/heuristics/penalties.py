"""What partial schedules are measured by: the minimized quantity, and the excess over limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.problem import Coefficients, Problem, weighted

if TYPE_CHECKING:
    from poetmodel.heuristics.partial_schedule import PartialSchedule

_TIE: Final = 1e-4
"""Weight of energy beside another objective, so that it decides between equals."""
_TINY: Final = 1e-9
"""Slack, as a fraction of the whole, that stands for none in a division."""


def price(coefficients: Coefficients, partial: PartialSchedule) -> float:
    """Return what a partial schedule pays."""
    nodes = sum(coefficients.compute[k] for again in partial.recomputed for k in again)
    return nodes + sum(
        count * coefficients.page_in[i] + coefficients.page_out[i]
        for i, count in enumerate(partial.page_ins)
        if count
    )


class Score(NamedTuple):
    """How good a partial schedule is; a lesser one is better."""

    excess: float
    """By how much limits are exceeded, as fractions of what they leave, summed: 0 where all are
    kept."""
    value: float
    """The minimized quantity beyond what every schedule pays, in its own unit."""


WORST: Final = Score(float("inf"), float("inf"))
"""That of no partial schedule."""


class PenalizedObjective:
    """What a problem asks of a partial schedule that fits into RAM."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        objective, energy = problem.objective, problem.energy
        self.objective = _free_originals(problem, objective.coefficients)
        """The minimized quantity; for RAM nothing."""
        greedy = [(self.objective, 1 / (objective.baseline or objective.whole or 1.0))]
        if objective != energy:
            tie = _free_originals(problem, energy.coefficients)
            greedy.append((tie, _TIE / (energy.baseline or 1.0)))
        self.limits: list[tuple[Coefficients, float]] = []
        """Limited quantities beyond what every schedule pays, and how much of each there may be."""
        penalty = [(self.objective, 0.0)]
        for limit in problem.linear_limits:
            prices = _free_originals(problem, limit.coefficients)
            self.limits.append((prices, limit.slack))
            penalty.append((prices, 1 / max(limit.slack, _TINY * limit.baseline, _TINY)))
        self._greedy, self._penalty = weighted(*greedy), weighted(*penalty)

    def prices(self, penalty: float) -> Coefficients:
        """Return what to be greedy about: the objective, and as much of the limits as is asked.

        `penalty` is how much the use of all that the limits leave counts, beside the whole of the
        objective (the baseline, for energy); infinite to leave the objective out.
        """
        if not self.limits or penalty == 0:
            return self._greedy
        if penalty == float("inf"):
            return weighted((self._penalty, 1.0), (self._greedy, _TIE))
        return weighted((self._greedy, 1.0), (self._penalty, penalty))

    def balance(self, partial: PartialSchedule) -> float:
        """Return the penalty at which limits weigh as much as the objective."""
        used = price(self._penalty, partial)
        return price(self._greedy, partial) / used if used > 0 else 1.0

    def score(self, partial: PartialSchedule) -> Score:
        """Return how good a partial schedule is."""
        excess = 0.0
        for prices, slack in self.limits:
            used = price(prices, partial)
            if used > slack:
                excess += (used - slack) / slack if slack > 0 else 1.0 + used
        if not self.problem.objective.is_sum:
            return Score(excess, float(partial.peaks().max()))
        return Score(excess, price(self.objective, partial))


def _free_originals(problem: Problem, coefficients: Coefficients) -> Coefficients:
    """Return coefficients without page-outs of tensors that lie on storage from the start."""
    nodes, graph = problem.graph.nodes, problem.graph
    page_out = tuple(
        0.0 if nodes[k].on_aux else one
        for k, one in zip(graph.node_of, coefficients.page_out, strict=True)
    )
    return coefficients._replace(page_out=page_out)
