"""Objectives, their substitutes during a search, and user-defined sums."""

import re
from dataclasses import replace

import pyomo.environ as pyo
import pytest

import poetmodel as pm
from kit.commands import training_step, write_graph
from kit.instances import make_rng, random_instance, random_instances, random_schedule, random_step
from kit.rotation import parametrize_parts
from kit.worked import (
    bench_device,
    even_costs,
    make_state_node,
    make_update_node,
    skip_graph,
    skip_problem,
)
from poetmodel.device import Costs
from poetmodel.errors import InputError
from poetmodel.graph import Graph, floor, operation, zoo
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.problem import (
    Coefficients,
    Constraint,
    DeadlineCounts,
    Problem,
    Quantity,
    weighted_sum,
)
from poetmodel.problem.infeasibility import describe_limits, infeasibility_reason, missing_unit_hint
from poetmodel.schedule import simulate


def paid(schedule, coefficients):
    """Return the sum of the costs of a schedule's decisions."""
    again = sum(coefficients.compute[k] for t, k in schedule.R if k < t)
    into = sum(coefficients.page_in[i] for _, i in schedule.M_in)
    return again + into + sum(coefficients.page_out[i] for _, i in schedule.M_out)


@pytest.mark.parametrize("counts", ["compute", "serial"])
@pytest.mark.parametrize("minimize", ["energy", "time", "writes"])
@parametrize_parts(4)
def test_a_sum_over_decisions_is_what_the_simulator_adds_up(part, minimize, counts):
    """On schedules that recompute and page: baseline and overhead are those of the simulation."""
    found = 0
    for problem in part.select(random_instances(100, (3, 8), seed=17, minimize=minimize)):
        stated = replace(problem, deadline_counts=counts)
        unpaged = replace(stated, paging=False)
        for schedule in (construct(stated), construct(unpaged), page_everything(stated)):
            if schedule is None:
                continue
            simulation = simulate(
                stated.graph, stated.costs, schedule, deadline_counts=stated.deadline_counts
            )
            objective = stated.objective
            overhead = objective.overhead_of(simulation)
            assert paid(schedule, objective.coefficients) == pytest.approx(overhead)
            assert objective.value_of(simulation) == pytest.approx(objective.baseline + overhead)
            found += overhead > 0
    assert found > part.divide(5)


def test_units_sums_and_limits():
    """The bound on the peak is the minimum RAM, and single decisions have no coefficient.

    Writes have no baseline: the largest tensor counts 1. A pass takes 10 s and 10 J of linear
    limits; the tolerance is included. Weighted sums are per decision.
    """
    objective = skip_problem(minimize="ram").objective
    assert not objective.is_sum
    assert objective.known_bound == floor(skip_problem().graph).bytes
    assert not any(sum(column) for column in objective.coefficients)
    assert objective.unit == 0.013
    assert skip_problem(minimize="ram", ram=99).objective.unit == 0.015  # keep-all takes no more
    problem = skip_problem(minimize="writes")
    assert problem.objective.baseline == 0
    assert problem.objective.unit == max(problem.graph.tensor_bytes)
    schedule = construct(replace(problem, ram=99))
    written = problem.objective.value_of(simulate(problem.graph, problem.costs, schedule))
    assert (written, type(written)) == (0, int)
    assert problem.make_objective(Quantity.ENERGY) == problem.energy
    assert problem.make_objective("writes") == problem.objective
    problem = skip_problem(deadline=12, energy_budget=11, ram=13)
    assert {limit.name: limit.upper for limit in problem.linear_limits} == {
        "deadline": pytest.approx(2),
        "energy_budget": pytest.approx(1),
    }
    assert all(limit.upper > 0 for limit in replace(problem, deadline=10).linear_limits)
    assert skip_problem(ram=13).linear_limits == ()
    rng = make_rng("weighted_sum")
    one, two = (
        Coefficients(*([rng.random() for _ in range(3)] for _ in range(4))) for _ in range(2)
    )
    both = weighted_sum((one, 2.0), (two, 0.5))
    assert both.page_out[1] == 2.0 * one.page_out[1] + 0.5 * two.page_out[1]
    assert [len(column) for column in both] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("minimize", "shown", "in_bytes"),
    [
        ("energy", "2 J", False),
        ("time", "2 s", False),
        ("ram", "2 B", True),
        ("writes", "2 B", True),
    ],
)
def test_amounts_have_units(minimize, shown, in_bytes):
    """Joules, seconds and bytes; those of bytes are whole."""
    objective = skip_problem(minimize=minimize).objective
    assert objective.format(2) == shown
    assert objective.is_in_bytes == in_bytes


