"""Prices of decisions, and scores of partial schedules: minimized quantity, excess over limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.user_rows import UserRows
from poetmodel.problem import USER_CONSTRAINTS, Coefficients, Problem, weighted_sum

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.heuristics.restorations import Restoration

TIE_WEIGHT: Final = 1e-4
"""Weight of energy added to another objective, and of the objective added to an infinite penalty.
Both break ties."""
MIN_SLACK_RATIO: Final = 1e-9
"""Fraction of a limit's baseline that replaces a smaller slack as divisor; also the smallest
divisor."""


def total_price(coefficients: Coefficients, partial: PartialSchedule) -> float:
    """Return the sum of coefficients of decisions beyond keep-all, implied page-outs included."""
    recompute_price = sum(
        coefficients.compute[k] for recomputed in partial.recomputed for k in recomputed
    )
    total = recompute_price + sum(
        count * coefficients.page_in[i]
        + (0.0 if partial.starts_on_storage[i] else coefficients.page_out[i])
        for i, count in enumerate(partial.page_ins)
        if count
    )
    total += sum(
        coefficients.storage_home[i]
        for i in partial.graph.state_tensors
        if i not in partial.resident
    )
    page_outs_only = (
        i for i in partial.paged_out if partial.starts_on_storage[i] or not partial.page_ins[i]
    )
    return total + sum(coefficients.page_out[i] for i in page_outs_only)


class Score(NamedTuple):
    """Score of a partial schedule; lower is better."""

    excess: float
    """Sum of the excesses over `Problem.linear_limits`, relative to slacks or units of rows; 0 if
    all of them are met. An exceeded limit without slack adds 1 plus its use."""
    value: float
    """The minimized quantity, by `Objective.coefficients`, minus `Objective.baseline` and
    `PenalizedObjective.rewards`, in the unit of the quantity; the peak if RAM is minimized [B]."""


WORST: Final = Score(float("inf"), float("inf"))
"""Score that is worse than that of every partial schedule."""


class PenalizedObjective:
    """The objective and limits of a problem: prices of decisions, scores of partial schedules."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        objective, energy = problem.objective, problem.energy
        self.objective = objective.coefficients
        """Coefficients of the minimized quantity; zeros for RAM."""
        self.rows = UserRows.from_problem(problem)
        """Rows of user-defined constraints on totals, and the rewarded decisions; None without such
        constraints if the objective rewards no decision."""
        self.rewards = 0.0 if objective.user_sum is None else objective.user_sum.rewards
        """Lower bound on the sum of the objective's negative terms, 0 or less."""
        objective_terms = [
            (self.objective, 1 / (abs(objective.baseline) or objective.scale or 1.0))
        ]
        if objective != energy:
            energy_coefficients = energy.coefficients
            objective_terms.append((energy_coefficients, TIE_WEIGHT / (energy.baseline or 1.0)))
        self.limits: list[tuple[Coefficients, float]] = []
        """Limits as coefficients and slack above the baseline, without user-defined constraints,
        which are in `rows`."""
        penalty_terms = [(self.objective, 0.0)]
        for limit in problem.linear_limits:
            prices, upper = limit.coefficients, limit.upper
            if limit.name != USER_CONSTRAINTS:
                self.limits.append((prices, upper))
                penalty_terms.append(
                    (prices, 1 / max(upper, MIN_SLACK_RATIO * limit.baseline, MIN_SLACK_RATIO))
                )
        if self.rows is not None:
            rows = self.rows
            for limit, unit, is_single in zip(
                rows.limits, rows.units, rows.counts_one_decision, strict=True
            ):
                if not is_single:  # a single decision is either possible or not, without a price
                    nonnegative_columns = (
                        tuple(max(0.0, price) for price in column) for column in limit.coefficients
                    )
                    penalty_terms.append((Coefficients(*nonnegative_columns), 1 / unit))
        self.is_limited = len(penalty_terms) > 1
        """Whether the problem has limits whose use has a price."""
        self._objective_prices, self._penalty_prices = (
            weighted_sum(*objective_terms),
            weighted_sum(*penalty_terms),
        )

    def prices(self, penalty: float) -> Coefficients:
        """Return the prices of decisions: the objective plus the use of limits times `penalty`.

        They are relative to the baseline, or `Objective.scale` if that is 0. With penalty 1, all
        slack of a limit costs as much as the baseline; with infinity, the objective only breaks
        ties.
        """
        if not self.is_limited or penalty == 0:
            return self._objective_prices
        if penalty == float("inf"):
            return weighted_sum((self._penalty_prices, 1.0), (self._objective_prices, TIE_WEIGHT))
        return weighted_sum((self._objective_prices, 1.0), (self._penalty_prices, penalty))

    def balance(self, partial: PartialSchedule) -> float:
        """Return the penalty at which the use of limits costs as much as the objective; 1 if 0."""
        limit_price = total_price(self._penalty_prices, partial)
        return (
            total_price(self._objective_prices, partial) / limit_price if limit_price > 0 else 1.0
        )

    def score(self, partial: PartialSchedule) -> Score:
        """Return the score of a partial schedule.

        Its excess is the sum of relative excesses over deadline, energy budget and constraints; its
        value excludes that of keep-all, or is the peak [B].
        """
        excess = 0.0
        for prices, slack in self.limits:
            limit_use = total_price(prices, partial)
            if limit_use > slack:
                excess += (limit_use - slack) / slack if slack > 0 else 1.0 + limit_use
        if self.rows is not None:
            excess += self.rows.total_excess(partial.row_use, partial.exceeded_rows)
        if not self.problem.objective.is_sum:
            return Score(excess, float(partial.peaks().max()))
        return Score(excess, total_price(self.objective, partial) - self.rewards)

    def make_partial(self, restorations: Iterable[Restoration] = ()) -> PartialSchedule:
        """Return the partial schedule of `restorations`, with its use of user-defined rows."""
        problem = self.problem
        return PartialSchedule(
            problem.graph, restorations, working_graph=problem.working_graph, rows=self.rows
        )
