"""Models that people extend: own constraints, variables, blocks and objectives are honoured."""

from dataclasses import FrozenInstanceError

import pyomo.environ as pyo
import pytest

from kit.instances import random_instances
from kit.worked import comb_graph, costs_of, even_costs, skip_problem
from poetmodel.errors import InputError, VerificationError
from poetmodel.graph import Graph, operation
from poetmodel.model import FORMULATIONS, Component, Formulation, build, read_schedule
from poetmodel.model.compact import COMPACT
from poetmodel.model.unreduced import UNREDUCED
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.schedule import RELATIONS, check_schedule, checkpoint_all
from poetmodel.schedule.document import load_document
from poetmodel.solver import solve

BACKENDS = [
    "highs",
    pytest.param("scip", marks=pytest.mark.scip),
    pytest.param("gurobi", marks=pytest.mark.gurobi),
]
PACKAGES = {"highs": "highspy", "scip": "pyscipopt", "gurobi": "gurobipy"}


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Return each back end that is installed."""
    name = request.param
    pytest.importorskip(PACKAGES[name])
    return name


def two_ways(**limits):
    """Return the comb of five teeth with 9 bytes: at most two of `f0` to `f4` are in RAM.

    Paging costs 1.25 J each way, computing `f0` 1 J, `f1` 2 J, `f2` 3 J, and inputs of a node
    must be in RAM. Best: `f2` and `f1` are paged and `f0` recomputed, 2.5 + 2.5 + 1 = 6 J. With
    one page-out only, `f1` is recomputed from `f0` and that once more: 2.5 + (1 + 2) + 1 = 6.5
    J.
    """
    graph = comb_graph(5)
    page = (1.25, 1.25)
    return Problem(graph, even_costs(graph, page_in=page, page_out=page), **{"ram": 9, **limits})


def every(model, name):
    """Return the sum of a relation."""
    return sum(getattr(model, name).values())


# -- what is built -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("choices", "exact"),
    [
        ({}, True),
        ({"reductions": False}, True),
        ({"formulation": "paper"}, False),
        ({"formulation": COMPACT}, True),
        ({"formulation": UNREDUCED}, True),
        ({"formulation": COMPACT.without("storage", name="unlimited")}, False),
    ],
)
def test_only_exact_models_bound_the_problem(choices, exact):
    """Restrictions and ablations are no exact models; a model has its problem."""
    problem = skip_problem()
    model = build(problem, **choices)
    assert (model.problem is problem, model.exact) == (True, exact)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"formulation": "compcat"}, "'compcat'"),
        ({"formulation": "lazy"}, "series of models"),
    ],
)
def test_unknown_choices_are_refused(choices, message):
    """The error lists the choices."""
    with pytest.raises(InputError, match=message):
        build(skip_problem(), **choices)
    with pytest.raises(InputError, match="got 3"):
        build(3)


@pytest.mark.parametrize(
    "limits",
    [
        *({"ram": 3, "minimize": minimize} for minimize in ("energy", "time", "ram", "writes")),
        {"deadline": 9.0},
        {"energy_budget": 9.0},
        {"deadline": 9.0, "ram": 3},
    ],
)
@pytest.mark.parametrize("reductions", [True, False])
def test_what_is_infeasible_builds_a_model_without_solutions(limits, reductions):
    """Less than the floor, or than the 10 s and 10 J of one pass: building never fails."""
    model = build(skip_problem(**limits), reductions=reductions)
    answer = pyo.SolverFactory("appsi_highs").solve(model, load_solutions=False)
    assert str(answer.solver.termination_condition).startswith("infeasible")


@pytest.mark.parametrize("reductions", [True, False])
def test_no_ram_at_all_is_enough_for_tensors_of_no_bytes(reductions):
    """With parameters that fill the budget, a graph of empty tensors still has its least peak."""
    nodes = (operation("a", output_bytes=0), operation("b", output_bytes=0, inputs=("a",)))
    graph = Graph(name="empty", nodes=nodes, resident_bytes={"parameters": 10})
    problem = Problem(graph, even_costs(graph), ram=10, count_parameters=True, minimize="ram")
    result = solve(build(problem, reductions=reductions))
    assert (result.status, result.value) == (Status.OPTIMAL, 0)


def test_an_ablation_is_one_line():
    """Without its storage rows, ``compact`` pages more than fits, which the verifier reports.

    A user-defined objective component replaces the shipped one, without a bound on energy.
    """
    problem = two_ways(aux_bytes=8, recompute=False)
    unlimited = COMPACT.without("storage", name="unlimited")
    assert solve(problem, formulation="compact").status == Status.INFEASIBLE
    with pytest.raises(VerificationError, match="storage used 12 B"):
        solve(build(problem, unlimited))
    result = solve(build(two_ways(recompute=False), unlimited))
    assert (result.overhead_j, result.formulation) == (7.5, "unlimited")

    def writes(m):
        """Minimize the number of page-outs."""
        m.objective = pyo.Objective(expr=sum(var for _, var in m.decisions.page_outs))

    objective = Component("objective", writes, "made up", frozenset({"variables"}))
    result = solve(build(two_ways(), COMPACT.swap(objective, name="few writes")))
    assert len(result.require_schedule().M_out) == 1
    assert (result.status, result.bound_j) == (Status.OPTIMAL, None)
    assert (result.value, result.gap) == (1.0, 0.0)


def test_read_schedule_reads_the_values_of_a_model():
    """A model solved by other means has a schedule; so do values read in another way."""
    model = build(skip_problem(recompute=False))
    pyo.SolverFactory("appsi_highs").solve(model)
    schedule = read_schedule(model)
    assert (schedule.M_out, schedule.M_in) == (((0, 0),), ((3, 0),))
    assert not check_schedule(model.problem, schedule).violations
    schedule = read_schedule(build(skip_problem()), value=lambda _: False)
    assert tuple((t, t) for t in range(4)) == schedule.R
    assert schedule.S_RAM == schedule.M_in == schedule.M_out == ()


@pytest.mark.parametrize("reductions", [True, False])
def test_a_schedule_goes_into_a_model_and_comes_out_again(reductions):
    """The start has the values of the variables, for schedules that keep up to the last use."""
    for problem in random_instances(60, (2, 6), seed=9, recompute=True, paging=True):
        model = build(problem, reductions=reductions)
        schedule = checkpoint_all(problem.graph)
        for column, value in model.arrays.relations.column_values(schedule):
            if column not in model.arrays.fixed:
                model.variables[column].set_value(value)
        back = read_schedule(model)
        assert all(getattr(back, name) == getattr(schedule, name) for name in RELATIONS)


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_a_clone_is_solved_like_the_model(formulation):
    """Copies of a model, for a series of variants, are independent."""
    model = build(skip_problem(recompute=False), formulation)
    copy = model.clone()
    assert solve(copy).schedule == solve(model).require_schedule()
    copy.never = pyo.Constraint(expr=every(copy, "M_out") <= 0)
    assert solve(copy).schedule is None
    assert solve(model).schedule is not None


# -- own constraints ---------------------------------------------------------------------------
def again(schedule):
    """Return the nodes that a schedule computes again."""
    return sorted(k for t, k in schedule.R if k < t)


RULES = {
    # Two tensors are paged and one is recomputed.
    "none": (
        two_ways, {}, None, 6.0,
        lambda s: ({i for _, i in s.M_out}, again(s)) == ({1, 2}, [0]),
    ),
    # With one page-out at most, more is recomputed.
    "few page-outs": (
        two_ways, {}, lambda m: [every(m, "M_out") <= 1], 6.5,
        lambda s: ([i for _, i in s.M_out], again(s)) == ([2], [0, 0, 1]),
    ),
    # Without recomputing `a` in stage 3 it is paged.
    "no recomputation": (
        skip_problem, {}, lambda m: [m.R[3, 0] == 0], 2.0, lambda s: (3, 0) not in s.R,
    ),
    # A recomputation that nobody needs is made, and stays in the schedule.
    "a recomputation": (
        skip_problem, {"ram": 15}, lambda m: [m.R[3, 0] >= 1], 1.0, lambda s: (3, 0) in s.R,
    ),
    # Where `f0` stays, `f2` is paged as well.
    "a tensor stays": (
        two_ways, {"ram": 13}, lambda m: [m.S_RAM[t, 0] >= 1 for t in range(1, 10)], 4.5,
        lambda s: {(t, 0) for t in range(1, 10)} <= {*s.S_RAM} and {i for _, i in s.M_out} == {2},
    ),
    # `f1` must not be on storage when stage 5 begins.
    "storage": (
        two_ways, {}, lambda m: [m.S_AUX[5, 1] <= 0], 6.5,
        lambda s: all(i != 1 for _, i in s.S_AUX),
    ),
    # Rows may mix relations: as many recomputations as page-outs takes 1 J more.
    "an equation": (
        two_ways, {}, lambda m: [every(m, "R") - 10 == every(m, "M_out")], 7.0,
        lambda s: len(s.R) - 10 == len(s.M_out) == 2,
    ),
    # Entries that the formulation decided can stand in a row, also alone.
    "what always holds": (
        skip_problem, {}, lambda m: [m.R[2, 2] >= 1, m.M_out[3, 3] + m.R[1, 1] <= 2], 1.0,
        lambda s: again(s) == [0],
    ),
}  # fmt: skip
"""Problem, its limits, rows, what they cost, and what the schedule does then."""


@pytest.mark.parametrize("name", RULES)
def test_own_constraints_hold(backend, name):
    """By hand, whatever relation they name."""
    make, limits, rule, overhead_j, holds = RULES[name]
    model = build(make(**limits))
    model.own = pyo.ConstraintList()
    for row in rule(model) if rule else ():
        model.own.add(row)
    result = solve(model, backend=backend)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, overhead_j)
    assert result.formulation == "compact"
    assert holds(result.require_schedule())


@pytest.mark.parametrize(
    ("rule", "limits", "reductions", "named"),
    [
        # Keeping `a` while `c` is computed takes 15 of 13 bytes: proved, with the limits named.
        (lambda m: m.S_RAM[2, 0] + m.S_RAM[3, 0] >= 2, {}, True,
         ("the RAM budget of 13 B", "reductions=False")),
        # `b` is not paged out in stage 3 by a reduced model: infeasible by that row alone.
        (lambda m: m.M_out[3, 1] >= 1, {}, True, ("mine",)),
        # `a` may not be recomputed here, so a row that asks for it cannot hold.
        (lambda m: m.R[3, 0] >= 1, {"recompute": False}, False, ("mine",)),
    ],
)  # fmt: skip
def test_a_constraint_that_never_holds_is_named(backend, rule, limits, reductions, named):
    """It, or the limits that it meets."""
    model = build(skip_problem(**limits), reductions=reductions)
    model.mine = pyo.Constraint(expr=rule(model))
    result = solve(model, backend=backend)
    assert (result.status, result.schedule) == (Status.INFEASIBLE, None)
    assert all(words in result.reason for words in named)


@pytest.mark.parametrize("formulation", ["unreduced", "paper"])
def test_own_constraints_on_other_formulations(backend, formulation):
    """A model with every choice open and the published formulation can be extended as well."""
    paper = formulation == "paper"
    model = build(skip_problem(), "paper") if paper else build(skip_problem(), reductions=False)
    model.no_pages = pyo.Constraint(expr=every(model, "M_out") <= 0)
    model.once = pyo.Constraint(expr=model.R[2, 2] >= 1)
    model.again = pyo.Constraint(expr=model.R[2, 0] >= 1)
    schedule = solve(model, backend=backend).require_schedule()
    assert (2, 0) in schedule.R
    assert schedule.M_out == ()


# -- own variables, blocks, objectives ---------------------------------------------------------
def test_an_own_variable(backend):
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


def test_an_own_block(backend):
    """Constraints and variables in a block count as well; any schedule has a constant's value."""
    model = build(two_ways())
    model.policy = pyo.Block()
    model.policy.writes = pyo.Var(bounds=(0, 1))
    model.policy.count = pyo.Constraint(expr=model.policy.writes >= every(model, "M_out"))
    assert solve(model, backend=backend).overhead_j == 6.5
    model = build(skip_problem())
    model.objective.set_value(5.0)
    result = solve(model, backend=backend)
    assert (result.status, result.value) == (Status.OPTIMAL, 5.0)
    assert result.gap == 0.0


