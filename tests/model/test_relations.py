"""The relations on a model: every entry of the triangle can be addressed, and no other."""

from dataclasses import replace

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.instances import random_instances, random_state_problems
from kit.own_rows import own_rows_problem
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.backends.compiler import compile_model
from poetmodel.backends.layout import to_standard_form
from poetmodel.errors import ModelError, TooLargeError
from poetmodel.model import build, view
from poetmodel.model.building import build_arrays
from poetmodel.model.relations import Relation
from poetmodel.problem import Problem
from poetmodel.schedule import RELATIONS
from poetmodel.solver import solve

CHOICES = {
    "compact": {},
    "unreduced": {"reductions": False},
    "paper": {"formulation": "paper"},
}


def triangle(name, graph):
    """Return the entries that a relation has by the contract."""
    n = len(graph.nodes)
    if name == "R":
        return {(t, k) for t in range(n) for k in range(t + 1)}
    return {
        (t, i)
        for t in range(n)
        for i, k in enumerate(graph.node_of)
        if (k <= t if name == "M_out" else k < t)
    }


def usable(entry):
    """Return whether an entry is valid in a constraint and in a sum."""
    m = pyo.ConcreteModel()
    m.row = pyo.Constraint(expr=2 * entry + 1 <= 3)
    return m.row.body is not None


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("name", RELATIONS)
def test_every_entry_is_addressable(name, choices):
    """Variable, expression or constant: each entry can be used, and iteration finds them all.

    A stage or index that there is not, or one before its time, is an error.
    """
    problem = skip_problem()
    relation = getattr(build(problem, **choices), name)
    expected = triangle(name, problem.graph)
    assert set(relation) == set(relation.keys()) == expected
    assert len(relation) == len(expected)
    assert all(index in relation for index in expected)
    assert all(usable(relation[index]) for index in expected)
    assert all(usable(entry) for entry in relation.values())
    relation = getattr(build(skip_problem(), **choices), name)
    for index in [(0, 4), (4, 0), (-1, 0), (1, -1), (1, 2), (9, 9)]:
        assert index not in relation
        with pytest.raises((ModelError, KeyError)):
            relation[index]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("R", "node k with 0 <= k <= t < 4"),
        ("S_RAM", "tensor i with node\\(i\\) < t < 4"),
        ("M_out", "tensor i with node\\(i\\) <= t < 4"),
    ],
)
def test_the_error_says_where_a_relation_is_defined(name, words):
    """The error for counts from one, or swapped indices, states the order of stage and tensor."""
    with pytest.raises(ModelError, match=words):
        getattr(build(skip_problem()), name)[4, 4]


@pytest.mark.parametrize("index", ["x", 3, (1,), (1, 0, 0), (1.0, 0), (None, 0)])
def test_what_is_no_pair_of_whole_numbers_raises(index):
    """Only a stage and an index address an entry; integers of NumPy are accepted."""
    relation = build(skip_problem()).S_RAM
    assert index not in relation
    with pytest.raises(ModelError, match="no such entry"):
        relation[index]
    assert relation[np.int64(2), np.int32(0)] is relation[2, 0]


@pytest.mark.parametrize("reductions", [True, False])
def test_several_outputs_have_entries_of_their_own(reductions):
    """R is over nodes, the others over tensors: of every graph, and where node 2 makes 2 and 3."""
    graph = skip_graph(mask=True)
    problem = Problem(graph, even_costs(graph), ram=13)
    for stated in (problem, *random_instances(40, (1, 6), seed=5)):
        model = build(stated, reductions=reductions)
        for name in RELATIONS:
            relation = getattr(model, name)
            expected = triangle(name, stated.graph)
            assert set(relation) == expected
            assert len(relation) == len(expected)
    model = build(problem, reductions=reductions)
    assert (3, 3) in model.S_RAM
    assert (2, 3) in model.M_out
    assert (2, 3) not in model.M_in
    assert (3, 4) not in model.S_RAM
    assert (3, 4) in model.M_out


def test_single_entries():
    """Entries that the formulation fixes have a value before any solve, the rest has none.

    A relation is a mapping, also in `get`. Tensors on storage are there from the start, and
    never paged out. The function of a relation never gets an index that does not exist.
    """
    model = build(skip_problem())
    assert pyo.value(model.R[2, 2]) == 1
    assert pyo.value(model.M_out[3, 0]) == 0
    assert pyo.value(model.S_RAM[3, 1]) == 0  # `b` is dominated: nothing reads it after stage 2
    assert pyo.value(model.R[3, 0], exception=False) is None
    assert model.S_AUX[2, 0] is model.S_AUX[3, 0]
    assert model.M_out[0, 0] is model.S_AUX[3, 0]
    relation = build(skip_problem()).S_RAM
    assert relation.get((0, 0)) is None
    assert relation.get((0, 0), 5) == 5
    assert relation.get((2, 0)) is relation[2, 0]
    graph = skip_graph(on_aux=True)
    model = build(Problem(graph, even_costs(graph), ram=13))
    assert {pyo.value(model.S_AUX[t, 0]) for t in range(1, 4)} == {1}
    assert {pyo.value(model.M_out[t, 0]) for t in range(4)} == {0}
    asked = []

    def entry(t, k):
        asked.append((t, k))
        return 0

    relation = Relation("S_RAM", skip_graph(), entry)
    list(relation.values())
    assert (0, 0) not in relation
    assert set(asked) == triangle("S_RAM", skip_graph())


