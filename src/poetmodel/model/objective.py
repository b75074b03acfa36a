"""Energy, time and writes over the decisions of any formulation: the objective and the limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.model.formulation import AFTER_VARIABLES, Component
from poetmodel.model.linear import as_needed, room, stated_limit
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


MOST_UNITS: Final = 1e6
"""Largest cost in the objective, in units: solvers lose the small ones beside larger ones."""


def _objective(m: Model) -> None:
    """Minimize what decisions add to the single pass.

    In units of a thousandth of the baseline, without the constant::

        sum(R * compute) + sum(M_in * page_in) + sum(M_out * page_out)
        + sum((1 - resident) * (page_in + page_out of the replacement))

    with energies, times, bytes written or a user's own coefficients; or the peak RAM variable.
    Where coefficients are negative a constant is added, so that it is 0 or more: what they take off
    at the very most. Costs that dwarf all others count for less: for a million units, or twice the
    reference. Bounds stay bounds, and what is better than the reference is not concerned.
    """
    m.objective_unit = m.problem.objective.unit
    m.costs, m.offset = minimized(m, m.problem)
    m.has_objective = True


def minimized(m: Model, problem: Problem) -> tuple[list[Term], float]:
    """Return the objective of a problem, in its unit: terms over a model's columns, and a constant.

    The model is of that problem, or of one that it is a surrogate of.
    """
    objective = problem.objective
    if not objective.is_sum:
        return ([] if m.peak is None else [(1000.0, m.peak)]), 0.0
    unit, reference = objective.unit, objective.reference
    most = MOST_UNITS if reference is None else 2 * reference / unit
    capped = Coefficients(
        *(
            tuple(max(-most, min(coefficient / unit, most)) for coefficient in column)
            for column in objective.coefficients
        )
    )
    rewards = min_negative_sum(problem.graph, capped)
    return m.decisions.terms(capped), -rewards if rewards else 0.0


OBJECTIVE = Component("objective", _objective, "POET (ICML 2022), equation 2", AFTER_VARIABLES)


def _deadline(m: Model) -> None:
    """Keep the deadline.

    With page times only where the deadline counts them::

        sum(R * compute_time) + sum(M_in * page_in_time) + sum(M_out * page_out_time) <= deadline

    Where transfers run beside the computing, two rows that every plan keeps: compute time alone
    (or with a share of the transfers, in a surrogate), and transfer time alone.
    """
    for limit in m.problem.linear_limits:
        if limit.name in DEADLINE_ROWS:
            add_limit(m, limit)


WRITES_ROW: Final = "fewer_writes"
"""Name of the row of bytes written that is added to a model for a while."""


DEADLINE = Component(
    "deadline",
    _deadline,
    "POET (ICML 2022), equation 3; transfers: poetmodel, blocking storage",
    AFTER_VARIABLES,
)


def _energy_budget(m: Model) -> None:
    """Keep the energy budget.

    ::

        sum(R * compute_energy) + sum(M_in * page_in_energy) + sum(M_out * page_out_energy)
        <=  budget
    """
    for limit in m.problem.linear_limits:
        if limit.name == ENERGY_BUDGET.name:
            add_limit(m, limit)


ENERGY_BUDGET = Component(
    "energy_budget",
    _energy_budget,
    "poetmodel: the objective of POET as a limit, for other objectives",
    AFTER_VARIABLES,
)


def _constraints(m: Model) -> None:
    """Keep the user's own constraints on the totals of a schedule.

    For every constraint ``lower <= a sum of totals <= upper``, with what it counts for each
    decision, less what a single pass takes; a constraint has one such row, or two::

        sum(R * compute) + sum(M_in * page_in) + sum(M_out * page_out)  <=  upper - pass
        - sum(R * compute) - sum(M_in * page_in) - sum(M_out * page_out)  <=  pass - lower

    Where a limit or the objective wants a tensor paged out, that counts once::

        sum(M_out[t,i], t >= node(i)) <= 1
    """
    for limit in m.problem.linear_limits:
        if limit.name == USER_CONSTRAINTS:
            add_limit(m, limit)
    wanted = m.problem.rewards.page_out
    outs: dict[int, list[int]] = {}
    for i, column in m.decisions.page_outs:
        if wanted[i]:
            outs.setdefault(i, []).append(column)
    for i, columns in outs.items():
        if len(columns) > 1:
            m.begin_rows("paged_out_once")
            m.add_row(i, columns, [1.0] * len(columns), upper=1.0)


OWN_CONSTRAINTS = Component(
    USER_CONSTRAINTS,
    _constraints,
    "poetmodel: a user's own rows, over the decisions that totals count",
    AFTER_VARIABLES,
)

LIMITS_AND_OBJECTIVE: Final = (DEADLINE, ENERGY_BUDGET, OWN_CONSTRAINTS, OBJECTIVE)


def add_limit(m: Model, limit: LinearRow) -> None:
    """Add the row of a limit over totals under its name, unless it cannot bind.

    Nothing satisfies one that is exceeded even by what takes off the most.
    """
    needed = as_needed(m.decisions.stated(limit), m.upper)
    if room(needed, m.upper) < 0:
        m.begin_rows(limit.name)
        m.add_impossible(limit.key)
        return
    row = stated_limit(m, needed)
    if row is not None:
        m.begin_rows(limit.name)
        m.add_linear_row(row)