def few(model):
    """Minimize page-outs, and computations a little."""
    count = every(model, "M_out") + 0.001 * every(model, "R")
    return pyo.minimize, count, lambda s: len(s.M_out) + 0.001 * len(s.R)


def many(model):
    """Maximize page-outs; the bound is from above, and a constant counts."""
    return pyo.maximize, 10 + every(model, "M_out"), lambda s: 10 + len(s.M_out)


def own_variable(model):
    """Minimize a variable that depends on no decision."""
    model.slack = pyo.Var(bounds=(-7, 3.5))
    model.link = pyo.Constraint(expr=model.slack >= every(model, "M_out") - 2.5)
    return pyo.minimize, model.slack, lambda s: len(s.M_out) - 2.5


@pytest.mark.parametrize("objective", [few, many, own_variable])
def test_an_own_objective(backend, objective):
    """With the shipped one deactivated the user's is proved; no energy bound is claimed."""
    model = build(two_ways(), reductions=objective is own_variable)
    model.objective.deactivate()
    sense, expression, value_of = objective(model)
    model.mine = pyo.Objective(expr=expression, sense=sense)
    result = solve(model, backend=backend)
    assert (result.status, result.termination) == (Status.OPTIMAL, Termination.PROVED)
    assert (result.bound_j, result.gap, result.gap) == (None, 0.0, 0.0)
    value = pytest.approx(value_of(result.require_schedule()))
    stated = result.to_dict()["objective"]
    assert (stated["value"], stated["bound"], result.value) == (value, value, value)
    senses = {pyo.minimize: "minimize", pyo.maximize: "maximize"}
    told = (stated["minimize"], stated["name"], stated["sense"])
    assert told == ("own", "mine", senses[sense])
    assert result.summary().startswith(f"optimal: {senses[sense]} mine: {stated['value']:.6g}, ")
    if objective is own_variable:
        assert model.slack.value == value
    else:
        assert bool(result.require_schedule().M_out) == (objective is many)


