"""Own constraints and objectives over totals: what rules may say, and how schedules are held to."""

from dataclasses import replace

import pyomo.environ as pyo
import pytest

import poetmodel as pm
from kit.instances import random_instance, random_schedule, seeded
from kit.worked import bench_device
from poetmodel.errors import InputError
from poetmodel.problem import Constraint

GRAPH = pm.Graph(
    name="chain",
    nodes=(
        pm.operation("a", output_bytes=8),
        pm.operation("b", output_bytes=4, inputs=("a",)),
        pm.operation("c", output_bytes=2, inputs=("a", "b")),
    ),
)
COSTS = pm.Costs.from_arrays(
    GRAPH,
    compute_time_s=[1, 2, 4],
    compute_energy_j=[10, 20, 40],
    page_in=[(0.5, 5)] * 3,
    page_out=[(0.25, 2)] * 3,
)
PROBLEM = pm.Problem(GRAPH, COSTS, ram="100%")
SCHEDULE = pm.Schedule(  # `a` goes out and comes back, and is computed again in stage 1
    R=((0, 0), (1, 0), (1, 1), (2, 2)),
    S_RAM=((1, 0), (2, 1)),
    S_AUX=((1, 0), (2, 0)),
    M_in=((2, 0),),
    M_out=((0, 0),),
)


def rows(rule):
    """Return the rows of a rule."""
    return PROBLEM.subject_to(own=rule).constraints


@pytest.mark.parametrize(
    ("rule", "terms", "lower", "upper"),
    [
        (lambda v: v.bytes_written <= 12, {"bytes_written": 1}, None, 12),
        (lambda v: v.recomputations["b"] == 1, {"recomputations:b": 1}, 1, 1),
        (lambda v: v.page_ins[2] >= 1, {"page_ins:c": 1}, 1, None),
        (lambda v: (1, 2 * v.page_outs["a"] + 3, 4), {"page_outs:a": 2}, -2, 1),
        (lambda v: v.energy_j <= 2 * v.compute_s, {"energy_j": 1, "compute_s": -2}, None, 0),
        (
            lambda v: sum(v.page_ins.values()) <= 2,
            {"page_ins:a": 1, "page_ins:b": 1, "page_ins:c": 1},
            None,
            2,
        ),
    ],
)
def test_a_rule_gives_one_row(rule, terms, lower, upper):
    """Constants move to the limits, and a total that comes twice is one term."""
    (row,) = rows(rule)
    assert row.terms == terms
    assert (row.lower, row.upper) == (lower, upper)


