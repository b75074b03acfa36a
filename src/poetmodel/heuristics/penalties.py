"""Scores of partial schedules: the minimized quantity, and the excess over limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.heuristics.own_rows import OwnRows
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.problem import USER_CONSTRAINTS, Coefficients, Problem, weighted_sum

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.heuristics.restorations import Restoration

_TIE: Final = 1e-4
"""Weight of energy beside another objective, so that it decides between equals."""
_TINY: Final = 1e-9
"""Slack, as a fraction of the whole, that stands for none in a division."""


def price(coefficients: Coefficients, partial: PartialSchedule) -> float:
    """Return the price of a partial schedule."""
    nodes = sum(coefficients.compute[k] for again in partial.recomputed for k in again)
    total = nodes + sum(
        count * coefficients.page_in[i] + (0.0 if partial.stored[i] else coefficients.page_out[i])
        for i, count in enumerate(partial.page_ins)
        if count
    )
    total += sum(
        coefficients.storage_home[i]
        for i in partial.graph.state_tensors
        if i not in partial.resident
    )
    alone = (i for i in partial.paged_out if partial.stored[i] or not partial.page_ins[i])
    return total + sum(coefficients.page_out[i] for i in alone)


class Score(NamedTuple):
    """Score of a partial schedule; lower is better."""

    excess: float
    """By how much limits are exceeded, as fractions of what they leave, summed: 0 where all are
    kept."""
    value: float
    """The minimized quantity beyond what every schedule pays, in its own unit."""


WORST: Final = Score(float("inf"), float("inf"))
"""That of no partial schedule."""


class PenalizedObjective:
    """Limits and objective of a problem for a partial schedule that fits into RAM."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        objective, energy = problem.objective, problem.energy
        self.objective = objective.coefficients
        """The minimized quantity; for RAM nothing."""
        self.rows = OwnRows.of(problem)
        """Own constraints, and what the objective wants; None without."""
        self.rewards = 0.0 if objective.user_sum is None else objective.user_sum.rewards
        """Least possible sum of the objective's negative terms, 0 or less."""
        greedy = [(self.objective, 1 / (abs(objective.baseline) or objective.scale or 1.0))]
        if objective != energy:
            tie = energy.coefficients
            greedy.append((tie, _TIE / (energy.baseline or 1.0)))
        self.limits: list[tuple[Coefficients, float]] = []
        """Limited quantities beyond what every schedule pays, and how much of each there may be;
        those of own constraints are in `rows`."""
        penalty = [(self.objective, 0.0)]
        for limit in problem.linear_limits:
            prices, upper = limit.coefficients, limit.upper
            if limit.name != USER_CONSTRAINTS:
                self.limits.append((prices, upper))
                penalty.append((prices, 1 / max(upper, _TINY * limit.baseline, _TINY)))
        if self.rows is not None:
            rows = self.rows
            for limit, unit, single in zip(rows.limits, rows.units, rows.is_single, strict=True):
                if not single:  # a single decision is a question of room alone
                    added = (tuple(max(0.0, c) for c in column) for column in limit.coefficients)
                    penalty.append((Coefficients(*added), 1 / unit))
        self.is_limited = len(penalty) > 1
        """Whether the use of limits can be priced."""
        self._greedy, self._penalty = weighted_sum(*greedy), weighted_sum(*penalty)

    def prices(self, penalty: float) -> Coefficients:
        """Return the score to be greedy about: the objective, and a chosen share of the limits.

        `penalty` is how much the use of all that the limits leave counts, beside the whole of the
        objective (the baseline, for energy); infinite to leave the objective out.
        """
        if not self.is_limited or penalty == 0:
            return self._greedy
        if penalty == float("inf"):
            return weighted_sum((self._penalty, 1.0), (self._greedy, _TIE))
        return weighted_sum((self._greedy, 1.0), (self._penalty, penalty))

    def balance(self, partial: PartialSchedule) -> float:
        """Return the penalty at which limits weigh as much as the objective."""
        used = price(self._penalty, partial)
        return price(self._greedy, partial) / used if used > 0 else 1.0

    def score(self, partial: PartialSchedule) -> Score:
        """Return the score of a partial schedule."""
        excess = 0.0
        for prices, slack in self.limits:
            used = price(prices, partial)
            if used > slack:
                excess += (used - slack) / slack if slack > 0 else 1.0 + used
        if self.rows is not None:
            excess += self.rows.excess(partial.used, partial.exceeded)
        if not self.problem.objective.is_sum:
            return Score(excess, float(partial.peaks().max()))
        return Score(excess, price(self.objective, partial) - self.rewards)

    def partial(self, restorations: Iterable[Restoration] = ()) -> PartialSchedule:
        """Return a partial schedule that counts what it uses of own constraints."""
        problem = self.problem
        return PartialSchedule(
            problem.graph, restorations, working=problem.working_graph, rows=self.rows
        )
