"""Models that users extend, in the words of `subject_to` and `minimizing`."""

import logging
import math

import pyomo.environ as pyo
import pytest

from kit.commands import training_step, write_graph
from kit.worked import bench_device, comb_problem, skip_problem
from poetmodel.device import Costs
from poetmodel.graph import Graph
from poetmodel.model.building import build
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.solver import solve
from poetmodel.solver.restatement import restate_as_call


def written(m):
    """Return the bytes that a schedule of a model writes."""
    return sum(m.problem.graph.tensor_bytes[i] * entry for (_, i), entry in m.M_out.items())


def again(m, k):
    """Return how often node `k` is recomputed."""
    return sum(m.R[t, k] for t in range(k + 1, len(m.problem.graph.nodes)))


def extended(problem, *relations, reductions=False):
    """Return a model to which relations are added, as `mine`, or one rule of several."""
    model = build(problem, reductions=reductions)
    if len(relations) == 1:
        model.mine = pyo.Constraint(expr=relations[0](model))
    elif relations:
        model.block = pyo.Block()
        model.block.each = pyo.ConstraintList()
        for relation in relations:
            model.block.each.add(relation(model))
    return model


@pytest.mark.parametrize(
    ("relation", "said"),
    [
        (lambda m: written(m) <= 3, "v.bytes_written <= 3"),
        (lambda m: written(m) >= 4, "v.bytes_written >= 4"),
        (lambda m: (1, written(m) / 4, 2), "(1, 0.25 * v.bytes_written, 2)"),
        (lambda m: sum(m.M_in.values()) == 0, "sum(v.page_ins.values()) == 0"),
        (
            lambda m: again(m, 0) - 2 * again(m, 1) >= -1,
            'v.recomputations["a"] - 2 * v.recomputations["b"] >= -1',
        ),
        (
            lambda m: again(m, 0) + sum(m.M_out[t, 0] for t in range(4)) <= 1,
            'v.recomputations["a"] + v.page_outs["a"] <= 1',
        ),
        (
            lambda m: m.R[3, 0] + m.M_in[2, 0] + 1 <= 1,
            'v.recomputations[3, "a"] + v.page_ins[2, "a"] <= 0',
        ),
    ],
)
def test_sums_over_totals_are_said(relation, said):
    """The problem that the words state has the optimum of the unreduced model."""
    problem = skip_problem()
    model = extended(problem, relation)
    assert restate_as_call(model) == f"problem.subject_to(mine=lambda v: {said})"
    stated = eval(restate_as_call(model) or "", {"problem": problem})  # noqa: S307 - as users run it
    direct, whole = solve(stated, gap=0.0), solve(model, gap=0.0)
    assert direct.status == whole.status
    assert direct.value == whole.value


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ((-math.inf, 3), "v.bytes_written <= 3"),
        ((4, math.inf), "v.bytes_written >= 4"),
        ((-math.inf, math.inf), None),
        ((math.inf, math.inf), None),
    ],
)
def test_infinite_limits_are_not_said(limits, said):
    """Such a limit is none, and `subject_to` would refuse the number."""
    call = None if said is None else f"problem.subject_to(mine=lambda v: {said})"
    lower, upper = limits
    model = extended(skip_problem(), lambda m: (lower, written(m), upper))
    assert restate_as_call(model) == call


def test_infinite_parameters_are_not_said():
    """A parameter may state a limit that does not apply."""
    model = build(skip_problem(), reductions=False)
    model.limit = pyo.Param(initialize=math.inf, mutable=True, within=pyo.Any)
    model.mine = pyo.Constraint(expr=(1, written(model), model.limit))
    said = "problem.subject_to(mine=lambda v: v.bytes_written >= 1)"
    assert restate_as_call(model) == said


def test_rows_without_a_limit_are_left_out():
    """The further rows of a rule are said as if it had only those."""
    restated = restate_as_call(
        extended(skip_problem(), lambda m: again(m, 0) <= math.inf, lambda m: again(m, 1) <= 1)
    )
    assert restated == 'problem.subject_to(block_each=lambda v: v.recomputations["b"] <= 1)'


def test_rules_of_several_rows_and_objectives_are_said():
    """The first row stands for a rule; a replaced objective is said beside the rules."""
    model = extended(skip_problem(), lambda m: again(m, 0) <= 1, lambda m: again(m, 1) <= 1)
    rule = 'subject_to(block_each=lambda v: [v.recomputations["a"] <= 1, ...])'
    assert restate_as_call(model) == f"problem.{rule}"
    model.objective.deactivate()
    model.mine = pyo.Objective(expr=written(model) + 3 * sum(model.M_in.values()))
    minimized = "minimizing(lambda v: v.bytes_written + 3 * sum(v.page_ins.values()))"
    assert restate_as_call(model) == f"problem.{rule}.{minimized}"
    model = extended(skip_problem())
    for number in range(6):
        model.add_component(f"r{number}", pyo.Constraint(expr=written(model) <= number))
    assert (restate_as_call(model) or "").endswith("... 2 more)")


