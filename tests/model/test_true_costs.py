"""Models that leave the package have the true costs, or their build names the one out of range."""

import math
from itertools import product

import pyomo.environ as pyo
import pytest

from kit.costly import costly_problem, find_optimum, solve_file
from kit.instances import make_rng
from kit.rotation import mark_seeds_except
from poetmodel.device import Costs, Device
from poetmodel.errors import ModelError
from poetmodel.graph import Graph, operation, zoo
from poetmodel.model import build
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.schedule import check_schedule
from poetmodel.solver import solve

SEEDS = range(24)
MORE_SEEDS = [pytest.param(range(1000, 1150), marks=pytest.mark.seeds)]
SOLVERS = ["highs", pytest.param("scip", marks=pytest.mark.scip)]
PACKAGES = {"highs": "highspy", "scip": "pyscipopt"}


def either_page(first_j, second_j, **limits):
    """Return a step of which either `a` or `b` must be paged out, for given energies.

    A pass needs 7 J, a page-in 1 J, and neither can be recomputed.
    """
    read = {"a": ("x",), "b": ("x",)}
    nodes = (
        operation("x", output_bytes=10, phase="input", recomputable=False),
        *(
            operation(name, inputs=read[name], output_bytes=size, recomputable=False)
            for name, size in (("a", 100), ("b", 101))
        ),
        operation("c", inputs=("x",), output_bytes=150),
        operation("l", inputs=("c",), output_bytes=4, phase="loss"),
        operation("ga", inputs=("l", "a"), output_bytes=10, phase="backward"),
        operation("gb", inputs=("ga", "b"), output_bytes=10, phase="backward"),
    )
    graph = Graph(name="either-page", nodes=nodes)
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1.0] * 7,
        compute_energy_j=[1.0] * 7,
        page_in=[(0.0, 1.0)] * 7,
        page_out=[(0.0, {1: first_j, 2: second_j}.get(i, 1.0)) for i in range(7)],
    )
    return Problem(graph, costs, ram=300, **limits)


@pytest.fixture(params=SOLVERS)
def solver(request):
    """Return the name of each solver that is installed."""
    pytest.importorskip(PACKAGES[request.param])
    return request.param


@pytest.mark.parametrize(
    ("form", "reductions"),
    mark_seeds_except(
        product(("lp", "mps"), (True, False)),
        {("lp", True), ("mps", False)},
        slow={("lp", False), ("mps", True)},
    ),
)
@pytest.mark.parametrize("seeds", [SEEDS, *MORE_SEEDS])
def test_optimum_of_a_file_is_that_of_the_problem(tmp_path, solver, form, reductions, seeds):
    """Transfers cost 1e-3 to 1e7 single passes; the optimum is that of the exhaustive search."""
    n_compared = 0
    for seed in seeds:
        problem = costly_problem(seed)
        best = None if problem is None else find_optimum(problem, max_labels=20_000)
        if best is None:
            continue
        model = build(problem, reductions=reductions)
        found, check = solve_file(model, tmp_path / f"model.{form}", solver)
        objective = problem.objective
        least = objective.overhead_of(check_schedule(problem, best.schedule).simulation)
        tolerance = 1e-6 * least + 1e-9 * objective.baseline
        assert not check.violations, seed
        assert abs(objective.overhead_of(check.simulation) - least) <= tolerance, seed
        if objective.is_sum:
            assert abs(found - least) <= tolerance, seed
        n_compared += 1
    assert n_compared >= len(seeds) / 2


@pytest.mark.parametrize(("first_j", "second_j"), [(20_000.0, 50_000.0), (50_000.0, 20_000.0)])
def test_file_of_paper_has_the_true_costs(tmp_path, solver, first_j, second_j):
    """The published program counts another RAM, but the simulator counts the same energy."""
    model = build(either_page(first_j, second_j), "paper")
    found_j, check = solve_file(model, tmp_path / "paper.mps", solver)
    assert found_j > 7_000
    assert check.simulation.overhead_j == pytest.approx(found_j)


def test_file_of_a_network_with_state_has_the_true_costs(tmp_path, solver):
    """State on the storage of a microcontroller costs thousands of single passes."""
    graph = zoo.mlp(state="sgd", in_place=True)
    problem = Problem(graph, Costs.estimate(graph, Device.load("stm32f746")), ram="60%")
    known_j = solve(problem).overhead_j
    assert known_j > 3000 * problem.baseline_energy_j
    found_j, check = solve_file(build(problem), tmp_path / "mlp.lp", solver)
    assert found_j == pytest.approx(known_j, rel=1e-4)
    assert check.simulation.overhead_j == pytest.approx(known_j, rel=1e-4)


TOTALS = {"M_in": "page_ins", "M_out": "page_outs", "R": "recomputations"}


def sum_of(model, family):
    """Return the sum of a relation, of `R` without the first computations."""
    first = len(model.problem.graph.nodes) if family == "R" else 0
    return sum(getattr(model, family).values()) - first


