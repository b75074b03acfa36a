"""Models that people extend: own constraints, variables, blocks and objectives are honoured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyomo.environ as pyo
import pytest

from kit.instances import random_instances
from kit.oracle import optimum
from kit.rotation import Part, parts
from kit.worked import comb_graph, even_costs, skip_problem
from poetmodel.device import Costs
from poetmodel.errors import InputError, ModelError, VerificationError
from poetmodel.graph import Graph, operation
from poetmodel.model import FORMULATIONS, Component, build, read_schedule
from poetmodel.model.compact import COMPACT
from poetmodel.model.unreduced import UNREDUCED
from poetmodel.problem import Problem
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import RELATIONS, checkpoint_all, verify
from poetmodel.schedule.io import load_document
from poetmodel.solver import solve

if TYPE_CHECKING:
    from pathlib import Path

BACKENDS = [
    "highs",
    pytest.param("scip", marks=pytest.mark.scip),
    pytest.param("gurobi", marks=pytest.mark.gurobi),
]
PACKAGES = {"highs": "highspy", "scip": "pyscipopt", "gurobi": "gurobipy"}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Return each back end that is installed."""
    name: str = request.param
    pytest.importorskip(PACKAGES[name])
    return name


def two_ways(**limits: Any) -> Problem:
    """State the comb of five teeth with 9 bytes: of `f0` to `f4` two at most are in RAM.

    Paging costs 1.25 J each way, computing `f0` 1 J, `f1` 2 J, `f2` 3 J, and what a node reads has
    to be there. Best: `f2` and `f1` are paged and `f0` recomputed, 2.5 + 2.5 + 1 = 6 J. With one
    page-out only, `f1` is recomputed from `f0` and that once more: 2.5 + (1 + 2) + 1 = 6.5 J.
    """
    graph = comb_graph(5)
    page = (1.25, 1.25)
    return Problem(graph, even_costs(graph, page_in=page, page_out=page), **{"ram": 9, **limits})


def every(model: pyo.ConcreteModel, name: str) -> Any:
    """Return the sum of a relation."""
    return sum(getattr(model, name).values())


# -- what is built -----------------------------------------------------------------------------


def test_a_model_carries_its_problem() -> None:
    """It can be solved without naming the problem again."""
    problem = skip_problem()
    model = build(problem)
    assert model.problem is problem
    assert model.formulation is COMPACT


@pytest.mark.parametrize(
    ("choices", "exact"),
    [
        ({}, True),
        ({"reductions": False}, True),
        ({"stages": "events"}, False),
        ({"formulation": "paper"}, False),
        ({"formulation": COMPACT}, True),
        ({"formulation": COMPACT, "stages": "events"}, False),
        ({"formulation": UNREDUCED}, True),
        ({"formulation": COMPACT.without("storage", name="unlimited")}, False),
    ],
)
def test_only_exact_models_bound_the_problem(choices: dict[str, Any], exact: bool) -> None:
    """A restriction or an ablation says so."""
    assert build(skip_problem(), **choices).exact is exact


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"formulation": "compcat"}, "expected one of compact, paper, got 'compcat'"),
        ({"formulation": "lazy"}, "'lazy' builds a series of models: pass the problem to solve"),
        ({"stages": "some"}, "expected 'all' or 'events', got 'some'"),
    ],
)
def test_unknown_choices_are_refused(choices: dict[str, Any], message: str) -> None:
    """The error says what there is."""
    with pytest.raises(InputError, match=message):
        build(skip_problem(), **choices)


@pytest.mark.parametrize("minimize", ["energy", "time", "ram", "writes"])
@pytest.mark.parametrize("reductions", [True, False])
def test_a_budget_below_the_floor_builds_a_model_without_solutions(
    minimize: str, reductions: bool
) -> None:
    """Building never fails on what is infeasible; the model itself says so."""
    model = build(skip_problem(ram=3, minimize=minimize), reductions=reductions)
    answer = pyo.SolverFactory("appsi_highs").solve(model, load_solutions=False)
    assert str(answer.solver.termination_condition).startswith("infeasible")


@pytest.mark.parametrize(
    "limit", [{"deadline": 9.0}, {"energy_budget": 9.0}, {"deadline": 9.0, "ram": 3}]
)
def test_a_limit_below_one_pass_builds_a_model_without_solutions(limit: dict[str, float]) -> None:
    """The same for time and energy (10 s and 10 J are one pass)."""
    model = build(skip_problem(**limit))
    answer = pyo.SolverFactory("appsi_highs").solve(model, load_solutions=False)
    assert str(answer.solver.termination_condition).startswith("infeasible")