# -- the Pyomo model is the model of arrays --------------------------------------------------------
def problems(choice):
    """Yield problems with several outputs, own rows and state."""
    if choice == "paper":
        limits = {"minimize": "energy", "energy_budget": None}
        yield from (replace(p, **limits) for p in random_instances(15, (2, 6), seed=3))
    else:
        yield from random_instances(15, (2, 6), seed=4)
        yield from (own_rows_problem(f"view/{number}") for number in range(15))
        yield from (problem for problem in random_state_problems(10, (2, 5), seed=5))


def lines(form):
    """Return columns and rows of a form, by name."""
    arrays = (form.objective, form.lower, form.upper, form.integer)
    columns = sorted(
        (form.column_name(j), *(array[j].item() for array in arrays)) for j in range(form.n_columns)
    )
    matrix, rows = form.matrix.tocsr(), []
    for i in range(form.n_rows):
        span = slice(matrix.indptr[i], matrix.indptr[i + 1])
        terms = zip(map(form.column_name, matrix.indices[span]), matrix.data[span], strict=True)
        rows.append((form.row_name(i), form.row_lower[i], form.row_upper[i], sorted(terms)))
    return columns, rows


@pytest.mark.parametrize("choice", CHOICES)
def test_the_view_says_what_the_arrays_say(choice):
    """Compiled from Pyomo expressions, from unchanged rows, or from arrays alone."""
    for problem in problems(choice):
        if choice == "paper" and (problem.graph.version > 1 or problem.graph.on_aux):
            continue
        expected = lines(to_standard_form(build_arrays(problem, **CHOICES[choice])))
        model = build(problem, **CHOICES[choice])
        assert lines(compile_model(model)) == expected
        if not problem.constraints:  # Pyomo writes some keys of theirs in another way
            del model.arrays
            assert lines(compile_model(model)) == expected


def test_memory_rows_that_are_left_out_are_solved_all_the_same():
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
def test_no_other_solver_misses_memory_rows(solver, tmp_path):
    """Whatever reads the model ends with an error that names the option."""
    model = build(skip_problem(), memory_rows=False)
    path = str(tmp_path / "model.lp")
    read = {"lp": lambda: model.write(path), "appsi_highs": pyo.SolverFactory("appsi_highs").solve}
    with pytest.raises(ValueError, match="build_with_memory_rows_True"):
        read[solver](*[model] * (solver != "lp"))


def test_too_many_terms_name_the_option(monkeypatch):
    """Large models require an option before Pyomo's objects are made."""
    monkeypatch.setattr(view, "MAX_TERMS", 2)
    with pytest.raises(TooLargeError, match="omits them"):
        build(skip_problem())
    whole = build(skip_problem(), memory_rows=True)
    assert len(whole.memory) == len(whole.arrays.row_keys("memory"))


# -- changes -------------------------------------------------------------------------------------
def changed():
    """Return a model of four nodes."""
    graph = skip_graph()
    return build(Problem(graph, even_costs(graph), ram=13))


def names(model):
    """Return the names of the rows of a model."""
    form = compile_model(model)
    return [form.row_name(i) for i in range(form.n_rows)]


def test_looking_at_rows_changes_nothing():
    """Expressions are those of Pyomo; row ``[t, k]`` is of step ``k`` of stage ``t``.

    Each memory row can bind.
    """
    from pyomo.repn import generate_standard_repn

    model = changed()
    before = lines(compile_model(model))
    for row in model.component_data_objects(pyo.Constraint):
        assert row.body is not None
    assert lines(compile_model(model)) == before
    assert all(k <= t for t, k in model.memory)
    for row in model.memory.values():
        assert sum(generate_standard_repn(row.body).linear_coefs) > row.ub


def test_rows_can_be_deactivated_deleted_and_stated_anew():
    """All changes of constraints that Pyomo supports are supported for rows."""
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
    assert (form.row_upper[row], form.matrix[[row]].nnz) == (0.25, 1)
    model.memory.deactivate()
    assert not any(name.startswith("memory") for name in names(model))


def test_fixed_variables_are_constants_of_rows():
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
    assert "inputs[" in str(compile_model(model).describe_contradiction())