@pytest.mark.parametrize("sense", [pyo.minimize, pyo.maximize])
@pytest.mark.parametrize(
    "scale",
    [
        5e-324,
        1e300,
        *(pytest.param(s, marks=pytest.mark.seeds) for s in (1e-300, 1e-12, 1e-7, 1e9)),
    ],
)
def test_an_own_objective_of_any_scale(scale, sense, backend):
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
    assert result.value == pytest.approx(scale * (plain.value or 0.0))
    own = result.model_objective
    assert own.gap <= 1e-4
    beyond = own.bound - own.value if sense == pyo.minimize else own.value - own.bound
    assert beyond <= 0


def test_the_file_of_an_own_objective_is_read_back(tmp_path):
    """The file names the objective, and the verifier accepts it; one without bounds states this."""
    model = build(skip_problem())
    model.objective.set_value(every(model, "M_in"))
    result = solve(model)
    result.save(tmp_path / "own.schedule.json")
    document = load_document(tmp_path / "own.schedule.json")
    assert (document.objective.minimize, document.objective.name) == ("own", "objective")
    assert not check_schedule(
        model.problem, document.schedule, stated=document.stated_metrics
    ).violations
    model = build(skip_problem())
    model.free = pyo.Var()
    model.objective.set_value(model.free)
    result = solve(model)
    assert (result.status, result.schedule) == (Status.UNKNOWN, None)
    assert "unbounded: give the variables in it bounds" in result.reason