@pytest.mark.parametrize("reductions", [True, False])
def test_no_ram_at_all_is_enough_for_tensors_of_no_bytes(reductions: bool) -> None:
    """With parameters that fill the budget, a graph of empty tensors still has its least peak."""
    nodes = (operation("a", output_bytes=0), operation("b", output_bytes=0, inputs=("a",)))
    graph = Graph(name="empty", nodes=nodes, resident_bytes={"parameters": 10})
    problem = Problem(graph, even_costs(graph), ram=10, count_parameters=True, minimize="ram")
    result = solve(build(problem, reductions=reductions))
    assert (result.status, result.objective_value) == (Status.OPTIMAL, 0)


def test_an_ablation_is_one_line() -> None:
    """Without its storage rows ``compact`` pages more than fits; the verifier says so."""
    problem = two_ways(aux_bytes=8, recompute=False)
    unlimited = COMPACT.without("storage", name="unlimited")
    assert solve(problem, formulation="compact").status == Status.INFEASIBLE
    with pytest.raises(VerificationError, match="storage used 12 B is above the limit of 8 B"):
        solve(build(problem, unlimited))
    result = solve(build(two_ways(recompute=False), unlimited))
    assert (result.overhead_j, result.formulation) == (7.5, "unlimited")


def test_a_swapped_component_is_used() -> None:
    """An own objective component takes the place of the shipped one, without an energy bound."""

    def writes(m: pyo.ConcreteModel) -> None:
        """Minimize the number of page-outs."""
        m.objective = pyo.Objective(expr=sum(var for _, var in m.decisions.page_outs))

    objective = Component("objective", writes, "made up", frozenset({"variables"}))
    result = solve(build(two_ways(), COMPACT.swap(objective, name="few writes")))
    assert len(result.require_schedule().M_out) == 1
    assert (result.status, result.bound_j) == (Status.OPTIMAL, None)
    assert (result.objective_value, result.objective_gap) == (1.0, 0.0)


def test_read_schedule_reads_the_values_of_a_model() -> None:
    """A model that somebody solved by other means gives its schedule."""
    model = build(skip_problem(recompute=False))
    pyo.SolverFactory("appsi_highs").solve(model)
    schedule = read_schedule(model)
    assert (schedule.M_out, schedule.M_in) == (((0, 0),), ((3, 0),))
    assert not verify(model.problem, schedule).violations


def test_read_schedule_takes_another_way_to_read_values() -> None:
    """Nothing is 1: what is left is the one computation of every node."""
    schedule = read_schedule(build(skip_problem()), value=lambda _: False)
    assert tuple((t, t) for t in range(4)) == schedule.R
    assert schedule.S_RAM == schedule.M_in == schedule.M_out == ()


@pytest.mark.parametrize("reductions", [True, False])
def test_a_schedule_goes_into_a_model_and_comes_out_again(reductions: bool) -> None:
    """What a start states is what the variables say, for schedules that keep to their last use."""
    for problem in random_instances(60, (2, 6), seed=9, recompute=True, paging=True):
        model = build(problem, reductions=reductions)
        schedule = checkpoint_all(problem.graph)
        for column, value in model.arrays.relations.assign(schedule):
            if column not in model.arrays.fixed:
                model.variables[column].set_value(value)
        back = read_schedule(model)
        assert all(getattr(back, name) == getattr(schedule, name) for name in RELATIONS)


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_a_clone_is_solved_like_the_model(formulation: str) -> None:
    """Copies of a model, for a series of variants, stand on their own feet."""
    model = build(skip_problem(recompute=False), formulation)
    copy = model.clone()
    assert solve(copy).schedule == solve(model).require_schedule()
    copy.never = pyo.Constraint(expr=every(copy, "M_out") <= 0)
    assert solve(copy).schedule is None
    assert solve(model).schedule is not None


# -- own constraints ---------------------------------------------------------------------------


def test_the_example_without_own_constraints(backend: str) -> None:
    """Two tensors are paged and one is recomputed: 6 J."""
    result = solve(build(two_ways()), backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 6.0)
    schedule = result.require_schedule()
    assert {i for _, i in schedule.M_out} == {1, 2}
    assert {k for t, k in schedule.R if k < t} == {0}


