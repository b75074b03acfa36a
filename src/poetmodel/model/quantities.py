"""Energy, time, writes and RAM over the decisions of any formulation: objective and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyomo.core as pyo

from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.model.component import Component
from poetmodel.model.linear import ExactLimit, linear, merged, stated_limit
from poetmodel.problem import Quantity, deadline_slack_s, energy_slack_j

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.model.linear import Term
    from poetmodel.problem import Problem, TimeSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What a formulation decides beyond the single pass."""

    recomputations: Sequence[tuple[int, Any]]
    """(node, variable that counts one more computation of it)."""
    page_ins: Sequence[tuple[int, Any]]
    """(tensor, variable that counts one page-in of it)."""
    page_outs: Sequence[tuple[int, Any]]
    """(tensor, variable that counts one page-out of it)."""


def energy_terms(problem: Problem, decisions: Decisions) -> list[Term]:
    """Return the energy beyond the baseline [J] (POET, ICML 2022, equation 2)."""
    return merged(
        [
            *((problem.compute_charge_j(k), var) for k, var in decisions.recomputations),
            *((problem.page_in_charge_j(i), var) for i, var in decisions.page_ins),
            *((problem.page_out_charge_j(i), var) for i, var in decisions.page_outs),
        ]
    )


def time_terms(problem: Problem, decisions: Decisions, counted: TimeSum) -> list[Term]:
    """Return a sum of times beyond one pass [s] (POET, ICML 2022, equation 3, and transfers)."""
    table, compute, transfer = problem.table, counted.compute, counted.transfer
    terms: list[Term] = []
    if compute:
        terms += [(compute * table.compute_time_s[k], var) for k, var in decisions.recomputations]
    if transfer:
        terms += [(transfer * table.page_in_time_s[i], var) for i, var in decisions.page_ins]
        terms += [(transfer * table.page_out_time_s[i], var) for i, var in decisions.page_outs]
    return merged(terms)


def write_terms(problem: Problem, decisions: Decisions) -> list[Term]:
    """Return the bytes paged out [B]."""
    return merged((problem.graph.tensor_bytes[i], var) for i, var in decisions.page_outs)


def quantity_terms(problem: Problem, decisions: Decisions) -> list[Term]:
    """Return what the problem minimizes beyond the unavoidable, in its own unit; not for RAM."""
    if problem.minimize == Quantity.TIME:
        return time_terms(problem, decisions, problem.time_sum)
    if problem.minimize == Quantity.WRITES:
        return write_terms(problem, decisions)
    return energy_terms(problem, decisions)


def objective_unit(problem: Problem) -> float:
    """Return how much of the minimized quantity one unit of a model's objective is.

    A thousandth of the baseline (energy, time) or of the RAM that any schedule can use, so that
    gaps that matter are far above a solver's absolute tolerances; where the baseline is nothing,
    the dearest single transfer; a thousandth of a known schedule's value where the problem has one
    as its reference. It depends on the problem alone: objectives of all its models compare.
    """
    if problem.minimize == Quantity.RAM:
        return ram_unit(problem) / 1000
    if problem.reference_value is not None:
        return problem.reference_value / 1000
    if problem.minimize == Quantity.WRITES:
        return float(max((1, *problem.graph.tensor_bytes)))
    if problem.minimize == Quantity.ENERGY:
        tensors = range(len(problem.graph.tensors)) if problem.table.has_storage else ()
        whole = problem.baseline_energy_j
        transfers = [
            c(i) for c in (problem.page_in_charge_j, problem.page_out_charge_j) for i in tensors
        ]
    else:
        whole = problem.pass_time_s
        transfers = [*problem.table.page_in_time_s, *problem.table.page_out_time_s]
    dearest = max(transfers, default=0.0)
    return whole / 1000 or dearest or 1.0


def ram_unit(problem: Problem) -> int:
    """Return the RAM that the peak is measured in [B]: the budget, as far as it is of any use."""
    return max(1, min(problem.usable_ram_bytes, checkpoint_all_peak_bytes(problem.graph)))


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
    m.objective_unit = objective_unit(m.problem)
    m.objective = pyo.Objective(expr=minimized(m))
    # A bound of this model is one of the problem only while nobody changes the objective.
    m.stated_objective = m.objective.expr


def minimized(m: pyo.ConcreteModel) -> Any:
    """Return what the problem of a model minimizes, in the model's unit, as an expression."""
    if m.problem.minimize == Quantity.RAM:
        return 1000 * m.peak
    terms = quantity_terms(m.problem, m.decisions)
    reference = m.problem.reference_value
    most = MOST_UNITS if reference is None else 2 * reference / m.objective_unit
    return linear((min(coefficient / m.objective_unit, most), var) for coefficient, var in terms)


OBJECTIVE = Component(
    "objective",
    _objective,
    source="POET (ICML 2022), equation 2",
    requires=frozenset({"variables"}),
)


def _deadline(m: pyo.ConcreteModel) -> None:
    """Keep the deadline.

    With page times only where the deadline counts them::

        sum(R * compute_time) + sum(M_in * page_in_time) + sum(M_out * page_out_time) <= deadline

    Where transfers run beside the computing, two rows that every plan keeps: compute time alone
    (or with a share of the transfers, in a stand-in), and transfer time alone.
    """
    for name, counted in zip(DEADLINE_ROWS, m.problem.deadline_sums, strict=False):
        add_deadline(m, name, counted)


def add_deadline(m: pyo.ConcreteModel, name: str, counted: TimeSum) -> None:
    """Add the row that a sum of times keeps the deadline, if there is one, under a name."""
    slack = deadline_slack_s(m.problem, counted)
    if slack is not None:
        add_limit(m, name, time_terms(m.problem, m.decisions, counted), slack)


DEADLINE_ROWS: Final = ("deadline", "bus_deadline", "stand_in_deadline")
"""Names of the rows of a deadline: that of the core; where transfers run beside the computing that
of the bus; and one that is added to a model for a while (see `poetmodel.solver.overlap`)."""


WRITES_ROW: Final = "fewer_writes"
"""Name of the row of bytes written that is added to a model for a while, like the last of those."""


DEADLINE = Component(
    "deadline",
    _deadline,
    source="POET (ICML 2022), equation 3; transfers: poetmodel, blocking storage",
    requires=frozenset({"variables"}),
)


def _energy_budget(m: pyo.ConcreteModel) -> None:
    """Keep the energy budget.

    ::

        sum(R * compute_energy) + sum(M_in * page_in_energy) + sum(M_out * page_out_energy)
        <=  budget
    """
    slack = energy_slack_j(m.problem)
    if slack is not None:
        add_limit(m, "energy_budget", energy_terms(m.problem, m.decisions), slack)


ENERGY_BUDGET = Component(
    "energy_budget",
    _energy_budget,
    source="poetmodel: the objective of POET as a limit, for other objectives",
    requires=frozenset({"variables"}),
)


def add_limit(m: pyo.ConcreteModel, name: str, terms: Sequence[Term], slack: float) -> None:
    """Add ``sum of terms <= slack`` under a name, or a row that nothing satisfies if slack < 0."""
    if slack < 0:
        setattr(m, name, never(m))
        return
    row = stated_limit(m, name, None, ExactLimit(list(terms), slack))
    if row is not None:
        setattr(m, name, pyo.Constraint(expr=row))


def never(m: pyo.ConcreteModel) -> pyo.Constraint:
    """Return a constraint that no values satisfy, stated so that every solver proves it."""
    if not hasattr(m, "nothing"):
        m.nothing = pyo.Var(bounds=(0, 0))
    return pyo.Constraint(expr=m.nothing >= 1)