def test_sums_of_each_meaning_of_time():
    """Compute alone; with transfers; and for a makespan two sums that are each necessary."""
    expected = {
        DeadlineCounts.COMPUTE: [(1, 0)],
        DeadlineCounts.SERIAL: [(1, 1)],
        DeadlineCounts.OVERLAP: [(1, 0), (0, 1)],
    }
    for counts, sums in expected.items():
        problem = replace(skip_problem(deadline=12), deadline_counts=counts)
        assert [tuple(counted) for counted in problem.deadline_sums] == sums
        assert tuple(problem.time_sum) == sums[0]
        assert problem.is_overlapping == (counts == "overlap")
        names = [limit.name for limit in problem.linear_limits]
        assert names == ["deadline", "bus_deadline"][: len(sums)]


# -- totals --------------------------------------------------------------------------------------
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
        (
            lambda v: v.page_ins[2, "a"] + 2 * v.recomputations["c", 0] <= 1,
            {"page_ins@2:a": 1, "recomputations@2:a": 2},
            None,
            1,
        ),
    ],
)
def test_a_rule_gives_one_row(rule, terms, lower, upper):
    """Constants move to the limits, and a repeated total is one term."""
    (row,) = rows(rule)
    assert row.terms == terms
    assert (row.lower, row.upper) == (lower, upper)


def test_a_list_of_relations_gives_numbered_rows():
    """Each has the name of the rule, with its position in the list.

    A list may be a generator or a tuple, and some entries skipped; three numbers and
    expressions in a tuple stay one relation, as everywhere in Pyomo. A rule may test which
    entries exist.
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
        (
            lambda v: (v.page_ins["a"] <= 1) or (v.page_outs["a"] <= 1),
            r"for 'or' add a variable to a model of pm.build\(problem\)",
        ),
        (lambda v: v.page_outs[1, "a"] <= 1, "only recomputations and page_ins can be counted"),
        (lambda v: v.page_ins[3, "a"] <= 1, r"page_ins\[3, 'a'\]: the graph has no such stage"),
        (lambda v: v.page_ins[1, "a"] >= 1, "can only have an upper limit.*reductions=False"),
        (lambda v: v.page_ins[1, "a"] == 1, "can only have an upper limit"),
        (lambda v: v.page_ins[1, "a"] <= v.page_ins[2, "a"], "no negative coefficients"),
        (
            lambda v: v.page_ins[1, "a"] + v.page_ins["a"] <= 1,
            "'page_ins:a' does not count by stage",
        ),
    ],
)
def test_what_is_no_linear_relation_of_totals_is_refused(rule, words, caplog):
    """The message names the constraint, and Pyomo logs no message."""
    with pytest.raises(InputError, match=words):
        rows(rule)
    assert not caplog.records


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"name": "", "terms": {}, "upper": 1}, "name"),
        ({"name": "w", "terms": {}}, "expected a limit"),
        ({"name": "w", "terms": {}, "lower": 2, "upper": 1}, "contradict"),
        ({"name": "w", "terms": {"bytes_read": float("nan")}, "upper": 1}, "finite"),
    ],
)
def test_a_row_needs_a_name_finite_numbers_and_limits(row, words):
    """A row without name or limits, or with contradictory or infinite numbers, is an error."""
    with pytest.raises(InputError, match=words):
        Constraint(**row)


@pytest.mark.parametrize(
    "key",
    ["page_ins:x", "recomputations:", "bytes", "page_ins", "page_ins@3:a", "page_ins@x:a",
     "page_outs@1:a", "page_ins@1:x"],
)  # fmt: skip
def test_a_problem_names_keys_that_its_graph_does_not_have(key):
    """Rows from files name nodes and tensors, too."""
    row = Constraint(name="w", terms={key: 1}, upper=1)
    with pytest.raises(InputError, match="constraint 'w'"):
        replace(PROBLEM, constraints=(row,))


def test_the_simulator_counts_totals():
    """The simulator counts the totals of the relations, and their sums.

    The baseline of a user-defined objective is its value for a single pass, with the constant.
    With rewards, the value is never below the baseline.
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
    assert problem.objective.value_of(simulation) == 87 + 16 + 1
    assert problem.objective.baseline == 71
    assert problem.objective.overhead_of(simulation) == 17 + 16
    problem = PROBLEM.minimizing(lambda v: -3 * v.page_outs["a"] - v.recomputations["a"])
    assert problem.objective.baseline == -3 - 2
    assert problem.objective.overhead_of(pm.simulate(GRAPH, COSTS, SCHEDULE)) == 5 - 4


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
        (lambda v: v.page_ins[2, "a"] <= 0, True),
        (lambda v: v.page_ins[1, "a"] + v.recomputations[2, "a"] <= 0, False),
        (lambda v: 0.5 * v.page_ins[2, "a"] + v.recomputations[1, "a"] <= 1.4, True),
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
    """Weights that are not finite would prevent proofs."""
    with pytest.raises(InputError, match=r"^objective: "):
        PROBLEM.minimizing(lambda v: weight * v.energy_j)
    with pytest.raises(InputError, match=r"^objective: 'energy_j': "):
        replace(PROBLEM, minimize="own", user_objective=(("energy_j", weight),))