def test_few_page_outs(backend: str) -> None:
    """With one page-out at most, more is recomputed."""
    model = build(two_ways())
    model.few_writes = pyo.Constraint(expr=every(model, "M_out") <= 1)
    result = solve(model, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 6.5)
    schedule = result.require_schedule()
    assert [i for _, i in schedule.M_out] == [2]
    assert sorted(k for t, k in schedule.R if k < t) == [0, 0, 1]
    assert result.formulation == "compact"


def test_few_page_ins(backend: str) -> None:
    """M_in can be limited in its own right."""
    model = build(two_ways())
    model.few_reads = pyo.Constraint(expr=every(model, "M_in") <= 1)
    result = solve(model, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 6.5)
    assert len(result.require_schedule().M_in) == 1


def test_a_forbidden_recomputation(backend: str) -> None:
    """Without recomputing `a` in stage 3 it is paged: 2 J in place of 1."""
    model = build(skip_problem())
    model.once = pyo.Constraint(expr=model.R[3, 0] == 0)
    result = solve(model, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 2.0)
    assert (3, 0) not in result.require_schedule().R


def test_a_forced_recomputation(backend: str) -> None:
    """A recomputation that nobody needs is made, and stays in the schedule."""
    model = build(skip_problem(ram=15))
    model.again = pyo.Constraint(expr=model.R[3, 0] >= 1)
    result = solve(model, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 1.0)
    assert (3, 0) in result.require_schedule().R


def test_a_tensor_that_must_stay(backend: str) -> None:
    """With 13 bytes `f0` and `f1` are recomputed (3 J); where `f0` stays, `f2` is paged as well."""
    model = build(two_ways(ram=13))
    assert solve(model, backend=backend).overhead_j == 3.0
    model.stay = pyo.Constraint(range(1, 10), rule=lambda m, t: m.S_RAM[t, 0] >= 1)
    result = solve(model, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 4.5)
    schedule = result.require_schedule()
    assert {(t, 0) for t in range(1, 10)} <= set(schedule.S_RAM)
    assert {i for _, i in schedule.M_out} == {2}


def test_a_tensor_that_must_stay_where_it_cannot(backend: str) -> None:
    """Keeping `a` while `c` is computed takes 15 of 13 bytes: proved, with the limits named."""
    model = build(skip_problem())
    model.stay = pyo.Constraint(expr=model.S_RAM[2, 0] + model.S_RAM[3, 0] >= 2)
    result = solve(model, backend=backend)
    assert (result.status, result.schedule) == (Status.INFEASIBLE, None)
    assert "the RAM budget of 13 B" in result.reason
    assert "reductions=False" in result.reason


def test_storage_can_be_constrained(backend: str) -> None:
    """S_AUX is there as well: `f1` must not be on storage when stage 5 begins."""
    model = build(two_ways())
    model.not_there = pyo.Constraint(expr=model.S_AUX[5, 1] <= 0)
    result = solve(model, backend=backend)
    assert result.overhead_j == 6.5
    assert all(i != 1 for _, i in result.require_schedule().S_AUX)


def test_an_equation_between_relations(backend: str) -> None:
    """Rows may mix relations: as many recomputations as page-outs takes 1 J more."""
    model = build(two_ways())
    model.balance = pyo.Constraint(expr=every(model, "R") - 10 == every(model, "M_out"))
    result = solve(model, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 7.0)
    schedule = result.require_schedule()
    assert len(schedule.R) - 10 == len(schedule.M_out) == 2


@pytest.mark.parametrize("reductions", [True, False])
def test_a_constraint_that_always_holds_changes_nothing(backend: str, reductions: bool) -> None:
    """Entries that the formulation decided can stand in a row, also alone."""
    model = build(skip_problem(), reductions=reductions)
    model.once = pyo.Constraint(expr=model.R[2, 2] >= 1)
    model.late = pyo.Constraint(expr=model.M_out[3, 3] + model.R[1, 1] <= 2)
    result = solve(model, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 1.0)


def test_a_constraint_that_never_holds_is_named(backend: str) -> None:
    """`b` is not paged out in stage 3 by a reduced model: infeasible by that row alone."""
    model = build(skip_problem())
    model.write_late = pyo.Constraint(expr=model.M_out[3, 1] >= 1)
    result = solve(model, backend=backend)
    assert result.status == Status.INFEASIBLE
    assert "write_late" in result.reason