@pytest.mark.parametrize("change", ["replaced", "extended", "turned round", "mine"])
def test_a_changed_objective_claims_no_energy_bound(change):
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
        model.mine = pyo.Objective(expr=rest)
    result = solve(model, gap=0.0)
    assert result.schedule is not None
    assert (result.status, result.bound_j, result.gap) == (Status.OPTIMAL, None, 0.0)
    assert result.model_objective.name == ("mine" if change == "mine" else "objective")


# -- where reductions matter -------------------------------------------------------------------
def late_page_outs(model):
    """Forbid to page a tensor out in the stage of its first computation."""
    return [model.M_out[k, i] <= 0 for i, k in enumerate(model.problem.graph.node_of)]


def page_outs_of_one_stage(model):
    """Let storage be written in stage 1 alone, and `a` not be computed again."""
    others = [var <= 0 for index, var in model.M_out.items() if index[0] != 1]
    return [*others, model.R[3, 0] + model.R[2, 0] <= 0]


def a_dominated_recomputation(model):
    """Require another computation of `b`, whose recomputation costs as much as its paging."""
    return [model.R[3, 1] >= 1]


@pytest.mark.parametrize(
    ("rule", "limits"),
    [
        (late_page_outs, {"recompute": False}),
        (page_outs_of_one_stage, {}),
        (a_dominated_recomputation, {"ram": 15}),
    ],
)
def test_reductions_must_be_off(backend, rule, limits):
    """Reduced models lack keeps that such rows need: no solution or a worse one, 2 J without."""
    results = []
    for reductions in (True, False):
        model = build(skip_problem(**limits), reductions=reductions)
        model.own = pyo.ConstraintList()
        for row in rule(model):
            if row is not True:
                model.own.add(row)
        results.append(solve(model, backend=backend))
    reduced, whole = results
    assert reduced.status == Status.INFEASIBLE or reduced.overhead_j > 2.0
    assert rule is page_outs_of_one_stage or reduced.status == Status.INFEASIBLE
    assert (whole.status, whole.overhead_j) == (Status.OPTIMAL, 2.0)
    if rule is late_page_outs:
        [(t, i)] = whole.require_schedule().M_out
        assert model.problem.graph.node_of[i] < t