def test_a_list_of_relations_gives_numbered_rows():
    """Each has the name of the rule, with its place in the list.

    Several may be a generator or a tuple, and some left out; three numbers and expressions in a
    tuple stay one relation, as everywhere in Pyomo. A rule may ask which entries there are.
    """
    found = rows(lambda v: [v.page_ins[i] <= 1 for i in v.page_ins])
    assert [row.name for row in found] == ["own[0]", "own[1]", "own[2]"]
    found = rows(lambda v: (v.page_ins[i] <= 1 for i in range(2)))
    assert [row.name for row in found] == ["own[0]", "own[1]"]
    found = rows(lambda v: (v.bytes_read <= 1, v.bytes_written <= 2, v.energy_j <= 90))
    assert [row.upper for row in found] == [1, 2, 90]
    found = rows(lambda v: [pyo.Constraint.Skip, v.energy_j <= 90, pyo.Constraint.Feasible])
    assert [row.name for row in found] == ["own[1]"]
    (row,) = rows(lambda v: sum(v.page_ins[n] for n in ("a", "x") if n in v.page_ins) <= 1)
    assert row.terms == {"page_ins:a": 1}
    (row,) = rows(lambda v: v.page_ins.get("x", 0) + v.page_ins.get(1) <= 1)
    assert row.terms == {"page_ins:b": 1}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda v: v.energy_j**2 <= 1, "not linear"),
        (lambda v: v.energy_j, "linear relation"),
        (lambda _: True, "linear relation"),
        (3, "expected a function"),
        (lambda v: v.page_ins["x"] <= 1, "page_ins\\['x'\\]: the graph has no such entry"),
        (lambda v: v.page_ins[-1] <= 1, "page_ins\\[-1\\]: the graph has no such entry"),
        (lambda v: v.page_ins[:2] <= 1, "position from 0 to 2"),
        (lambda v: v.page_ins["a "] <= 1, "did you mean 'a'"),
        (lambda v: 1 <= v.page_ins["a"] <= 2, "constraint 'own': .* return a list"),
        (lambda v: v.page_ins["a"] < 1, "page_ins.0.  <  1.*strict inequality"),
        (lambda v: v.energy <= 1, "constraint 'own': v.energy: there is no such total.*energy_j"),
        (lambda _: None, "got nothing$"),
        (lambda _: "energy_j <= 3", "got 'energy_j <= 3'"),
        (lambda v: {"a": v.energy_j <= 3}, "got an object"),
        (lambda v: v.energy_j * float("nan") <= 3, "finite"),
        (lambda v: v.energy_j <= 10**400, "finite"),
    ],
)
def test_what_is_no_linear_relation_of_totals_is_refused(rule, words, caplog):
    """The message names the constraint, and Pyomo logs nothing."""
    with pytest.raises(InputError, match=words):
        rows(rule)
    assert not caplog.records


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"name": "", "terms": {}, "upper": 1}, "name"),
        ({"name": "w", "terms": {}}, "expected a limit"),
        ({"name": "w", "terms": {}, "lower": 2, "upper": 1}, "cross"),
        ({"name": "w", "terms": {"bytes_read": float("nan")}, "upper": 1}, "finite"),
    ],
)
def test_a_row_needs_a_name_finite_numbers_and_limits(row, words):
    """A row that can say nothing is a mistake."""
    with pytest.raises(InputError, match=words):
        Constraint(**row)


@pytest.mark.parametrize("key", ["page_ins:x", "recomputations:", "bytes", "page_ins"])
def test_a_problem_names_keys_that_its_graph_does_not_have(key):
    """Rows from files name nodes and tensors, too."""
    row = Constraint(name="w", terms={key: 1}, upper=1)
    with pytest.raises(InputError, match="constraint 'w'"):
        replace(PROBLEM, constraints=(row,))


def test_the_simulator_counts_totals():
    """It counts what the relations say, and adds up sums of them.

    The baseline of an own objective is its value for a single pass, the constant included. With
    rewards, what lies above the baseline is never below 0.
    """
    simulation = pm.simulate(GRAPH, COSTS, SCHEDULE)
    assert simulation.recomputations == {0: 1}
    assert simulation.page_ins == {0: 1}
    assert simulation.page_outs == {0: 1}
    assert simulation.recompute_s == 1
    terms = (("recomputations:a", 100), ("bytes_written", 1), ("energy_j", 0.5), ("constant", 3))
    assert simulation.total(GRAPH, terms) == 100 + 8 + 0.5 * (80 + 7) + 3
    problem = PROBLEM.minimizing(lambda v: v.energy_j + 2 * v.bytes_written + 1)
    assert problem.minimize == "own"
    assert problem.objective.measured(simulation) == 87 + 16 + 1
    assert problem.objective.baseline == 71
    assert problem.objective.overhead(simulation) == 17 + 16
    problem = PROBLEM.minimizing(lambda v: -3 * v.page_outs["a"] - v.recomputations["a"])
    assert problem.objective.baseline == -3 - 2
    assert problem.objective.overhead(pm.simulate(GRAPH, COSTS, SCHEDULE)) == 5 - 4


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        (lambda v: v.bytes_written <= 8, False),
        (lambda v: v.bytes_written <= 7, True),
        (lambda v: v.bytes_written <= 7.5, True),
        (lambda v: v.recomputations["a"] == v.page_ins["a"], False),
        (lambda v: v.recomputations["b"] >= 1, True),
        (lambda v: v.energy_j <= 87, False),
        (lambda v: v.energy_j <= 86.9, True),
        (lambda v: v.transfer_s >= 0.76, True),
        (lambda v: 0.1 * v.compute_s + 0.2 * v.page_ins["a"] <= 1.0, False),  # 0.8 + 0.2
    ],
)
def test_verify_names_a_broken_row(rule, broken):
    """Whole numbers compare exactly, others to the tolerance of times and energies."""
    verdict = pm.verify(replace(PROBLEM, ram=100).subject_to(mine=rule), SCHEDULE)
    words = [text for text in verdict.violations if "constraint 'mine'" in text]
    assert bool(words) == broken
    assert verdict.valid != broken


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_an_objective_has_finite_weights(weight):
    """Of what is not a number nothing can be proved."""
    with pytest.raises(InputError, match="objective: expected finite numbers"):
        PROBLEM.minimizing(lambda v: weight * v.energy_j)
    with pytest.raises(InputError, match="objective: 'energy_j': expected a finite number"):
        replace(PROBLEM, minimize="own", own_objective=(("energy_j", weight),))


