"""User constraints on models, and problems with rules that are solved faster."""

import logging

import pyomo.environ as pyo
import pytest

from kit.worked import comb_problem, skip_problem
from poetmodel.model.building import build
from poetmodel.result import Status
from poetmodel.solver import solve
from poetmodel.solver.restatement import GUIDE, may_be_rules


def written(m):
    """Return the bytes that a schedule of a model writes."""
    return sum(m.problem.graph.tensor_bytes[i] * entry for (_, i), entry in m.M_out.items())


def again(m, k):
    """Return how often node `k` is recomputed."""
    return sum(m.R[t, k] for t in range(k + 1, len(m.problem.graph.nodes)))


def extended(problem, *relations, reductions=False):
    """Return a model to which relations are added."""
    model = build(problem, reductions=reductions)
    model.mine = pyo.ConstraintList()
    for relation in relations:
        model.mine.add(relation(model))
    return model


@pytest.mark.parametrize("reductions", [True, False])
@pytest.mark.parametrize(
    ("relations", "may_be"),
    [
        ([], False),
        ([lambda m: written(m) <= 3], True),
        ([lambda m: again(m, 0) + sum(m.M_in.values()) <= 1], True),
        ([lambda m: sum(m.S_RAM[3, i] for i in range(2)) <= 1], False),
        ([lambda m: written(m) <= 3, lambda m: m.S_RAM[3, 0] <= 0], False),
    ],
)
def test_rules_count_decisions_alone(relations, may_be, reductions):
    """Presence in RAM is no decision that totals count; a model without additions has no rules."""
    assert may_be_rules(extended(skip_problem(), *relations, reductions=reductions)) == may_be


def test_an_objective_may_be_a_rule_too():
    """Unless it has variables of its own."""
    model = extended(skip_problem())
    model.objective.deactivate()
    model.own = pyo.Objective(expr=written(model))
    assert may_be_rules(model)
    model.own.deactivate()
    model.slack = pyo.Var(bounds=(0, 1))
    model.other = pyo.Objective(expr=written(model) + model.slack)
    assert not may_be_rules(model)


def test_large_models_that_a_problem_may_state_are_logged(caplog):
    """From 50 nodes on, where `subject_to` is measured to be several times faster."""
    for teeth, warned in ((10, False), (25, True)):
        model = build(comb_problem(teeth, ram="100%"))
        solve(model)
        assert not caplog.records
        model.few = pyo.Constraint(expr=sum(model.M_out.values()) <= 3)
        solve(model)
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * warned
        assert all(GUIDE in record.getMessage() for record in caplog.records)


def test_reason_of_a_reduced_model_points_to_rules():
    """In 13 B a tensor is paged or recomputed: without both there is no schedule."""
    forbidden = lambda m: sum(m.M_out.values()) + again(m, 0) <= 0  # noqa: E731
    model = extended(skip_problem(), forbidden, reductions=True)
    result = solve(model)
    assert result.status == Status.INFEASIBLE
    assert "problem.subject_to" in result.reason