def test_an_objective_counts_in_all_stages():
    """A weight of one stage is refused."""
    with pytest.raises(InputError, match=r"^objective: 'page_ins@1:a'"):
        PROBLEM.minimizing(lambda v: v.page_ins[1, "a"])


@pytest.mark.parametrize("seed", range(20))
def test_coefficients_count_what_the_simulator_counts(seed):
    """Baseline and coefficients of a sum, times the totals, are the sum as simulated."""
    rng = make_rng(seed)
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
    assert own.objective.overhead_of(simulation) == pytest.approx(counted)
    assert own.objective.value_of(simulation) == pytest.approx(own.objective.baseline + counted)


def test_rows_want_decisions_and_have_names():
    """A row rewards decisions whose sign helps to satisfy it.

    A second row of the same name is refused, because reports could not distinguish them. A gap
    of rounding errors would contradict the status. Terms may be pairs.
    """
    problem = PROBLEM.subject_to(more=lambda v: 2 * v.page_outs["b"] - v.page_ins["c"] >= 1)
    assert (problem.rewards.page_out, problem.rewards.page_in) == ((0, 2, 0), (0, 0, 0))
    assert not any(PROBLEM.rewards.compute)
    with pytest.raises(InputError, match="another constraint has this name"):
        PROBLEM.subject_to(w=lambda v: v.energy_j <= 90).subject_to(w=lambda v: v.energy_j <= 80)
    result = pm.solve(
        replace(PROBLEM, ram=100).minimizing(lambda v: 1e-14 * v.energy_j - v.bytes_read)
    )
    assert (result.status, result.gap) == ("optimal", 0.0)
    row = Constraint(name="w", terms=(("bytes_read", 2.0),), upper=1)
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
    """A lower limit on that energy is refused, because a model only has a lower bound on it."""
    device = bench_device(idle_power_w=1.0, mode="dma")
    problem = pm.Problem(GRAPH, replace(COSTS, device=device), ram="100%")
    assert problem.is_overlapping
    if refused:
        with pytest.raises(InputError, match=r"^constraint 'own': energy_j"):
            problem.subject_to(own=rule)
    else:
        assert problem.subject_to(own=rule).constraints
    assert replace(problem, deadline_counts="serial").subject_to(own=rule).constraints
    with pytest.raises(InputError, match=r"^objective: energy_j"):
        problem.minimizing(lambda v: -v.energy_j)


# -- what no schedule can keep -------------------------------------------------------------------
def test_a_feasible_problem_has_no_obstacle():
    """Budgets at the floor, at one pass and at the baseline are in order."""
    assert infeasibility_reason(skip_problem(ram=12, deadline=10, energy_budget=10)) is None
    assert infeasibility_reason(skip_problem(deadline=10 * (1 - 5e-10))) is None


