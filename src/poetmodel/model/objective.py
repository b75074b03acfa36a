"""The objective and the limits on sums, over the decisions of any formulation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from poetmodel.errors import ModelError
from poetmodel.model.formulation import AFTER_VARIABLES, Component
from poetmodel.model.linear import literal_limit, reduce_coefficients, scale_and_register_limit
from poetmodel.problem import (
    DEADLINE_ROWS,
    USER_CONSTRAINTS,
    Coefficients,
    LinearRow,
    Problem,
    min_negative_sum,
)
from poetmodel.problem.rows import ROUNDING_ERROR

if TYPE_CHECKING:
    from poetmodel.model.arrays import Model
    from poetmodel.model.decisions import Term


MAX_COST_UNITS: Final = 1e6
"""Maximum absolute cost in units of an objective without a reference: solvers lose small costs
beside larger ones."""
MAX_TRUE_COST_UNITS: Final = 1e11
"""Maximum absolute cost in units of a model that leaves the package. HiGHS and SCIP found the
optimum of all 5,000 files of small problems with costs up to this limit; SCIP reports objectives
that are wrong by 1e-5 from 5e11 units."""
MIN_TRUE_COST_UNITS: Final = 1e-3
"""Smallest cost in units of a model that leaves the package, unless it is below `NEGLIGIBLE_COST`;
a thousand times a solver's absolute tolerance."""
NEGLIGIBLE_COST: Final = 1e-6
"""Costs below this fraction of a single pass may be below `MIN_TRUE_COST_UNITS`: a solver's
tolerance is then a billionth of the single pass, as is that of limits."""


def _add_objective(m: Model) -> None:
    """Minimize the cost of all decisions beyond the single pass.

    The unit is `Objective.unit`, such as a thousandth of the baseline::

        sum(R * compute) + sum(M_in * page_in) + sum(M_out * page_out)
        + sum((1 - resident) * (page_in + page_out of the replacement))

    On memory-mapped storage, state has no page-in. Page-outs that a commit includes cost 0 here.

    Coefficients are energies, times, bytes written or user-defined; or the objective is the peak
    RAM variable. If coefficients are negative, the largest possible reward is added as a constant,
    which makes the objective 0 or more. Models that stay in the package have truncated costs
    (`objective_terms`), others true ones, or `ModelError` names a cost that is out of range.
    """
    objective = m.problem.objective
    if m.has_true_costs and objective.is_sum:
        m.objective_unit = _true_cost_unit(m)
        m.costs, m.offset = _scaled_terms(m, m.problem, m.objective_unit, math.inf)
    else:
        m.objective_unit = objective.unit
        m.costs, m.offset = objective_terms(m, m.problem)
    m.has_objective = True


def objective_terms(m: Model, problem: Problem) -> tuple[list[Term], float]:
    """Return the objective of `problem` in its `Objective.unit`: terms over `m`, and a constant.

    The constant makes the sum 0 or more if there are rewards; the single pass is not included.
    `problem` may state other times than the model's. Costs are truncated to a million units, or to
    twice the objective's `reference`: bounds remain valid, and solutions better than the reference
    have their true cost.
    """
    objective = problem.objective
    if not objective.is_sum:
        return ([] if m.peak is None else [(1000.0, m.peak)]), 0.0
    unit, reference = objective.unit, objective.reference
    max_cost = MAX_COST_UNITS if reference is None else 2 * reference / unit
    return _scaled_terms(m, problem, unit, max_cost)


def _scaled_terms(
    m: Model, problem: Problem, unit: float, max_cost: float
) -> tuple[list[Term], float]:
    """Return terms and constant of an objective in `unit`, costs truncated to `max_cost` units."""
    scaled_coefficients = Coefficients(
        *(
            tuple(
                max(-max_cost, min(coefficient / unit, max_cost))
                for coefficient in item_coefficients
            )
            for item_coefficients in problem.objective.coefficients
        )
    )
    min_sum = min_negative_sum(problem.graph, scaled_coefficients)
    return m.decisions.terms(scaled_coefficients), -min_sum if min_sum else 0.0


def _true_cost_unit(m: Model) -> float:
    """Return the unit of untruncated costs, finer if some are small; raise if they vary widely."""
    objective = m.problem.objective
    costs = [abs(cost) for cost, _ in m.decisions.terms(objective.coefficients)]
    if not costs:
        return objective.unit
    smallest_cost = max(min(costs), NEGLIGIBLE_COST * abs(objective.baseline))
    unit = smallest_cost / MIN_TRUE_COST_UNITS
    if unit >= objective.unit * (1 - ROUNDING_ERROR):
        unit = objective.unit
    if objective.is_in_bytes:
        return max(unit, max(costs) / MAX_TRUE_COST_UNITS)
    if max(costs) > MAX_TRUE_COST_UNITS * unit:
        raise ModelError(_describe_excessive_cost(m, unit))
    return unit


