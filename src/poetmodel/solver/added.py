"""Rows that a user has added to a model of ``compact``, in terms of its decisions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyomo.core as pyo
from pyomo.core.expr.visitor import identify_variables
from pyomo.repn import generate_standard_repn

from poetmodel.clock import check_time_limit
from poetmodel.model.compact import COMPACT
from poetmodel.problem import OWN, Constraint, LinearRow, Problem
from poetmodel.problem.rows import over_stages
from poetmodel.problem.totals import CONSTANT, Count, Terms, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from poetmodel.schedule import Schedule

DECISIONS: Final = ("kept", "recomputed", "paged_in", "paged_out", "storage_home")
"""Families of variables of ``compact`` that are decisions; ``resident`` is ``1 - storage_home``."""
HOMES: Final = ("storage_home", "resident")
"""Families of variables that say where the home of state is."""
PAGE_OUTS: Final = frozenset({"paged_out", "M_out"})
"""Families of variables that say what is paged out."""
NAMED: Final = "of the model: {}"
"""Name of a constraint of the problem that states a model's: the problem's own keep theirs."""
Decision = tuple[str, Any]
"""A family of variables, and an index of it."""
PASSIVE: Final = frozenset({pyo.Set, pyo.RangeSet, pyo.Param, pyo.Expression, pyo.Var})
"""Kinds of components that say nothing by themselves."""


def added_rows(model: pyo.ConcreteModel) -> list[LinearRow] | None:
    """Return the rows that were added to a model of ``compact``.

    None where the model is another one, or was changed in other ways: with variables of the user's
    own in the rows, values or bounds of its variables, rows that are not linear, that are over
    liveness columns or that `build` stated differently.
    """
    if not _is_as_built(model):
        return None
    rows: list[LinearRow] = []
    for component in model.component_objects(pyo.Constraint, active=True):
        if component.name in model.stated_rows:
            continue
        for constraint in component.values():
            if not constraint.active:
                continue
            row = _read(constraint)
            if row is None:
                return None
            rows.append(row)
    return rows


def states_problem(model: pyo.ConcreteModel) -> bool:
    """Return whether a model still minimizes what `build` stated: nobody replaced or changed it."""
    objective = model.component("objective")
    return (
        getattr(objective, "active", False)
        and getattr(objective, "sense", None) == pyo.minimize
        and getattr(objective, "expr", None) is getattr(model, "stated_objective", None)
    )


def names_page_outs(model: pyo.ConcreteModel) -> bool:
    """Return whether rows, or an objective, that were added to a model name page-outs."""
    expressions = [
        row.body
        for row in model.component_data_objects(pyo.Constraint, active=True)
        if row.parent_component().name not in model.stated_rows
    ]
    if not states_problem(model):
        objectives = model.component_data_objects(pyo.Objective, active=True)
        expressions += [objective.expr for objective in objectives]
    return any(
        variable.parent_component().local_name in PAGE_OUTS
        for expression in expressions
        for variable in identify_variables(expression)
    )


def row_check(
    model: pyo.ConcreteModel, rows: Sequence[LinearRow] | None
) -> Callable[[Schedule], bool] | None:
    """Return the function that tells whether a schedule keeps the rows added to a model.

    None where there are others than rows over decisions, or another objective.
    """
    if rows is None or not states_problem(model):
        return None
    named = {index for row in rows for family, index in row.space if family == "kept"}

    def keeps(schedule: Schedule) -> bool:
        again = {(t, k) for t, k in schedule.R if k < t}
        if not (all(map(model.recomputed.__contains__, again))):
            return False  # it does what the model has decided not to do
        held, relations = set(schedule.S_RAM), model.arrays.relations
        chosen = over_stages(again, schedule.M_in, (i for _, i in schedule.M_out))
        chosen.update(
            ("kept", (i, a))
            for i, a in named
            if all((t, i) in held for t in relations.stages_of(i, a))
        )
        homes = (i for i in model.storage_home if i not in schedule.resident)
        chosen.update(("storage_home", i) for i in homes)
        return all(row.is_kept(chosen.__contains__) for row in rows)

    return keeps


def _is_as_built(model: pyo.ConcreteModel) -> bool:
    """Return whether what `build` stated is there, unchanged, and nothing but rows was added."""
    if model.formulation != COMPACT:
        return False
    understood = {*PASSIVE, pyo.Constraint, pyo.Objective}
    if any(component.ctype not in understood for component in model.component_objects(active=True)):
        return False
    if not all(_is_stated(model, name) for name in model.stated_rows):
        return False
    for name in (*DECISIONS, "resident", "live"):
        check_time_limit()
        for index, variable in getattr(model, name, {}).items():
            if _is_decided(model, name, index):
                continue
            if variable.fixed or variable.bounds != (0, 1):
                return False
    return True


def _is_decided(model: pyo.ConcreteModel, name: str, index: Any) -> bool:
    """Return whether a variable says where state is that cannot be elsewhere: without paging."""
    item = index[0] if name == "kept" else index
    decided = item in model.resident and item not in model.storage_home
    return decided and name in ("resident", "kept")


def _is_stated(model: pyo.ConcreteModel, name: str) -> bool:
    """Return whether a constraint is active and says what `build` made it say."""
    component, stated = model.component(name), model.stated_rows[name]
    if component is None or not all(row.active for row in component.values()):
        return False
    same = (row.expr is stated.get(key) for key, row in component.items())
    return len(component) == len(stated) and all(same)


def _read(constraint: Any) -> LinearRow | None:
    """Return a constraint as a row over decisions, None where it is none."""
    parts = _linear(constraint.body, constraint.model())
    if parts is None:
        return None
    terms, constant = parts
    lower, upper = constraint.lb, constraint.ub
    return LinearRow.of(
        terms,
        name=constraint.name,
        lower=-math.inf if lower is None else lower - constant,
        upper=math.inf if upper is None else upper - constant,
    )


def _linear(
    expression: Any, home: pyo.ConcreteModel
) -> tuple[list[tuple[float, Decision]], float] | None:
    """Return terms and constant of an expression over decisions, None where it is none."""
    repn = generate_standard_repn(expression)
    if not repn.is_linear():
        return None
    terms: dict[Decision, float] = {}
    constant = float(repn.constant)
    for coefficient, variable in zip(repn.linear_coefs, repn.linear_vars, strict=True):
        family, added = variable.parent_component(), float(coefficient)
        name = family.local_name
        if family.parent_block() is not home or name not in (*DECISIONS, "resident"):
            return None
        if name == "resident":
            constant += added
            name, added = "storage_home", -added
        key = (name, variable.index())
        terms[key] = terms.get(key, 0.0) + added
    return [(value, key) for key, value in terms.items() if value], constant


def own_objective(model: pyo.ConcreteModel) -> pyo.Objective | None:
    """Return the objective that replaces that of a model, None where it still has its own."""
    active = list(model.component_data_objects(pyo.Objective, active=True))
    return active[0] if len(active) == 1 and not states_problem(model) else None


def _own_totals(model: pyo.ConcreteModel, objective: Any) -> Terms | None:
    """Return the objective of a model as a sum of totals.

    None where stages differ, or where it rewards decisions, or its constant is below 0: its gap
    would be another.
    """
    sign = 1 if objective.sense == pyo.minimize else -1
    parts = _linear(objective.expr, model)
    if parts is None:
        return None
    terms = [(sign * value, decision) for value, decision in parts[0]]
    constant = sign * parts[1]
    totals = _totals(model, terms)
    if totals is None or min((constant, *(value for value, _ in terms))) < 0:
        return None
    named = [(key, whole(value)) for key, value in totals[0].items()]
    return (*named, (CONSTANT, whole(constant + totals[1])))


def as_problem(model: pyo.ConcreteModel, rows: Sequence[LinearRow] | None) -> Problem | None:
    """Return the problem that a model states with rows, or an objective, that were added to it.

    None where nothing was added, or where a row may want what serves nothing else, which the model
    does not offer in every stage, or says how long tensors are kept. Rows that have one coefficient
    for a node or tensor in all stages in which the model offers it are on totals; others are rows
    over stages.

    Notes
    -----
    Nodes whose recomputation paging dominated when the model was built are not recomputed, whatever
    the rows say: the problem that is solved is that of the model.
    """
    objective = own_objective(model)
    if rows is None or not model.exact or not (rows or objective is not None):
        return None
    minimized: dict[str, Any] = {}
    if objective is not None:
        terms = _own_totals(model, objective)
        if terms is None:
            return None
        minimized = {"minimize": OWN, "own_objective": terms}
    elif not states_problem(model):
        return None
    problem: Problem = model.problem
    stated = _as_limits(model, rows)
    if stated is None:
        return None
    constraints = [*problem.constraints, *stated[0]]
    never = frozenset(k for k, stages in enumerate(model.events.recompute) if not stages)
    named = [(f"{Count.RECOMPUTATIONS}:{problem.graph.nodes[k].name}", 1) for k in sorted(never)]
    if named:
        left_out = Constraint(name=NAMED.format("what it leaves out"), terms=dict(named), upper=0)
        constraints.append(left_out)
    surrogate = problem.surrogate(never_recomputed=never, rows=tuple(stated[1]))
    return replace(surrogate, constraints=tuple(constraints), **minimized)


def _as_limits(
    model: pyo.ConcreteModel, rows: Sequence[LinearRow]
) -> tuple[list[Constraint], list[LinearRow]] | None:
    """Return rows as constraints on totals and as rows over stages, None where one is neither."""
    constraints, over_stages = [], []
    for stated in rows:
        limits = _limits(stated)
        if limits is None or any(family == "kept" for family, _ in stated.space):
            return None
        for row in limits:
            total = _as_total(model, row)
            if total is not None:
                constraints.append(total)
            elif any(family in HOMES for family, _ in row.space):
                return None
            else:
                over_stages.append(_over_stages(model, row))
    return constraints, over_stages


def _limits(row: LinearRow) -> list[LinearRow] | None:
    """Return a row as upper limits without coefficients below 0, None if it says more.

    A home on storage that takes off a sum is one in RAM that adds to it.
    """
    if not row.space:
        return None
    limits: list[LinearRow] = []
    for sign, limit in ((1, row.upper), (-1, -row.lower)):
        if limit == math.inf:
            continue
        terms: list[tuple[float, Decision]] = []
        for weight, (family, index) in row.terms:
            value = sign * weight
            turned = family == "storage_home" and value < 0
            terms.append((abs(value), ("resident", index)) if turned else (value, (family, index)))
        upper = limit + sum(value for value, (family, _) in terms if family == "resident")
        if all(value >= 0 for value, _ in terms):
            name = f"{row.name}, at least" if sign < 0 and limits else row.name
            limits.append(LinearRow.of(terms, name=name, upper=upper))
        elif sum(value for value, _ in terms if value > 0) > upper:
            return None
    return limits


def _as_total(model: pyo.ConcreteModel, row: LinearRow) -> Constraint | None:
    """Return a row with an upper limit as one over totals, None where stages differ."""
    totals = _totals(model, row.terms)
    if totals is None:
        return None
    upper = row.upper - totals[1]
    return Constraint(name=NAMED.format(row.name), terms=totals[0], upper=upper)


def _over_stages(model: pyo.ConcreteModel, row: LinearRow) -> LinearRow:
    """Return a row with a value, if only 0, in each stage in which what it counts is offered."""
    offered = {"recomputed": model.events.recompute, "paged_in": model.events.page_in}
    terms = {decision: whole(value) for value, decision in row.terms}
    counted = {(family, index[1]) for family, index in terms if family in offered}
    for family, item in sorted(counted):
        for t in offered[family][item]:
            terms.setdefault((family, (t, item)), 0)
    pairs = ((value, decision) for decision, value in terms.items())
    return LinearRow.of(pairs, name=row.name, upper=whole(row.upper))


def _totals(
    model: pyo.ConcreteModel, terms: Iterable[tuple[float, Decision]]
) -> tuple[dict[str, float], float] | None:
    """Return totals with their coefficients, and a constant; None where stages differ.

    The total of page-ins counts the first read of state on storage, which no ``M_in`` does.
    """
    graph, events = model.problem.graph, model.events
    groups: dict[tuple[str, int], list[float]] = {}
    for value, (family, index) in terms:
        item = index[1] if family in ("recomputed", "paged_in") else index
        groups.setdefault((family, item), []).append(value)
    kinds = {
        "recomputed": (Count.RECOMPUTATIONS, graph.nodes, events.recompute),
        "paged_in": (Count.PAGE_INS, graph.tensors, events.page_in),
        "paged_out": (Count.PAGE_OUTS, graph.tensors, None),
    }
    totals: dict[str, float] = {}
    constant = 0.0
    for (family, item), values in groups.items():
        weight = values[0]
        if family in kinds:
            count, items, offered = kinds[family]
            uniform = offered is None or len(values) == len(offered[item])
            if not uniform or min(values) != max(values):
                return None
            totals[f"{count}:{items[item].name}"] = weight
            if family != "paged_in" or item not in model.storage_home:
                continue
            weight = -weight
        elif family not in HOMES:
            return None
        key = f"{Count.RESIDENT}:{graph.tensors[item].name}"
        if family == "resident":
            totals[key] = totals.get(key, 0.0) + weight
        else:  # its home on storage is 1 - resident
            totals[key] = totals.get(key, 0.0) - weight
            constant += weight
    return totals, constant