@pytest.mark.parametrize(
    "solver",
    ["highs", pytest.param("scip", marks=[pytest.mark.scip, pytest.mark.slow])],
    indirect=True,
)
@pytest.mark.parametrize("seeds", [range(30), *MORE_SEEDS])
def test_an_own_objective_may_include_that_of_the_problem(solver, seeds):
    """Times a factor, with a term for each decision of a kind, its optimum is the oracle's."""
    n_compared = 0
    for seed in seeds:
        problem = costly_problem(seed, -4, 7, minimize="energy")
        if problem is None:
            continue
        rng = make_rng(f"own/{seed}")
        factor = 10 ** rng.uniform(-3, 3)
        price = 10 ** rng.uniform(-6, 6) * problem.objective.baseline
        # Totals include the first reads and write-backs of state, which relations do not.
        family = "R" if problem.graph.state_tensors else rng.choice(tuple(TOTALS))

        def stated(v, factor=factor, price=price, family=family):
            return factor * v.energy_j + price * sum(getattr(v, TOTALS[family]).values())

        restated = problem.minimizing(stated)
        best = find_optimum(restated, max_labels=20_000)
        if best is None:
            continue
        model = build(problem, reductions=False)
        model.objective.deactivate()
        energy = factor * model.objective_unit * model.objective.expr
        model.mine = pyo.Objective(expr=energy + price * sum_of(model, family))
        result = solve(model, backend=solver, gap=0.0)
        pass_value = factor * problem.objective.baseline
        least = best.value - pass_value
        simulated = restated.objective.value_of(result.simulation) - pass_value
        tolerance = 2e-6 * abs(least) + 1e-9 * abs(pass_value)
        assert result.status == Status.OPTIMAL, (seed, result.reason)
        assert abs(simulated - least) <= tolerance, seed
        assert abs(result.value - simulated) <= tolerance, seed
        assert result.bound <= least + tolerance, seed
        n_compared += 1
    assert n_compared >= len(seeds) / 3


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("huge_j", [1e5, 1e8])
def test_a_cost_that_is_avoided_hides_no_other(solver, scale, huge_j):
    """Beside a page-out of a million passes, prices of a millionth of a pass still decide."""
    problem = either_page(huge_j, 1e-6)
    model = build(problem)
    model.objective.deactivate()
    energy = model.objective.expr * model.objective_unit
    model.mine = pyo.Objective(expr=scale * (energy + 1e-7 * sum_of(model, "M_in")))
    result = solve(model, backend=solver, gap=0.0)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, pytest.approx(1 + 1e-6))
    assert result.value == pytest.approx(scale * (1 + 1e-6 + 1e-7), rel=1e-9)
    assert result.gap <= 1e-9


def test_rows_of_a_user_leave_the_solve_its_own_range():
    """With the problem's objective, a model is solved whatever its costs are, and proved."""
    model = build(either_page(50_000.0, 20_000.0))
    model.never = pyo.Constraint(expr=sum(model.M_out[t, 2] for t in range(2, 7)) == 0)
    result = solve(model)
    assert (result.status, result.overhead_j) == (Status.OPTIMAL, 50_001)
    assert result.overhead_bound_j == pytest.approx(50_001, rel=1e-4)


@pytest.mark.parametrize("choices", [{}, {"reductions": False}, {"formulation": "paper"}])
def test_a_cost_beyond_the_range_of_solvers_is_named(choices):
    """The build refuses it, and `solve` finds the optimum of the problem without it."""
    problem = either_page(1e12, 2.0)
    with pytest.raises(ModelError, match="single pass") as caught:
        build(problem, **choices)
    assert "paging out 'a'" in str(caught.value)
    assert solve(problem).overhead_j == 3


@pytest.mark.parametrize("minimize", ["ram", "writes"])
def test_other_objectives_have_no_costs_out_of_range(tmp_path, solver, minimize):
    """Bytes are resolved to one byte however dear paging is."""
    problem = either_page(1e12, 2.0, minimize=minimize)
    _, check = solve_file(build(problem), tmp_path / "bytes.lp", solver)
    result = solve(problem)
    assert not check.violations
    assert problem.objective.value_of(check.simulation) == result.value


def test_units_resolve_small_prices_beside_large_ones(tmp_path, solver):
    """A user-defined objective has a price of 1e9 beside one of a single unit."""
    problem = either_page(3.0, 2.0).minimizing(
        lambda v: v.page_ins["b"] + 2 * v.page_ins["a"] + 1e9 * v.page_outs["c"]
    )
    value, check = solve_file(build(problem), tmp_path / "prices.mps", solver)
    assert not check.violations
    assert problem.objective.overhead_of(check.simulation) == 1
    assert value == pytest.approx(1)
    assert math.isclose(solve(problem).value, 1)