def test_a_fixed_entry_of_an_unreduced_model_is_named_too() -> None:
    """`a` may not be recomputed here, so a row that asks for it cannot hold."""
    model = build(skip_problem(recompute=False), reductions=False)
    model.again = pyo.Constraint(expr=model.R[3, 0] >= 1)
    result = solve(model)
    assert result.status == Status.INFEASIBLE
    assert "again" in result.reason


def test_own_constraints_on_paper(backend: str) -> None:
    """The published formulation can be extended as well."""
    model = build(skip_problem(), "paper")
    model.no_pages = pyo.Constraint(expr=every(model, "M_out") <= 0)
    model.again = pyo.Constraint(expr=model.R[2, 0] >= 1)
    result = solve(model, backend=backend)
    schedule = result.require_schedule()
    assert (2, 0) in schedule.R
    assert schedule.M_out == ()


# -- own variables, blocks, objectives ---------------------------------------------------------


def test_an_own_variable(backend: str) -> None:
    """The largest number of recomputations in one stage, as a variable of the user's own.

    With one page-out `f0` and `f1` are recomputed in one stage, 6.5 J; with one recomputation a
    stage `f1` is paged, read twice, and `f2` recomputed from it: 3 * 1.25 + 3 + 1 = 7.75 J.
    """
    model = build(two_ways(), reductions=False)
    model.few_writes = pyo.Constraint(expr=every(model, "M_out") <= 1)
    model.most = pyo.Var(domain=pyo.NonNegativeIntegers)
    model.burst = pyo.Constraint(
        range(1, 10), rule=lambda m, t: sum(m.R[t, k] for k in range(t)) <= m.most
    )
    model.limit = pyo.Constraint(expr=model.most <= 2)
    assert solve(model, backend=backend).overhead_j == 6.5
    assert model.most.value == 2
    model.limit.set_value(model.most <= 1)
    result = solve(model, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 7.75)
    assert model.most.value == 1


def test_an_own_block(backend: str) -> None:
    """Constraints and variables in a block count as well."""
    model = build(two_ways())
    model.policy = pyo.Block()
    model.policy.writes = pyo.Var(bounds=(0, 1))
    model.policy.count = pyo.Constraint(expr=model.policy.writes >= every(model, "M_out"))
    assert solve(model, backend=backend).overhead_j == 6.5


def test_an_own_objective(backend: str) -> None:
    """With the shipped objective deactivated the user's is proved; no energy bound is claimed."""
    model = build(two_ways(), reductions=False)
    model.objective.deactivate()
    model.few = pyo.Objective(expr=every(model, "M_out") + 0.001 * every(model, "R"))
    result = solve(model, backend=backend)
    assert result.require_schedule().M_out == ()
    assert (result.status, result.termination) == (Status.OPTIMAL, Termination.PROVED)
    assert (result.bound_j, result.gap) == (None, 0.0)
    computed = len(result.require_schedule().R)
    objective = result.to_dict()["objective"]
    assert objective["value"] == pytest.approx(0.001 * computed)
    assert objective["bound"] == pytest.approx(0.001 * computed)
    assert (objective["minimize"], objective["name"], objective["sense"]) == (
        "own",
        "few",
        "minimize",
    )
    assert objective["gap"] <= result.requested_gap


def test_an_own_objective_may_be_maximised(backend: str) -> None:
    """The bound is from above, a constant counts, and the schedule has the value."""
    model = build(two_ways(), reductions=False)
    model.objective.deactivate()
    model.many = pyo.Objective(expr=10 + every(model, "M_out"), sense=pyo.maximize)
    result = solve(model, backend=backend)
    assert result.status == Status.OPTIMAL
    own = result.own_objective
    assert own is not None
    assert (own.sense, own.value) == ("maximize", 10 + len(result.require_schedule().M_out))
    assert own.value > 10
    assert own.bound == pytest.approx(own.value)
    assert result.summary().startswith(f"optimal: maximize many: {own.value:.6g}, bound ")


def test_an_own_objective_of_a_variable_of_ones_own(backend: str) -> None:
    """A variable that no schedule knows of has the value and the bound of the model."""
    model = build(two_ways())
    model.slack = pyo.Var(bounds=(-7, 3.5))
    model.link = pyo.Constraint(expr=model.slack >= every(model, "M_out") - 2.5)
    model.objective.deactivate()
    model.mine = pyo.Objective(expr=model.slack)
    result = solve(model, backend=backend)
    assert result.status == Status.OPTIMAL
    value = len(result.require_schedule().M_out) - 2.5
    assert (result.objective_value, result.objective_gap) == (value, 0.0)
    assert model.slack.value == value


