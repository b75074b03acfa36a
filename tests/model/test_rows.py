"""Rows of a model are constraints like any other, whether anybody has looked at one or not."""

from __future__ import annotations

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.worked import even_costs, skip_graph
from poetmodel.backends.compiler import compile_model
from poetmodel.model import build
from poetmodel.model.rows import RowConstraint, row_constraint
from poetmodel.problem import LinearRow, Problem


def small_model() -> pyo.ConcreteModel:
    """Return ``1 <= x0 + 2 x1``, ``3 x0 - x1 <= 2`` and ``x0 = 1``, as rows of both kinds."""
    m = pyo.ConcreteModel()
    m.x = pyo.Var(range(2), bounds=(0, 3))
    index = np.array([0, 1], dtype=np.int32)
    below = LinearRow(space=[m.x[0], m.x[1]], index=index, values=np.array([3.0, -1.0]), upper=2)
    m.least = row_constraint([(7,)], lambda _: LinearRow.of([(1, m.x[0]), (2, m.x[1])], lower=1))
    m.most = RowConstraint({(4, 5): below})
    m.equal = row_constraint([(0,)], lambda _: LinearRow.of([(1, m.x[0])], lower=1, upper=1))
    m.objective = pyo.Objective(expr=m.x[0] + m.x[1])
    return m


def arrays(model: pyo.ConcreteModel) -> tuple[list[str], list[list[float]], list[list[float]]]:
    """Return names, coefficients and sides of the rows of a model."""
    form = compile_model(model)
    sides = [form.row_lower.tolist(), form.row_upper.tolist()]
    return [row.name for row in form.rows], form.matrix.toarray().tolist(), sides


def test_a_row_says_what_it_states() -> None:
    """Sides and body are there as Pyomo knows them."""
    m = small_model()
    m.x[0].value, m.x[1].value = 2, 1
    assert (m.least[7].lb, m.least[7].ub, pyo.value(m.least[7].body)) == (1, None, 4)
    assert (m.most[4, 5].lb, m.most[4, 5].ub, pyo.value(m.most[4, 5].body)) == (None, 2, 5)
    assert m.equal[0].equality
    assert list(m.most) == [(4, 5)]


def test_looking_at_rows_changes_nothing() -> None:
    """A model compiles to the same arrays before and after its expressions were made."""
    m = small_model()
    before = arrays(m)
    assert str(m.most[4, 5].expr) == "3.0*x[0] - x[1]  <=  2"
    for row in m.component_data_objects(pyo.Constraint):
        assert row.expr is not None
    assert arrays(m) == before
    assert before[0] == ["least[7]", "most[4,5]", "equal[0]"]


@pytest.mark.parametrize("looked", [False, True])
def test_fixed_variables_are_constants_of_rows(looked: bool) -> None:
    """A user may fix any variable; rows left without one hold or are the contradiction."""
    m = small_model()
    if looked:
        assert m.most[4, 5].expr is not None
    m.x[0].fix(1)
    names, rows, sides = arrays(m)
    assert (names, rows) == (["least[7]", "most[4,5]"], [[2.0], [-1.0]])
    assert sides == [[0.0, -np.inf], [np.inf, -1.0]]
    m.x[0].fix(2)
    assert "equal[0]" in str(compile_model(m).contradiction())


def test_rows_can_be_deactivated_and_stated_anew() -> None:
    """What users may do with constraints they may do with rows."""
    m = small_model()
    m.least.deactivate()
    m.most[4, 5].set_value(m.x[0] + m.x[1] <= 1)
    names, rows, _ = arrays(m)
    assert (names, rows) == (["most[4,5]", "equal[0]"], [[1.0, 1.0], [1.0, 0.0]])


def test_a_copy_has_rows_of_its_own() -> None:
    """Rows of a clone are about its own variables."""
    m = small_model()
    copy = m.clone()
    copy.x[0].fix(0)
    assert len(arrays(m)[0]) == 3
    assert not m.x[0].fixed
    assert arrays(m) == arrays(small_model())
    copy.x[0].unfix()
    assert arrays(copy) == arrays(m)


def test_memory_rows_are_found_by_step() -> None:
    """``model.memory[t, k]`` is the row of step ``k`` of stage ``t``, each of which can bind."""
    graph = skip_graph()
    model = build(Problem(graph, even_costs(graph), ram=13))
    assert all(k <= t for t, k in model.memory)
    for row in model.memory.values():
        coefficients = compile_model_row(row)
        assert sum(coefficients) > row.ub


def compile_model_row(row: object) -> list[float]:
    """Return the coefficients of a row."""
    from pyomo.repn import generate_standard_repn

    return list(generate_standard_repn(row.body).linear_coefs)  # type: ignore[attr-defined]