@pytest.mark.parametrize(
    ("limits", "subject"),
    [
        ({"ram": 11}, "RAM budget 11 B"),
        ({"deadline": 9.999}, "deadline 9.999 s"),
        ({"deadline": 10 * (1 - 5e-9)}, "deadline"),
        ({"energy_budget": 9.999}, "energy budget 9.999 J"),
    ],
)
def test_each_limit_is_held_against_what_every_schedule_pays(limits, subject):
    """The sentence begins with the limit that is too small."""
    sentence = infeasibility_reason(skip_problem(**limits))
    assert sentence.startswith(subject)


@pytest.mark.parametrize(
    ("page_energy_j", "limits", "ending"),
    [
        (0.0, {"energy_budget": 1.0}, "already takes 6 J; no schedule needs less"),
        (
            0.5,
            {"energy_budget": 1.0},
            "takes 7.5 J; no schedule needs less; commits of state take 1.5 J of it: commit only "
            "once in 2 steps, or less often",
        ),
        (
            0.0,
            {"deadline": 1.0},
            "takes 6 s, without any transfer but commits; no schedule is faster; commits of state "
            "take 3 s of it: commit only once in 2 steps, or less often",
        ),
        (
            0.0,
            {"deadline": 1.0, "commit": None},
            "takes 3 s, without any transfer; no schedule is faster",
        ),
    ],
)
def test_only_commits_that_cost_something_are_to_be_made_less_often(page_energy_j, limits, ending):
    """Rarer commits are recommended only if commits cost the limited quantity.

    Transfers of commits are part of a single pass.
    """
    graph = Graph(
        name="step",
        nodes=(
            operation("x", output_bytes=10, phase="input", on_aux=True),
            make_state_node("w", 8),
            operation("y", output_bytes=6, inputs=("x", "w")),
            operation("g", output_bytes=8, inputs=("y",), phase="backward"),
            make_update_node("u", "g", w=8),
        ),
    )
    pages = [(1.0, page_energy_j)] * len(graph.tensors)
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[0, 0, 1, 1, 1],
        compute_energy_j=[0, 0, 2, 2, 2],
        page_in=pages,
        page_out=pages,
    )
    problem = Problem(graph, costs, **{"ram": 100, "commit": 1} | limits)
    assert (infeasibility_reason(problem) or "").endswith(ending)


def test_the_workspace_of_the_step_is_named():
    """`d` needs 12 bytes; with 9 bytes of workspace `b` needs more."""
    graph = skip_graph(workspace=True)
    assert floor(graph).node == 3
    sentence = infeasibility_reason(Problem(graph, even_costs(graph), ram=10))
    assert sentence is not None
    assert "workspace" not in sentence
    problem = skip_problem(ram=1)
    for limited in random_instances(60, (3, 5), seed=81, below_floor=True):
        step = limited.graph.nodes[floor(limited.graph).node]
        words = infeasibility_reason(limited)
        if words is not None and words.startswith("RAM"):
            assert ("workspace (" in words) == (step.workspace_bytes > 0)
            problem = limited
    assert problem.graph.name == "random"


def test_limits_in_words():
    """Every limit that there is, and no other; own constraints by name, of many the first."""
    assert describe_limits(skip_problem()) == "the RAM budget of 13 B"
    problem = skip_problem(
        ram=12345, deadline=20, deadline_counts="compute", energy_budget=30, aux_bytes=7,
        recompute=False,
    )  # fmt: skip
    assert describe_limits(problem) == (
        "the RAM budget of 12,345 B, the deadline of 20 s (compute), the energy budget of 30 J, "
        "the storage of 7 B, without recomputation"
    )
    unpaged = skip_problem(paging=False, aux_bytes=7)
    assert describe_limits(unpaged) == "the RAM budget of 13 B, without paging"
    problem = skip_problem().subject_to(few=lambda v: v.bytes_written <= 8)
    assert describe_limits(problem).endswith("the constraint 'few' (at most 8 B)")
    many = problem.subject_to(each=lambda v: [v.page_ins[i] <= 1 for i in range(4)] * 2)
    assert describe_limits(many).endswith("'each[3]' (at most 1) and 4 more")


