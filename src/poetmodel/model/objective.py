"""Energy, time and writes over the decisions of any formulation: the objective and the limits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyomo.core as pyo

from poetmodel.model.formulation import AFTER_VARIABLES, Component
from poetmodel.model.linear import (
    Term,
    as_needed,
    impossible,
    linear,
    merged,
    relation,
    room,
    stated_limit,
)
from poetmodel.problem import CONSTRAINTS, DEADLINE_ROWS, Coefficients, LinearRow, largest_rewards

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What a formulation decides beyond the single pass."""

    recomputations: Sequence[tuple[int, Any]]
    """(node, variable that counts one more computation of it)."""
    page_ins: Sequence[tuple[int, Any]]
    """(tensor, variable that counts one page-in of it)."""
    page_outs: Sequence[tuple[int, Any]]
    """(tensor, variable that counts one page-out of it)."""
    storage_homes: Sequence[tuple[int, Any]] = ()
    """(state tensor, variable that says that its home is on storage)."""

    def stated(self, row: LinearRow) -> LinearRow:
        """Return a row over totals as one over the variables of these decisions."""
        terms = self.terms(row.coefficients)
        return LinearRow.of(terms, upper=row.upper, name=row.name, key=row.key)

    def terms(self, coefficients: Coefficients) -> list[Term]:
        """Return a sum over these decisions, in the unit of its coefficients."""
        return merged(
            (coefficient, variable)
            for column, variables in zip(coefficients, self._by_item, strict=True)
            for item, coefficient in enumerate(column)
            if coefficient
            for variable in variables.get(item, ())
        )

    @cached_property
    def _by_item(self) -> tuple[dict[int, list[Any]], ...]:
        """The variables of each node or tensor: a sum may speak of few of them."""
        found: tuple[dict[int, list[Any]], ...] = ({}, {}, {}, {})
        counted = (self.recomputations, self.page_ins, self.page_outs, self.storage_homes)
        for of, pairs in zip(found, counted, strict=True):
            for item, variable in pairs:
                of.setdefault(item, []).append(variable)
        return found


MOST_UNITS: Final = 1e6
"""Largest cost in the objective, in units: solvers lose the small ones beside larger ones."""


def _objective(m: pyo.ConcreteModel) -> None:
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
    m.objective = pyo.Objective(expr=minimized(m))
    # A bound of this model is one of the problem only while nobody changes the objective.
    m.stated_objective = m.objective.expr


def minimized(m: pyo.ConcreteModel) -> Any:
    """Return what the problem of a model minimizes, in the model's unit, as an expression."""
    objective = m.problem.objective
    if not objective.is_sum:
        return 1000 * m.peak
    unit, reference = objective.unit, objective.reference
    most = MOST_UNITS if reference is None else 2 * reference / unit
    capped = Coefficients(
        *(
            tuple(max(-most, min(coefficient / unit, most)) for coefficient in column)
            for column in objective.coefficients
        )
    )
    rewards = largest_rewards(m.problem.graph, capped)
    return linear(m.decisions.terms(capped), -rewards if rewards else 0.0)


OBJECTIVE = Component("objective", _objective, "POET (ICML 2022), equation 2", AFTER_VARIABLES)


def _deadline(m: pyo.ConcreteModel) -> None:
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


def _energy_budget(m: pyo.ConcreteModel) -> None:
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


def _constraints(m: pyo.ConcreteModel) -> None:
    """Keep the user's own constraints on the totals of a schedule.

    For every constraint ``lower <= a sum of totals <= upper``, with what it counts for each
    decision, less what a single pass takes; a constraint has one such row, or two::

        sum(R * compute) + sum(M_in * page_in) + sum(M_out * page_out)  <=  upper - pass
        - sum(R * compute) - sum(M_in * page_in) - sum(M_out * page_out)  <=  pass - lower

    Where a limit or the objective wants a tensor paged out, that counts once::

        sum(M_out[t,i], t >= node(i)) <= 1
    """
    stated = {}
    for limit in m.problem.linear_limits:
        if limit.name == CONSTRAINTS:
            row = _limit_row(m, limit)
            if row is not None:
                stated[limit.key] = row
    if stated:
        m.constraints = pyo.Constraint(list(stated), rule=lambda _, *index: stated[index])
    wanted = m.problem.wanted.page_out
    outs: dict[int, list[Any]] = {}
    for i, var in m.decisions.page_outs:
        if wanted[i]:
            outs.setdefault(i, []).append(var)
    several = {i: found for i, found in outs.items() if len(found) > 1}
    if several:
        m.paged_out_once = pyo.Constraint(
            list(several), rule=lambda _, i: (None, linear((1, var) for var in several[i]), 1)
        )


OWN_CONSTRAINTS = Component(
    CONSTRAINTS,
    _constraints,
    "poetmodel: a user's own rows, over the decisions that totals count",
    AFTER_VARIABLES,
)

LIMITS_AND_OBJECTIVE: Final = (DEADLINE, ENERGY_BUDGET, OWN_CONSTRAINTS, OBJECTIVE)


def add_limit(m: pyo.ConcreteModel, limit: LinearRow) -> None:
    """Add a limit over totals under its name."""
    row = _limit_row(m, limit)
    if row is not None:
        setattr(m, limit.name, pyo.Constraint(expr=row))


def _limit_row(m: pyo.ConcreteModel, limit: LinearRow) -> Any | None:
    """Return the row of a limit over totals, None where it cannot bind.

    Nothing satisfies one that is exceeded even by what takes off the most.
    """
    needed = as_needed(m.decisions.stated(limit))
    if room(needed) < 0:
        return impossible(m)
    row = stated_limit(m, needed)
    return None if row is None else relation(row)