OTHERS = (1e-300, 1e-12, 1.0, 1e9)


@pytest.mark.parametrize("sense", [pyo.minimize, pyo.maximize])
@pytest.mark.parametrize(
    "scale",
    [
        5e-324,
        1e-7,
        1e300,
        *(pytest.param(s, marks=pytest.mark.seeds) for s in (1e-300, 1e-12, 1e9)),
    ],
)
def test_an_own_objective_of_any_scale(scale: float, sense: Any, backend: str) -> None:
    """Costs far below or above a solver's tolerances are decided like those near one."""
    model = build(two_ways(), reductions=False)
    model.objective.deactivate()
    count = every(model, "M_out") + every(model, "R") + every(model, "S_RAM")
    model.plain = pyo.Objective(expr=count, sense=sense)
    plain = solve(model, backend=backend)
    model.plain.deactivate()
    model.scaled = pyo.Objective(expr=scale * count, sense=sense)
    result = solve(model, backend=backend)
    assert (plain.status, result.status) == (Status.OPTIMAL, Status.OPTIMAL)
    assert result.objective_value == pytest.approx(scale * (plain.objective_value or 0.0))
    own = result.own_objective
    assert own is not None
    assert own.bound is not None
    assert own.gap <= 1e-4
    beyond = own.bound - own.value if sense == pyo.minimize else own.value - own.bound
    assert beyond <= 0


def test_a_constant_objective_is_reached(backend: str) -> None:
    """Any schedule has the value of a constant."""
    model = build(skip_problem())
    model.objective.set_value(5.0)
    result = solve(model, backend=backend)
    assert (result.status, result.objective_value, result.objective_gap) == (
        Status.OPTIMAL,
        5.0,
        0.0,
    )


def test_an_own_objective_without_bounds_says_so() -> None:
    """A free variable leaves nothing to find; the reason says what is missing."""
    model = build(skip_problem())
    model.free = pyo.Var()
    model.objective.set_value(model.free)
    result = solve(model)
    assert (result.status, result.schedule) == (Status.UNKNOWN, None)
    assert "unbounded: give the variables in it bounds" in result.reason


def test_the_file_of_an_own_objective_is_read_back(tmp_path: Path) -> None:
    """Its schedule file names the objective, and the verifier accepts it."""
    model = build(skip_problem())
    model.objective.set_value(every(model, "M_in"))
    result = solve(model)
    result.save(tmp_path / "own.schedule.json")
    document = load_document(tmp_path / "own.schedule.json")
    assert document.objective is not None
    assert (document.objective.minimize, document.objective.name) == ("own", "objective")
    assert not verify(model.problem, document.schedule, stated=document.stated).violations


@pytest.mark.parametrize("change", ["replaced", "extended", "turned round", "deleted"])
def test_a_changed_objective_claims_no_energy_bound(change: str) -> None:
    """However the objective is changed, its own optimum is proved, and no bound of the energy."""
    model = build(skip_problem())
    rest = every(model, "M_in")
    if change == "replaced":
        model.objective.set_value(-rest)
    elif change == "extended":
        model.objective.expr += 1000 * every(model, "R")
    elif change == "turned round":
        model.objective.sense = pyo.maximize
    else:
        model.del_component(model.objective)
        model.objective = pyo.Objective(expr=rest)
    result = solve(model, gap=0.0)
    assert result.schedule is not None
    assert (result.status, result.bound_j, result.gap) == (Status.OPTIMAL, None, 0.0)
    assert result.own_objective is not None


def test_an_objective_of_another_name() -> None:
    """Deleting the shipped objective and adding one of any name is fine."""
    model = build(skip_problem())
    model.del_component(model.objective)
    model.mine = pyo.Objective(expr=every(model, "M_in"))
    result = solve(model)
    assert result.own_objective is not None
    assert (result.status, result.own_objective.name) == (Status.OPTIMAL, "mine")


@pytest.mark.parametrize("count", [0, 2])
def test_one_objective_is_asked_for(count: int) -> None:
    """No other is no question, and which one of two is meant is the user's to say."""
    model = build(skip_problem())
    if count:
        model.second = pyo.Objective(expr=every(model, "M_in"))
    else:
        model.objective.deactivate()
    with pytest.raises(ModelError, match=f"active objective, got {count}"):
        solve(model)


