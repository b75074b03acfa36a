"""The objective and the limits on sums, over the decisions of any formulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.model.formulation import AFTER_VARIABLES, Component
from poetmodel.model.linear import literal_slack, reduce_coefficients, scale_and_register_limit
from poetmodel.problem import (
    DEADLINE_ROWS,
    USER_CONSTRAINTS,
    Coefficients,
    LinearRow,
    Problem,
    min_negative_sum,
)

if TYPE_CHECKING:
    from poetmodel.model.arrays import Model
    from poetmodel.model.decisions import Term


MAX_UNITS: Final = 1e6
"""Maximum cost in the objective, in units: beside larger costs, solvers lose small ones."""


def _add_objective(m: Model) -> None:
    """Minimize the excess of decisions over the single pass.

    In units of a thousandth of the baseline, without the constant::

        sum(R * compute) + sum(M_in * page_in) + sum(M_out * page_out)
        + sum((1 - resident) * (page_in + page_out of the replacement))

    with energies, times, bytes written or user-defined coefficients; or the peak RAM variable. If
    coefficients are negative, a constant makes the objective 0 or more: their largest possible
    reward. Very large costs are truncated to a million units, or twice the reference. Bounds remain
    valid, and solutions better than the reference keep their cost.
    """
    m.objective_unit = m.problem.objective.unit
    m.costs, m.offset = objective_terms(m, m.problem)
    m.has_objective = True


def objective_terms(m: Model, problem: Problem) -> tuple[list[Term], float]:
    """Return the objective of a problem in its unit: terms over a model's columns, and a constant.

    The model is of that problem, or of a problem that it is a surrogate of.
    """
    objective = problem.objective
    if not objective.is_sum:
        return ([] if m.peak is None else [(1000.0, m.peak)]), 0.0
    unit, reference = objective.unit, objective.reference
    max_cost = MAX_UNITS if reference is None else 2 * reference / unit
    capped = Coefficients(
        *(
            tuple(max(-max_cost, min(coefficient / unit, max_cost)) for coefficient in column)
            for column in objective.coefficients
        )
    )
    rewards = min_negative_sum(problem.graph, capped)
    return m.decisions.terms(capped), -rewards if rewards else 0.0


OBJECTIVE = Component("objective", _add_objective, "POET (ICML 2022), equation 2", AFTER_VARIABLES)


def _add_deadline_rows(m: Model) -> None:
    """Meet the deadline.

    With page times only if the deadline counts them::

        sum(R * compute_time) + sum(M_in * page_in_time) + sum(M_out * page_out_time) <= deadline

    If transfers overlap computations, there are two rows that every plan satisfies: compute time
    only (in a surrogate, with a fraction of the transfer time), and transfer time only.
    """
    for limit in m.problem.linear_limits:
        if limit.name in DEADLINE_ROWS:
            add_limit(m, limit)


WRITES_ROW: Final = "fewer_writes"
"""Name of the row of bytes written that is temporarily added to a model."""


DEADLINE = Component(
    "deadline",
    _add_deadline_rows,
    "POET (ICML 2022), equation 3; transfers: poetmodel, blocking storage",
    AFTER_VARIABLES,
)


def _add_energy_budget_row(m: Model) -> None:
    """Meet the energy budget.

    ::

        sum(R * compute_energy) + sum(M_in * page_in_energy) + sum(M_out * page_out_energy)
        <=  budget
    """
    for limit in m.problem.linear_limits:
        if limit.name == ENERGY_BUDGET.name:
            add_limit(m, limit)


ENERGY_BUDGET = Component(
    "energy_budget",
    _add_energy_budget_row,
    "poetmodel: the objective of POET as a limit, for other objectives",
    AFTER_VARIABLES,
)


def _add_user_constraint_rows(m: Model) -> None:
    """Meet the user-defined constraints on the totals of a schedule.

    For every constraint ``lower <= sum of totals <= upper``, with the contribution of each
    decision, and without that of a single pass; a constraint has one such row or two::

        sum(R * compute) + sum(M_in * page_in) + sum(M_out * page_out)  <=  upper - pass
        - sum(R * compute) - sum(M_in * page_in) - sum(M_out * page_out)  <=  pass - lower

    If a limit or the objective rewards paging a tensor out, one page-out counts::

        sum(M_out[t,i], t >= node(i)) <= 1
    """
    for limit in m.problem.linear_limits:
        if limit.name == USER_CONSTRAINTS:
            add_limit(m, limit)
    rewards = m.problem.rewards.page_out
    page_outs: dict[int, list[int]] = {}
    for i, column in m.decisions.page_outs:
        if rewards[i]:
            page_outs.setdefault(i, []).append(column)
    for i, columns in page_outs.items():
        if len(columns) > 1:
            m.begin_rows("paged_out_once")
            m.add_row(i, columns, [1.0] * len(columns), upper=1.0)


OWN_CONSTRAINTS = Component(
    USER_CONSTRAINTS,
    _add_user_constraint_rows,
    "poetmodel: a user's own rows, over the decisions that totals count",
    AFTER_VARIABLES,
)

LIMITS_AND_OBJECTIVE: Final = (DEADLINE, ENERGY_BUDGET, OWN_CONSTRAINTS, OBJECTIVE)


def add_limit(m: Model, limit: LinearRow) -> None:
    """Add the row of a limit over totals under its name, unless it cannot bind.

    Adds an infeasible row if even the largest rewards cannot meet the limit.
    """
    reduced = reduce_coefficients(m.decisions.row_over_columns(limit), m.upper)
    if literal_slack(reduced, m.upper) < 0:
        m.begin_rows(limit.name)
        m.add_infeasible_row(limit.key)
        return
    row = scale_and_register_limit(m, reduced)
    if row is not None:
        m.begin_rows(limit.name)
        m.add_linear_row(row)