# -- the least there is -----------------------------------------------------------------------
def test_costs_of_zero_everywhere():
    """An objective without any term is solved like any other."""
    graph = comb_graph()
    zeros = [0.0] * len(graph.nodes)
    costs = costs_of(graph, zeros)
    result = solve(build(Problem(graph, costs, ram=9)))
    assert (result.status, result.overhead_j, result.gap) == (Status.OPTIMAL, 0.0, 0.0)


# -- formulations as values: what may be put together, exchanged and left out --------------------
def _first(m):
    """Add a variable x between 0 and 1."""
    m.x = pyo.Var(bounds=(0, 1))


def _second(m):
    m.row = pyo.Constraint(expr=m.x >= 1)


def _second_anew(m):
    m.row = pyo.Constraint(expr=m.x >= 0.5)


FIRST = Component("first", _first, "made up")
SECOND = Component("second", _second, "made up", frozenset({"first"}))
BOTH = Formulation("both", (FIRST, SECOND))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Formulation("bad", (SECOND, FIRST)), "'bad': component 'second' requires first"),
        # Leaving out what another component requires is no formulation either.
        (lambda: BOTH.without("first", name="half"), "component 'second' requires first"),
        # Two components of one name would build the same thing.
        (lambda: Formulation("twice", (FIRST, SECOND, FIRST)), "'first' is repeated"),
        # Swapping in what is not there would silently add it, or do nothing.
        (lambda: BOTH.swap(Component("third", _first, "made up"), name="three"), "'third' to swap"),
        # A misspelt ablation must not pass for one.
        (lambda: BOTH.without("secnd", name="one"), "'secnd' to leave out"),
    ],
)
def test_what_is_no_formulation_is_refused(make, words):
    """The error names formulation, component and the missing part."""
    with pytest.raises(InputError, match=words):
        make()


def test_swap_puts_one_component_in_the_place_of_another():
    """An ablation is one line; the original formulation stays, and so does the order."""
    anew = Component("second", _second_anew, "made up", frozenset({"first"}))
    swapped = BOTH.swap(anew, name="anew")
    assert (swapped.name, swapped.components) == ("anew", (FIRST, anew))
    assert BOTH.components == (FIRST, SECOND)
    assert BOTH.without("second", name="one") == Formulation("one", (FIRST,))
    m = pyo.ConcreteModel()
    swapped.populate(m)
    assert [item.name for item in m.component_objects()] == ["x", "row"]
    assert pyo.value(m.row.lower) == 0.5
    assert (FIRST.statement, SECOND.statement) == ("Add a variable x between 0 and 1.", "")
    with pytest.raises(FrozenInstanceError):
        BOTH.name = "other"


@pytest.mark.parametrize("formulation", [*FORMULATIONS.values(), UNREDUCED], ids=lambda f: f.name)
def test_every_shipped_component_states_itself_and_its_source(formulation):
    """One family each: an inequality or an explanation, and its source."""
    assert formulation is UNREDUCED or FORMULATIONS[formulation.name] is formulation
    for part in formulation.components:
        assert len(part.statement.strip()) > 20, part.name
        assert part.source, part.name