def test_a_nonlinear_constraint_is_refused() -> None:
    """The error names the row."""
    model = build(skip_problem())
    model.bent = pyo.Constraint(expr=model.R[3, 0] * model.M_in[3, 0] <= 0)
    with pytest.raises(ModelError, match="bent: is not linear"):
        solve(model)


# -- where reductions matter -------------------------------------------------------------------


def no_early_page_outs(model: pyo.ConcreteModel) -> None:
    """Forbid to page a tensor out in the stage of its first computation."""
    graph = model.problem.graph
    model.not_at_once = pyo.Constraint(
        list(enumerate(graph.node_of)), rule=lambda m, i, k: m.M_out[k, i] <= 0
    )


def test_reductions_must_be_off_for_late_page_outs(backend: str) -> None:
    """Reduced models page out at the first computation or never; unreduced ones also later."""
    problem = skip_problem(recompute=False)
    reduced, open_ = build(problem), build(problem, reductions=False)
    no_early_page_outs(reduced)
    no_early_page_outs(open_)
    assert solve(reduced, backend=backend).status == Status.INFEASIBLE
    result = solve(open_, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 2.0)
    schedule = result.require_schedule()
    assert len(schedule.M_out) == 1
    assert all(problem.graph.node_of[i] < t for t, i in schedule.M_out)


def test_reductions_must_be_off_for_page_outs_of_one_stage() -> None:
    """The storage can only be written in stage 1: worse with reductions, optimal without."""
    problem = skip_problem()
    overheads = []
    for reductions in (True, False):
        model = build(problem, reductions=reductions)
        model.only_then = pyo.Constraint(
            [index for index in model.M_out if index[0] != 1],
            rule=lambda m, t, i: m.M_out[t, i] <= 0,
        )
        model.once = pyo.Constraint(expr=model.R[3, 0] + model.R[2, 0] <= 0)
        overheads.append(solve(model).overhead_j)
    assert overheads[1] == 2.0
    assert overheads[0] is None or overheads[0] > 2.0


def test_reductions_must_be_off_for_dominated_recomputations() -> None:
    """`b` costs as much to recompute as to page, so a reduced model does not offer it."""
    asked = []
    for reductions in (True, False):
        model = build(skip_problem(ram=15), reductions=reductions)
        model.again = pyo.Constraint(expr=model.R[3, 1] >= 1)
        asked.append(solve(model))
    assert asked[0].status == Status.INFEASIBLE
    assert asked[1].overhead_j == 2.0


# -- with random constraints -------------------------------------------------------------------


def forbidden(model: pyo.ConcreteModel, result: SolveResult) -> None:
    """Forbid the choices of a solution: at least one of its entries must go."""
    schedule = result.require_schedule()
    used = [model.R[t, k] for t, k in schedule.R if k < t]
    used += [model.M_in[t, i] for t, i in schedule.M_in]
    model.other = pyo.Constraint(expr=sum(used) <= len(used) - 1)


@parts(3)
def test_the_second_best_is_no_better_and_is_valid(part: Part) -> None:
    """On random problems a cut-off optimum leaves a schedule that costs as much or more."""
    found = 0
    for problem in part.of(random_instances(80, (3, 5), seed=21, minimize="energy")):
        best = optimum(problem)
        if best is None:
            continue
        model = build(problem, reductions=False)
        first = solve(model, gap=0.0)
        assert first.energy_j == pytest.approx(best.value, abs=1e-6)
        entries = first.require_schedule()
        if len(entries.R) == len(problem.graph.nodes) and not entries.M_in:
            continue
        forbidden(model, first)
        second = solve(model, gap=0.0)
        if second.schedule is None:
            assert second.status == Status.INFEASIBLE
            continue
        assert second.energy_j is not None
        assert second.energy_j >= best.value - 1e-6
        assert not verify(problem, second.schedule).violations
        found += 1
    assert found > part.share(8)


def test_costs_of_zero_everywhere() -> None:
    """An objective without any term is solved like any other."""
    graph = comb_graph()
    zeros = [0.0] * len(graph.nodes)
    costs = Costs.from_arrays(graph, compute_time_s=zeros, compute_energy_j=zeros)
    result = solve(build(Problem(graph, costs, ram=9)))
    assert (result.status, result.overhead_j, result.gap) == (Status.OPTIMAL, 0.0, 0.0)


def test_only_a_problem_is_built() -> None:
    """Anything else is refused in a sentence."""
    with pytest.raises(InputError, match="build takes a Problem, got 3"):
        build(3)  # type: ignore[arg-type]
