"""Energy, time and writes over the decisions of any formulation: the objective and the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyomo.core as pyo

from poetmodel.model.formulation import AFTER_VARIABLES, Component
from poetmodel.model.linear import ExactLimit, Term, linear, merged, never, stated_limit
from poetmodel.problem import DEADLINE_ROWS, Coefficients

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What a formulation decides beyond the single pass."""

    recomputations: Sequence[tuple[int, Any]]
    """(node, variable that counts one more computation of it)."""
    page_ins: Sequence[tuple[int, Any]]
    """(tensor, variable that counts one page-in of it)."""
    page_outs: Sequence[tuple[int, Any]]
    """(tensor, variable that counts one page-out of it)."""

    def terms(self, coefficients: Coefficients) -> list[Term]:
        """Return a sum over these decisions, in the unit of its coefficients."""
        return merged(
            [
                *((coefficients.compute[k], var) for k, var in self.recomputations),
                *((coefficients.page_in[i], var) for i, var in self.page_ins),
                *((coefficients.page_out[i], var) for i, var in self.page_outs),
            ]
        )


MOST_UNITS: Final = 1e6
"""Largest cost in the objective, in units: solvers lose the small ones beside larger ones."""


def _objective(m: pyo.ConcreteModel) -> None:
    """Minimize what decisions add to the single pass.

    In units of a thousandth of the baseline, without the constant::

        sum(R * compute) + sum(M_in * page_in) + sum(M_out * page_out)

    with energies, times or bytes written; or the peak RAM variable. Costs that dwarf all others
    count for less: for a million units, or twice the reference. Bounds stay bounds, and what is
    better than the reference is not concerned.
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
    terms = m.decisions.terms(objective.coefficients)
    return linear((min(coefficient / unit, most), var) for coefficient, var in terms)


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
            add_limit(m, limit.name, limit.coefficients, limit.slack)


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
        if limit.name not in DEADLINE_ROWS:
            add_limit(m, limit.name, limit.coefficients, limit.slack)


ENERGY_BUDGET = Component(
    "energy_budget",
    _energy_budget,
    "poetmodel: the objective of POET as a limit, for other objectives",
    AFTER_VARIABLES,
)

LIMITS_AND_OBJECTIVE: Final = (DEADLINE, ENERGY_BUDGET, OBJECTIVE)


def add_limit(m: pyo.ConcreteModel, name: str, coefficients: Coefficients, slack: float) -> None:
    """Add a limit on a sum over decisions under a name; nothing satisfies one below zero."""
    if slack < 0:
        setattr(m, name, never(m))
        return
    row = stated_limit(m, name, None, ExactLimit(m.decisions.terms(coefficients), slack))
    if row is not None:
        setattr(m, name, pyo.Constraint(expr=row))