def test_homes_are_said(tmp_path):
    """A home on storage is one that is not in RAM."""
    graph = Graph.load(write_graph(tmp_path / "step.graph.json", training_step()))
    problem = Problem(graph, Costs.estimate(graph, bench_device()), ram=1140)
    w1 = graph.tensor_index["w1"]
    words = 'problem.subject_to(mine=lambda v: v.resident["w1"] >= 1)'
    for relation in (lambda m: m.resident[w1] >= 1, lambda m: m.storage_home[w1] <= 0):
        said = restate_as_call(extended(problem, relation, reductions=True))
        assert (said or "").replace("-v", "v").replace("<= -1", ">= 1") == words


def test_page_ins_of_state_are_counted_in_stages():
    """Totals also count first reads, which no variable of a model does."""
    graph = Graph.from_dict(training_step())
    problem = Problem(graph, Costs.estimate(graph, bench_device()), ram="75%")
    state = [graph.tensor_index[name] for name in ("w1", "w2")]
    model = extended(problem, lambda m: sum(m.M_in[t, i] for t, i in m.M_in if i in state) <= 1)
    restated = restate_as_call(model) or ""
    assert restated.startswith('problem.subject_to(mine=lambda v: v.page_ins[2, "w1"] + ')
    stated = problem.subject_to(
        mine=lambda v: sum(v.page_ins[t, i] for t, i in model.M_in if i in state) <= 1
    )
    direct, whole = solve(stated, gap=0.0), solve(model, gap=0.0)
    assert (direct.status, direct.value) == (whole.status, whole.value)
    # Lower limits and objectives cannot count in stages.
    assert restate_as_call(extended(problem, lambda m: sum(m.M_in.values()) >= 1)) is None
    model.mine.deactivate()
    model.objective.set_value(sum(model.M_in.values()))
    assert restate_as_call(model) is None


def test_sums_of_all_transfers_are_not_those_of_activations():
    """In a graph with state, they would include first reads and write-backs."""
    graph = Graph.from_dict(training_step())
    problem = Problem(graph, Costs.estimate(graph, bench_device()), ram="75%")
    state = {*graph.state_tensors, *graph.state_of}
    for name in ("M_in", "M_out"):
        model = build(problem, reductions=False)
        transfers = model.component(name)
        terms = [transfers[t, i] for t, i in transfers if i not in state]
        model.mine = pyo.Constraint(expr=sum(terms) <= 0)
        restated = restate_as_call(model) or ""
        assert '["x"] + ' in restated
        assert "values()" not in restated


def test_a_maximized_objective_is_minimized_with_other_signs():
    """The objective of the problem counts as changed if its sense is."""
    problem = skip_problem()
    model = extended(problem, lambda m: sum(m.M_in.values()) <= 3)
    model.objective.sense = pyo.maximize
    assert ").minimizing(lambda v: -100 * v.recomputations" in (restate_as_call(model) or "")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.M_out[0, 0].fix(0),
        lambda m: m.R[2, 2].fix(0),
        lambda m: m.M_out[0, 0].setub(0),
        lambda m: m.once.deactivate(),
        lambda m: m.once[next(iter(m.once))].set_value(m.M_out[0, 0] <= 1),
        lambda m: setattr(m, "held", pyo.Constraint(expr=m.S_RAM[2, 0] >= 1)),
        lambda m: setattr(m, "late", pyo.Constraint(expr=m.R[3, 0] >= 1)),
        lambda m: setattr(m, "early", pyo.Constraint(expr=m.M_out[1, 0] <= 0)),
        lambda m: setattr(m, "product", pyo.Constraint(expr=m.R[3, 0] * m.R[3, 1] <= 0)),
        lambda m: m.few.set_value(written(m) <= m.own),
        lambda m: m.objective.set_value(sum(m.S_RAM.values())),
    ],
)
def test_other_changes_are_not_said(change):
    """What is in RAM, lower limits of a stage, own variables, and changes to the model itself."""
    model = extended(skip_problem())
    model.few, model.own = pyo.Constraint(expr=written(model) <= 4), pyo.Var()
    assert restate_as_call(model) is not None
    change(model)
    assert restate_as_call(model) is None


def test_large_models_that_the_problem_can_state_are_logged(caplog):
    """From 50 nodes on, where `subject_to` is measured to be several times faster."""
    for teeth, warned in ((10, False), (25, True)):
        model = build(comb_problem(teeth, ram="100%"))
        solve(model)
        assert not caplog.records
        model.few = pyo.Constraint(expr=sum(model.M_out.values()) <= 3)
        solve(model)
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * warned


def test_reason_of_a_reduced_model_says_the_rules():
    """In 13 B a tensor is paged or recomputed: without both there is no schedule."""
    forbidden = lambda m: sum(m.M_out.values()) + again(m, 0) <= 0  # noqa: E731
    model = extended(skip_problem(), forbidden, reductions=True)
    result = solve(model)
    assert result.status == Status.INFEASIBLE
    assert (restate_as_call(model) or "no rules") in result.reason
