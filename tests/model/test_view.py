"""The Pyomo model is the model of arrays: all of it, in whatever way users change it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.instances import random_instances, random_state_problems
from kit.own_rows import own_rows_problem
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.backends.compiler import compile_model
from poetmodel.backends.layout import form_of
from poetmodel.errors import TooLargeError
from poetmodel.model import build, view
from poetmodel.model.building import state
from poetmodel.problem import Problem
from poetmodel.solver import solve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.backends.standard_form import StandardForm

CHOICES: dict[str, dict[str, Any]] = {
    "compact": {},
    "events": {"stages": "events"},
    "unreduced": {"reductions": False},
    "paper": {"formulation": "paper"},
}


def problems(choice: str) -> Iterator[Problem]:
    """Yield problems with several outputs, own rows and state."""
    if choice == "paper":
        limits = {"minimize": "energy", "energy_budget": None}
        yield from (replace(p, **limits) for p in random_instances(15, (2, 6), seed=3))
    else:
        yield from random_instances(15, (2, 6), seed=4)
        yield from (own_rows_problem(f"view/{number}") for number in range(15))
        yield from (problem for problem in random_state_problems(10, (2, 5), seed=5))


def lines(form: StandardForm) -> tuple[list[Any], list[Any]]:
    """Return what columns and rows of a form say, by name."""
    columns = sorted(
        (form.column_name(j), *numbers)
        for j, numbers in enumerate(
            zip(
                form.objective.tolist(),
                form.lower.tolist(),
                form.upper.tolist(),
                form.integer.tolist(),
                strict=True,
            )
        )
    )
    matrix, rows = form.matrix.tocsr(), []
    for i in range(form.n_rows):
        span = slice(matrix.indptr[i], matrix.indptr[i + 1])
        terms = zip(map(form.column_name, matrix.indices[span]), matrix.data[span], strict=True)
        rows.append((form.row_name(i), form.row_lower[i], form.row_upper[i], sorted(terms)))
    return columns, rows


@pytest.mark.parametrize("choice", CHOICES)
def test_the_view_says_what_the_arrays_say(choice: str) -> None:
    """Compiled from Pyomo expressions, from rows that nobody changed, or from arrays alone."""
    for problem in problems(choice):
        if choice == "paper" and (problem.graph.version > 1 or problem.graph.on_aux):
            continue
        expected = lines(form_of(state(problem, **CHOICES[choice])))
        model = build(problem, **CHOICES[choice])
        assert lines(compile_model(model)) == expected
        if not problem.constraints:  # Pyomo writes some keys of theirs in another way
            del model.arrays
            assert lines(compile_model(model)) == expected


def test_memory_rows_that_are_left_out_are_solved_all_the_same() -> None:
    """By `solve`, which has them as arrays."""
    for problem in random_instances(20, (2, 6), seed=6):
        short = build(problem, memory_rows=False)
        assert lines(compile_model(short)) == lines(compile_model(build(problem)))
    short = build(skip_problem(recompute=False), memory_rows=False)
    assert solve(short).overhead_j == 2.0
    copy = short.clone()
    copy.never = pyo.Constraint(expr=sum(copy.M_out.values()) <= 0)
    assert solve(copy).schedule is None


@pytest.mark.parametrize("solver", ["appsi_highs", "lp"])
def test_no_other_solver_misses_memory_rows(solver: str, tmp_path: Any) -> None:
    """Whatever reads the model ends with an error that names the option."""
    model = build(skip_problem(), memory_rows=False)
    path = str(tmp_path / "model.lp")
    read = {"lp": lambda: model.write(path), "appsi_highs": pyo.SolverFactory("appsi_highs").solve}
    with pytest.raises(ValueError, match="build_with_memory_rows_True"):
        read[solver](*[model] * (solver != "lp"))


def test_too_many_terms_name_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for millions of Pyomo's objects without having asked for them."""
    monkeypatch.setattr(view, "MOST_TERMS", 2)
    with pytest.raises(TooLargeError, match="leaves them out"):
        build(skip_problem())
    whole = build(skip_problem(), memory_rows=True)
    assert len(whole.memory) == len(whole.arrays.row_keys("memory"))


# -- changes -------------------------------------------------------------------------------------


def changed() -> pyo.ConcreteModel:
    """Return a model of four nodes."""
    graph = skip_graph()
    return build(Problem(graph, even_costs(graph), ram=13))


def names(model: pyo.ConcreteModel) -> list[str]:
    """Return the names of the rows of a model."""
    form = compile_model(model)
    return [form.row_name(i) for i in range(form.n_rows)]


def test_looking_at_rows_changes_nothing() -> None:
    """Expressions are there as Pyomo knows them."""
    model = changed()
    before = lines(compile_model(model))
    for row in model.component_data_objects(pyo.Constraint):
        assert row.body is not None
    assert lines(compile_model(model)) == before


def test_rows_can_be_deactivated_deleted_and_stated_anew() -> None:
    """What users may do with constraints they may do with rows."""
    model, before = changed(), names(changed())
    first, second, third = list(model.memory)[:3]
    model.memory[first].deactivate()
    del model.memory[second]
    left = model.memory[third]
    left.set_value(model.S_RAM[1, 0] <= 0.25)
    form = compile_model(model)
    gone = {model.memory[first].name, f"memory[{second[0]},{second[1]}]"}
    assert names(model) == [name for name in before if name not in gone]
    row = names(model).index(left.name)
    assert form.row_upper[row] == 0.25
    assert form.matrix[[row]].nnz == 1
    model.memory.deactivate()
    assert not any(name.startswith("memory") for name in names(model))


def test_fixed_variables_are_constants_of_rows() -> None:
    """A user may fix any variable; a row that no value keeps then is the contradiction."""
    model = changed()
    model.S_RAM[1, 0].fix(1)
    form = compile_model(model)
    assert model.S_RAM[1, 0].name not in map(form.column_name, range(form.n_columns))
    del model.arrays
    again = compile_model(model)
    assert np.allclose(form.row_upper, again.row_upper)
    model = changed()
    for name in ("kept", "recomputed", "paged_in"):
        for variable in getattr(model, name).values():
            variable.fix(0)
    assert "inputs[" in str(compile_model(model).contradiction())


def test_memory_rows_are_found_by_step() -> None:
    """``model.memory[t, k]`` is the row of step ``k`` of stage ``t``, each of which can bind."""
    from pyomo.repn import generate_standard_repn

    model = changed()
    assert all(k <= t for t, k in model.memory)
    for row in model.memory.values():
        assert sum(generate_standard_repn(row.body).linear_coefs) > row.ub
