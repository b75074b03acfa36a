"""Each component of each formulation adds the recorded rows to one small problem.

Files are ``golden/<formulation>.<component>.lp``: one line for each variable, constraint and
objective that the component adds, in a plain form of our own, compared up to order. After a change
that is meant, write them anew and read the difference::

    POETMODEL_WRITE_GOLDEN=1 python -m pytest tests/model/test_golden.py

The problem is `worked.skip_graph` with a workspace of 1 byte at `b`, with two outputs of `c` except
for ``paper``, costs that rise from node to node, and every limit there is, each of which binds::

    RAM 13 B (all kept: 15)   storage 9 B of 15   deadline 12 s of 10 s   energy budget 12 J of 10 J

``constraints``, ``stage_limits`` and what is called ``own-...`` are of the same problem with four
constraints of a user's own and, but for ``paper``, a fifth that counts in stages and an objective
of his own; see `golden_problem`. ``state-...`` are of a training step with state and operators in
place; see `state_problem`.
"""

import os
from pathlib import Path

import pyomo.environ as pyo
import pytest
from pyomo.repn import generate_standard_repn

from kit.worked import costs_of, even_costs, make_state_node, make_update_node, skip_graph
from poetmodel.graph import Graph, operation
from poetmodel.model import FORMULATIONS, build
from poetmodel.model.arrays import Model
from poetmodel.model.compact import COMPACT
from poetmodel.model.events import find_events, recomputable_nodes
from poetmodel.model.grouping import Grouping
from poetmodel.model.paper import PAPER
from poetmodel.model.unreduced import UNREDUCED
from poetmodel.model.view import to_pyomo
from poetmodel.problem import Problem

FOLDER = Path(__file__).parent / "golden"
SHIPPED = (*FORMULATIONS.values(), UNREDUCED)
OWN = {
    PAPER.name: ("constraints",),
    COMPACT.name: ("constraints", "stage_limits", "own-variables", "own-once", "own-objective"),
    UNREDUCED.name: ("constraints", "stage_limits", "own-objective"),
}
"""Files of the problem with own constraints; its other components state what the others do."""
STATE = {
    PAPER.name: (),
    COMPACT.name: (
        "state-variables",
        "state-homes_kept",
        "state-from_storage",
        "state-inputs",
        "state-memory",
        "state-storage",
        "state-objective",
    ),
    UNREDUCED.name: (
        "state-variables",
        "state-inputs",
        "state-on_storage",
        "state-memory",
        "state-storage",
        "state-objective",
    ),
}
"""Files of the problem with state and operators in place."""
APART = ("constraints", "homes_kept", "stage_limits")
"""Components that state nothing about the first problem."""
CASES = [
    pytest.param(formulation, name, id=f"{formulation.name}.{name}")
    for formulation in SHIPPED
    for name in (
        *(part.name for part in formulation.components if part.name not in APART),
        *OWN[formulation.name],
        *STATE[formulation.name],
    )
]


def golden_problem(formulation, *, own=False):
    """Return the problem of the files."""
    paper = formulation == PAPER
    graph = skip_graph(mask=not paper, workspace=True)
    limits = {} if paper else {"aux_bytes": 9, "energy_budget": 12}
    problem = Problem(graph, even_costs(graph), ram=13, deadline=12, **limits)
    if not own:
        return problem
    problem = problem.subject_to(
        upper=lambda v: v.recomputations["a"] + 2 * v.page_ins["a"] <= 1,
        lower=lambda v: v.bytes_written >= 4,
        equality=lambda v: v.page_ins["b"] + v.recomputations["b"] == v.page_outs["d"],
        real=lambda v: v.energy_j - 0.75 * v.transfer_s <= 10.5,
    )
    if paper:
        return problem
    problem = problem.subject_to(
        calm=lambda v: v.page_ins["d", "a"] + 2 * v.page_ins["c", "a"] + v.recomputations[3, 0] <= 1
    )
    return problem.minimizing(lambda v: v.energy_j - 3 * v.page_outs["a"] - 2 * v.page_ins["b"])


def state_problem():
    """Return the problem of the files called ``state-...``.

    ``h = f(x, w)`` is written over `x`, ``g = b(h, w)`` may be recomputed from `h`, and ``w+``
    replaces `w`; `v` is only read.
    """
    graph = Graph(
        name="step",
        nodes=(
            operation("x", output_bytes=10),
            make_state_node("w", 8),
            make_state_node("v", 3),
            operation("h", output_bytes=6, inputs=("x", "w"), in_place={"h": "x"}),
            operation("g", output_bytes=7, inputs=("h", "v"), in_place={"g": "h"}),
            operation("z", output_bytes=5, inputs=("h",)),
            make_update_node("u", "g", w=8),
        ),
    )
    costs = costs_of(
        graph,
        [1, 0, 0, 2, 3, 4, 5],
        [5, 0, 0, 4, 3, 2, 1],
        [(1 + i, 2 + i) for i in range(7)],
        [(2 + i, 1 + i) for i in range(7)],
    )
    return Problem(graph, costs, ram=30, aux_bytes=20)