@pytest.mark.parametrize(
    ("rule", "limits", "sentence"),
    [
        (
            lambda v: v.energy_j <= 9,
            {},
            "constraint 'own', at most 9 J: schedules come to 10 J, as a single pass does, and "
            "never to less",
        ),
        (
            lambda v: v.page_ins["a"] >= 1,
            {"paging": False},
            "constraint 'own', at least 1: schedules come to 0, as a single pass does, and never "
            "to more",
        ),
        (
            lambda v: v.recomputations["a"] >= 4,
            {},
            "constraint 'own', at least 4: schedules come to 3 at most",
        ),
        (
            lambda v: v.compute_s - 2 * v.page_outs["a"] <= 7,
            {},
            "constraint 'own', at most 7: schedules come to 8 at least",
        ),
        (lambda v: v.recomputations["a"] >= 3, {}, None),
        (lambda v: v.compute_s - 2 * v.page_outs["a"] <= 8, {}, None),
        (lambda v: v.energy_j == v.compute_s, {}, None),
    ],
)
def test_an_own_constraint_that_nothing_can_keep(rule, limits, sentence):
    """If the maximum reduction cannot reach the limit, no schedule can."""
    assert infeasibility_reason(skip_problem(**limits).subject_to(own=rule)) == sentence


@pytest.mark.parametrize(
    ("given", "least", "remark"),
    [
        (40, 200_000, "; 40 is 40 bytes: did you mean 40% or 40KiB?"),
        (256, 200_000, "; 256 is 256 bytes: did you mean 256KiB?"),
        (40, 700, ""),
        (10_000, 10**9, "; 10000 is 10000 bytes: did you mean 10000KiB?"),
        (10_001, 10**9, ""),
    ],
)
def test_a_size_without_its_unit_is_noticed(given, least, remark):
    """If a limit is far below the minimum, the message says that it is in bytes, with a guess.

    So does that of the minimum RAM.
    """
    assert missing_unit_hint(given, least) == remark
    graph = zoo.mlp()
    problem = Problem(graph, Costs.estimate(graph, bench_device()), ram=40)
    assert (infeasibility_reason(problem) or "").endswith(
        "; 40 is 40 bytes: did you mean 40% or 40KiB?"
    )
    plain = infeasibility_reason(replace(problem, ram=problem.floor.bytes - 1))
    assert "did you mean" not in (plain or "did you mean")


def test_what_the_least_ram_is_needed_for_adds_up(tmp_path):
    """State counts if it is in RAM, replacements never, and in-place outputs count less."""
    graph = Graph.load(write_graph(tmp_path / "step.graph.json", training_step()))
    costs = Costs.estimate(graph, bench_device())
    sentence = infeasibility_reason(Problem(graph, costs, ram=599))
    assert sentence.endswith("node 'u2' needs for w2 (300 B), dw2 (300 B)")
    sentence = infeasibility_reason(Problem(graph, costs, ram=900, paging=False))
    assert "the minimum RAM is 940 B" in sentence
    assert sentence.endswith(
        "'dw2' needs for g2 (40 B), r (100 B), dw2 (300 B), all state (500 B), which without "
        "paging stays in RAM"
    )
    rng = make_rng("what the least RAM is needed for")
    for _ in range(200):
        step = random_step(rng)
        paging = rng.random() < 0.5
        costs = Costs.estimate(step, bench_device())
        problem = Problem(step, costs, ram=1, paging=paging)
        words = infeasibility_reason(problem)
        if words is None or not words.startswith("RAM") or " more" in words:
            continue
        needed = words.split(" needs for ")[1]
        parts = sum(int(size) for size in re.findall(r"\((\d+) B\)", needed))
        less = sum(int(size) for size in re.findall(r"(\d+) B less", needed))
        assert parts - less == problem.floor.bytes


def test_count_without_decisions_in_stages_is_an_error(monkeypatch):
    """A count that is only listed as one of stages is not read as page-ins."""
    row = Constraint(name="w", terms={"page_outs@1:b": 1}, upper=0)
    monkeypatch.setattr("poetmodel.problem.totals.STAGE_COUNTS", ("page_ins", "page_outs"))
    problem = replace(PROBLEM, constraints=(row,))
    with pytest.raises(ValueError, match="page_outs"):
        list(problem.stage_limits)