def _describe_excessive_cost(m: Model, unit: float) -> str:
    """Return the message that a cost is too large beside the single pass or the smallest cost."""
    graph, objective = m.problem.graph, m.problem.objective
    names = (
        ("recomputing", [node.name for node in graph.nodes]),
        ("paging in", [tensor.name for tensor in graph.tensors]),
        ("paging out", [tensor.name for tensor in graph.tensors]),
        ("a home on storage of", [tensor.name for tensor in graph.tensors]),
    )
    cost, decision = max(
        (
            (abs(value), f"{verb} {names_of_items[item]!r}")
            for (verb, names_of_items), values, pairs in zip(
                names, objective.coefficients, m.decisions.by_kind, strict=True
            )
            for item in {item for item, _ in pairs}
            for value in (values[item],)
        ),
        key=lambda pair: pair[0],
    )
    return (
        f"model {m.name!r}: expected costs of at most "
        f"{objective.format(MAX_TRUE_COST_UNITS * unit)}, the range of solvers beside "
        f"{'the single pass' if unit >= objective.unit else 'the smallest cost'}, but "
        f"{decision} costs {objective.format(cost)}; lower it, or pass the problem to "
        "poetmodel.solve, which needs no such range"
    )


OBJECTIVE = Component("objective", _add_objective, "POET (ICML 2022), equation 2", AFTER_VARIABLES)


def _add_deadline_rows(m: Model) -> None:
    """Add the rows of the deadline to a model; none without a deadline, or if it cannot bind.

    Transfer times are included only if the deadline counts them::

        sum(R * compute_time) + sum(M_in * page_in_time) + sum(M_out * page_out_time) <= deadline

    Homes of state on storage count as in the objective. If transfers overlap computations, this row
    has the compute time only (with a fraction of the transfer time if a statement weighs it). A
    second row then limits the transfer time, unless plans may omit transfers.
    """
    for limit in m.problem.linear_limits:
        if limit.name in DEADLINE_ROWS:
            add_limit(m, limit)


WRITES_ROW: Final = "fewer_writes"
"""Name of a limit on bytes written that `poetmodel.solver.extended` adds to a standard form."""


DEADLINE = Component(
    "deadline",
    _add_deadline_rows,
    "POET (ICML 2022), equation 3; transfers: poetmodel, blocking storage",
    AFTER_VARIABLES,
)


def _add_energy_budget_row(m: Model) -> None:
    """Add the row of the energy budget to an array model; none without a budget that can bind.

    ::

        sum(R * compute_energy) + sum(M_in * page_in_energy) + sum(M_out * page_out_energy)
        <=  budget

    Energies include idle power over the counted time, unless that is a makespan. Homes of state on
    storage count as in the objective.
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

    Every constraint ``lower <= sum of totals <= upper`` has a row for each of its bounds that can
    bind, an infeasible one if no decisions meet the bound. Rows have the contribution of each
    decision; `pass` is the contribution of a single pass, and homes of state on storage count as in
    the objective::

        sum(R * compute) + sum(M_in * page_in) + sum(M_out * page_out)  <=  upper - pass
        - sum(R * compute) - sum(M_in * page_in) - sum(M_out * page_out)  <=  pass - lower

    If a limit or the objective rewards paging a tensor out, and the tensor has several page-out
    decisions, at most one page-out is allowed::

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


USER_TOTALS = Component(
    USER_CONSTRAINTS,
    _add_user_constraint_rows,
    "poetmodel: user-defined constraints, over the decisions that totals count",
    AFTER_VARIABLES,
)

LIMITS_AND_OBJECTIVE: Final = (DEADLINE, ENERGY_BUDGET, USER_TOTALS, OBJECTIVE)


def add_limit(m: Model, limit: LinearRow) -> None:
    """Add the scaled row of a limit on totals, and register the limit for cover cuts.

    Adds neither if the limit cannot bind, only an infeasible row if no decisions can meet it.
    """
    reduced_limit = reduce_coefficients(m.decisions.row_over_columns(limit), m.upper)
    if literal_limit(reduced_limit, m.upper) < 0:
        m.begin_rows(limit.name)
        m.add_infeasible_row(limit.key)
        return
    row = scale_and_register_limit(m, reduced_limit)
    if row is not None:
        m.begin_rows(limit.name)
        m.add_linear_row(row)