def stated(formulation, problem):
    """Build a formulation component by component; return the lines that each one adds."""
    m = Model(problem, formulation, exact=True)
    if formulation == COMPACT:
        n, rows = len(problem.graph.nodes), problem.stage_limits
        m.grouping = Grouping.one_group_per_stage(n, len(rows))
        offered = recomputable_nodes(problem)
        m.events = find_events(problem, range(n), recomputable=offered, counted_rows=rows)
    added = {}
    for part in formulation.components:
        before = names_in(m)
        part.build(m)
        added[part.name] = names_in(m) - before
    whole = to_pyomo(m)
    return {
        name: sorted(line for one in names for line in written(whole.component(one)))
        for name, names in added.items()
    }


def names_in(model):
    """Return the names of the present parts of a model."""
    return {*model.families, *model.row_families, *["objective"] * model.has_objective}


def written(component):
    """Yield one line for each variable, constraint or objective; sets are omitted."""
    for item in component.values() if component.ctype is not pyo.Set else ():
        if component.ctype is pyo.Var:
            yield variable_line(item)
        elif component.ctype is pyo.Objective:
            yield f"{item.name}: minimize {terms(item.expr)}"
        elif component.ctype is pyo.Constraint:
            yield constraint_line(item)


def variable_line(variable):
    """Return the line of a variable: its domain and bounds."""
    if variable.fixed:
        return f"{variable.name} = {number(variable.value)}"
    kind = "binary" if variable.is_binary() else "real"
    return f"{variable.name} {kind} from {number(variable.lb)} to {number(variable.ub)}"


def constraint_line(constraint):
    """Return a constraint with its variables, in the given order, on the left."""
    lower, body, upper = constraint.to_bounded_expression(evaluate_bounds=True)
    repn = generate_standard_repn(body, compute_values=False)
    shift = pyo.value(repn.constant)
    sides = [
        f"{sign} {number(side - shift)}"
        for sign, side in ((">=", lower), ("<=", upper))
        if side is not None
    ]
    if len(sides) == 2 and lower == upper:
        sides = [f"= {number(upper - shift)}"]
    assert len(sides) == 1, constraint.name
    return f"{constraint.name}: {terms(body, constant=False)} {sides[0]}"


def terms(expression, *, constant=True):
    """Return a linear expression with its terms in the order of their names."""
    repn = generate_standard_repn(expression, compute_values=False)
    assert repn.is_linear(), expression
    parts = [
        f"{number(pyo.value(coefficient))} {variable.name}"
        for coefficient, variable in zip(repn.linear_coefs, repn.linear_vars, strict=True)
    ]
    shift = pyo.value(repn.constant)
    parts = sorted(parts, key=lambda part: part.split(" ", 1)[1])
    if constant and shift:
        parts.append(number(shift))
    return " + ".join(parts).replace("+ -", "- ") or "0"


def number(value):
    """Return a number short enough to compare on any machine."""
    return f"{value + 0.0:.9g}"


def file_of(formulation, component):
    """Return the file of a component."""
    return FOLDER / f"{formulation.name}.{component}.lp"


def same_lines(found, expected):
    """Return whether two statements agree up to order."""
    return sorted(found) == sorted(expected)


@pytest.mark.parametrize(("formulation", "component"), CASES)
def test_component_states_what_its_file_says(formulation, component):
    """No variable, row or coefficient changes unseen."""
    if component in STATE[formulation.name]:
        problem = state_problem()
    else:
        problem = golden_problem(formulation, own=component in OWN[formulation.name])
    lines = stated(formulation, problem)[component.removeprefix("own-").removeprefix("state-")]
    path = file_of(formulation, component)
    if os.environ.get("POETMODEL_WRITE_GOLDEN"):
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    assert lines, "the problem must make the component state something"
    assert path.exists(), f"{path.name} is missing; the docstring of this file says how to write it"
    assert same_lines(lines, path.read_text(encoding="utf-8").splitlines())


def test_every_file_belongs_to_a_component():
    """After a component is renamed, no file of its old name remains."""
    expected = {file_of(*case.values).name for case in CASES}
    assert {path.name for path in FOLDER.iterdir()} == expected


@pytest.mark.parametrize(
    ("formulation", "which"),
    [
        pytest.param(formulation, which, id=f"{formulation.name}-{which}")
        for formulation in SHIPPED
        for which in ("stated", "own", "state")
        if formulation != PAPER or which != "state"  # it knows none
    ],
)
def test_build_states_nothing_beside_the_components(formulation, which):
    """The model of `build` has exactly the rows and columns of the files."""
    problem = golden_problem(formulation, own=which == "own")
    if which == "state":
        problem = state_problem()
    if formulation == UNREDUCED:
        model = build(problem, reductions=False)
    else:
        model = build(problem, formulation.name)
    kinds = (pyo.Var, pyo.Constraint, pyo.Objective)
    built = [line for item in model.component_objects(kinds) for line in written(item)]
    expected = [line for lines in stated(formulation, problem).values() for line in lines]
    assert same_lines(built, expected)