@pytest.mark.parametrize("seed", range(20))
def test_coefficients_count_what_the_simulator_counts(seed):
    """Baseline and coefficients of a sum, times the totals, are the sum as simulated."""
    rng = seeded(seed)
    problem = replace(random_instance(rng), deadline_counts="serial")
    simulation = pm.simulate(problem.graph, problem.costs, random_schedule(rng, problem.graph))
    own = problem.minimizing(
        lambda v: (
            v.energy_j
            + 3 * v.bytes_read
            + v.bytes_written
            + 2 * v.compute_s
            + v.transfer_s
            + 5 * v.recomputations[0]
        )
    )
    of = own.objective.coefficients
    counted = (
        sum(of.compute[k] * times for k, times in simulation.recomputations.items())
        + sum(of.page_in[i] * times for i, times in simulation.page_ins.items())
        + sum(of.page_out[i] * times for i, times in simulation.page_outs.items())
    )
    assert own.objective.overhead(simulation) == pytest.approx(counted)
    assert own.objective.measured(simulation) == pytest.approx(own.objective.baseline + counted)


def test_rows_want_decisions_and_have_names():
    """Those that a row has with a sign that more of them helps to keep it.

    A second row of the same name would be reported as the first. A gap of what rounding leaves of
    the value would contradict the status. The former name of the class warns; terms may be
    pairs.
    """
    problem = PROBLEM.subject_to(more=lambda v: 2 * v.page_outs["b"] - v.page_ins["c"] >= 1)
    assert (problem.wanted.page_out, problem.wanted.page_in) == ((0, 2, 0), (0, 0, 0))
    assert not any(PROBLEM.wanted.compute)
    with pytest.raises(InputError, match="another constraint has this name"):
        PROBLEM.subject_to(w=lambda v: v.energy_j <= 90).subject_to(w=lambda v: v.energy_j <= 80)
    result = pm.solve(
        replace(PROBLEM, ram=100).minimizing(lambda v: 1e-14 * v.energy_j - v.bytes_read)
    )
    assert (result.status, result.objective_gap) == ("optimal", 0.0)
    from poetmodel import problem

    with pytest.warns(DeprecationWarning, match="Constraint"):
        former = problem.TotalsConstraint
    row = former(name="w", terms=(("bytes_read", 2.0),), upper=1)
    assert row == Constraint(name="w", terms={"bytes_read": 2}, upper=1)
    assert hash(row) == hash(replace(row))


@pytest.mark.parametrize(
    ("rule", "refused"),
    [
        (lambda v: v.energy_j >= 1, True),
        (lambda v: v.compute_s - v.energy_j <= 0, True),
        (lambda v: v.energy_j == 99, True),
        (lambda v: v.energy_j <= 99, False),
        (lambda v: v.compute_s >= 1, False),
    ],
)
def test_more_energy_is_no_aim_where_idle_power_is_drawn_over_a_makespan(rule, refused):
    """A model knows a lower bound of that energy; from below it could claim too much."""
    device = bench_device(idle_power_w=1.0, mode="dma")
    problem = pm.Problem(GRAPH, replace(COSTS, device=device), ram="100%")
    assert problem.is_overlapping
    if refused:
        with pytest.raises(InputError, match="constraint 'own': energy_j from below"):
            problem.subject_to(own=rule)
    else:
        assert problem.subject_to(own=rule).constraints
    assert replace(problem, deadline_counts="serial").subject_to(own=rule).constraints
    with pytest.raises(InputError, match="objective: energy_j from below"):
        problem.minimizing(lambda v: -v.energy_j)
