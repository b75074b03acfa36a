"""One suite for every back end: whatever the solver, the promises are the same.

Instances are random with fixed seeds. *Hard* ones cannot be finished in minutes by any solver at
hand, so that what stops them is what the test wants to stop them; a time limit of a minute is the
safety net, and a test in which it strikes fails by its termination.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.instances import state_problem
from kit.oracle import optimum
from poetmodel.backends import BackendProgress, Limits, SolverStatus, backend
from poetmodel.backends.compiler import compile_model, load_values
from poetmodel.backends.registry import backend_names
from poetmodel.backends.standard_form import MAXIMIZE, MINIMIZE, StandardForm
from poetmodel.errors import BackendError, BackendUnavailableError, InputError, UnknownOptionError
from poetmodel.model import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.backends.solver import Solver

MATRIX = (
    pytest.param("highs"),
    pytest.param("scip", marks=pytest.mark.scip),
    pytest.param("gurobi", marks=pytest.mark.gurobi),
)
FIRST_QUICKLY = pytest.mark.parametrize(
    "solver",
    [
        "highs",
        pytest.param("scip", marks=[pytest.mark.scip, pytest.mark.slow]),
        pytest.param("gurobi", marks=[pytest.mark.gurobi, pytest.mark.slow]),
    ],
    indirect=True,
)
"""For what takes a while: the default back end quickly, the others with the slow tests."""
PACKAGE = {"highs": "highspy", "scip": "pyscipopt", "gurobi": "gurobipy"}
NODE_LIMIT = {"highs": "mip_max_nodes", "scip": "limits/nodes", "gurobi": "NodeLimit"}
GAP = {"highs": "mip_rel_gap", "scip": "limits/gap", "gurobi": "MIPGap"}

SAFE = Limits(time_s=60.0, rel_gap=0.0)
"""To the end, and never for ever."""


@pytest.fixture(params=MATRIX)
def solver(request: pytest.FixtureRequest) -> Solver:
    """Return one back end after the other; the default one is never skipped."""
    name: str = request.param
    if name != "highs":
        pytest.importorskip(PACKAGE[name])
    return backend(name)


def knapsack(items: int, rows: int, **changes: Any) -> StandardForm:
    """Return a maximisation in which taking nothing is feasible."""
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 100, (rows, items))
    fields = {"upper": 1.0, "row_upper": weights.sum(1) // 2, "integer": True, "sense": MAXIMIZE}
    return StandardForm.from_arrays(weights, rng.integers(1, 100, items), **fields | changes)


def covering(items: int = 40, rows: int = 5, **changes: Any) -> StandardForm:
    """Return a minimisation in which taking everything is feasible; its optimum is 503."""
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 100, (rows, items))
    fields = {"upper": 1.0, "row_lower": weights.sum(1) // 2, "integer": True}
    return StandardForm.from_arrays(weights, rng.integers(1, 100, items), **fields | changes)


def hard() -> StandardForm:
    """Return a knapsack whose last percent of gap nobody closes within minutes."""
    return knapsack(400, 40)


def hopeless() -> StandardForm:
    """Return a market split: equations that hardly any choice of binaries meets."""
    rng = np.random.default_rng(0)
    shares = rng.integers(0, 100, (5, 40))
    half = shares.sum(1) // 2
    return StandardForm.from_arrays(
        shares, np.ones(40), upper=1.0, row_lower=half, row_upper=half, integer=True
    )


def tiny(**changes: Any) -> StandardForm:
    """Return ``min x + 2 y`` over binaries with ``x + y >= 1``; the optimum is 1."""
    fields = {"upper": 1.0, "row_lower": 1.0, "integer": True}
    return StandardForm.from_arrays([[1.0, 1.0]], [1.0, 2.0], **fields | changes)


def test_matrix_holds_every_registered_back_end() -> None:
    """A back end cannot be registered without going through this suite."""
    assert {param.values[0] for param in MATRIX} == set(backend_names())
    assert "highs" in backend_names()


def test_name_and_versions(solver: Solver) -> None:
    """A back end knows its name, that it is installed, and the versions of solver and wrapper."""
    versions = solver.versions()
    assert solver.available()
    assert {solver.name, PACKAGE[solver.name]} == set(versions)
    assert all(version[0].isdigit() and "." in version for version in versions.values())


@pytest.mark.parametrize(
    ("sense", "offset", "best"),
    [(MINIMIZE, 0.0, 1.0), (MINIMIZE, -7.5, -6.5), (MAXIMIZE, 2.0, 5.0)],
)
def test_optimal(solver: Solver, sense: int, offset: float, best: float) -> None:
    """The optimum, its objective with the constant, and a bound equal to it come back."""
    form = tiny(sense=sense, offset=offset)
    result = solver.solve(form, SAFE)
    assert result.status is SolverStatus.OPTIMAL
    assert not result.infeasible
    assert result.objective == pytest.approx(best, abs=1e-9)
    assert result.bound == pytest.approx(best, abs=1e-6)
    assert result.x is not None
    assert form.value(result.x) == result.objective
    assert form.violation(result.x) == 0.0
    assert result.start_accepted is None
    assert result.build_s > 0
    assert result.solve_s > 0


def test_optimal_after_search(solver: Solver) -> None:
    """A model that takes some search ends at its known optimum, with whole numbers."""
    result = solver.solve(covering(), SAFE)
    assert (result.status, result.objective) == (SolverStatus.OPTIMAL, 503.0)
    assert result.bound == pytest.approx(503.0, abs=1e-6)
    assert result.x is not None
    assert set(result.x.tolist()) == {0.0, 1.0}
    assert isinstance(result.nodes, int)


def test_continuous(solver: Solver) -> None:
    """A model without integers gives optimum and bound, and counts no nodes."""
    result = solver.solve(tiny(integer=False, row_lower=1.5), SAFE)
    assert result.status is SolverStatus.OPTIMAL
    assert result.x == pytest.approx([1.0, 0.5])
    assert result.bound == pytest.approx(2.0)
    assert result.nodes is None


@pytest.mark.parametrize(
    "form",
    [
        tiny(row_lower=3.0),
        tiny(row_lower=3.0, integer=False),
        StandardForm.from_arrays(
            [[2.0, 2.0, 2.0]], [1.0] * 3, upper=1.0, row_lower=3, row_upper=3, integer=True
        ),
        StandardForm.from_arrays(
            [[3.0, 5.0, 7.0], [2.0, 2.0, 4.0]],
            [1.0] * 3,
            upper=[9.0, 9.0, 9.0],
            row_lower=[4.0, 3.0],
            row_upper=[4.0, 7.0],
            integer=True,
        ),
        tiny(lower=[0.0, 2.0], upper=[1.0, 1.0]),
        tiny(lower=0.2, upper=0.8),
        tiny(row_lower=2.0, row_upper=1.0),
    ],
    ids=["rows", "continuous", "parity", "integers", "crossed", "no-integer-between", "row"],
)
def test_infeasible(solver: Solver, form: StandardForm) -> None:
    """Infeasibility is proved, whether rows, integrality or crossed bounds cause it."""
    result = solver.solve(form, SAFE)
    assert (result.status, result.infeasible) == (SolverStatus.INFEASIBLE, True)
    assert (result.x, result.objective, result.bound) == (None,) * 3


def test_infeasible_only_as_integers(solver: Solver) -> None:
    """The same equations are infeasible for integers and feasible for reals."""
    form = StandardForm.from_arrays(
        [[4.0, 6.0]], [1.0, 1.0], upper=9.0, row_lower=9.0, row_upper=9.0, integer=True
    )
    assert solver.solve(form, SAFE).infeasible
    relaxed = solver.solve(form.relaxed(), SAFE)
    assert not relaxed.infeasible
    assert relaxed.objective == pytest.approx(1.5)


@pytest.mark.parametrize("integer", [[True, True], [True, False], [False, False]])
def test_unbounded(solver: Solver, integer: list[bool]) -> None:
    """Without a best solution there is none, and the reason says so."""
    form = StandardForm.from_arrays([[1.0, -2.0]], [-1.0, 1.0], row_upper=1.0, integer=integer)
    result = solver.solve(form, SAFE)
    assert result.status is SolverStatus.UNBOUNDED
    assert (result.infeasible, result.x, result.bound) == (False, None, None)


def test_unbounded_relaxation_of_an_infeasible_model(solver: Solver) -> None:
    """A model is not called unbounded when no integers satisfy it."""
    form = StandardForm.from_arrays(
        [[1.0, -2.0, 0.0], [0.0, 0.0, 2.0]],
        [-1.0, 1.0, 0.0],
        upper=[np.inf, np.inf, 5.0],
        row_lower=[-np.inf, 3.0],
        row_upper=[1.0, 3.0],
        integer=True,
    )
    result = solver.solve(form, SAFE)
    assert (result.status, result.infeasible) == (SolverStatus.INFEASIBLE, True)


@FIRST_QUICKLY
def test_time_limit_with_incumbent(solver: Solver) -> None:
    """Out of time, the best solution and a bound on the far side of it come back."""
    result = solver.solve(hard(), Limits(time_s=0.5, rel_gap=0.0), start=np.zeros(400))
    assert result.status is SolverStatus.TIME_LIMIT
    assert not result.infeasible
    assert result.objective is not None
    assert result.objective >= 0.0
    assert result.bound is None or result.bound > result.objective


def test_time_limit_without_incumbent(solver: Solver) -> None:
    """Out of time with nothing in hand, absent is None."""
    result = solver.solve(hopeless(), Limits(time_s=0.2))
    assert result.status is SolverStatus.TIME_LIMIT
    assert (result.infeasible, result.x, result.objective) == (False, None, None)


@pytest.mark.parametrize("form", [hard(), hopeless(), covering(integer=False)])
def test_time_limit_in_no_time(solver: Solver, form: StandardForm) -> None:
    """A limit that building uses up is a time limit, not an error."""
    result = solver.solve(form, Limits(time_s=1e-9))
    assert result.status is SolverStatus.TIME_LIMIT
    assert result.x is None


def test_time_limit_keeps_an_accepted_start(solver: Solver) -> None:
    """A feasible start is never lost, not even with no time to hand it over."""
    result = solver.solve(hard(), Limits(time_s=1e-9), start=np.zeros(400))
    assert result.start_accepted is True
    assert (result.status, result.objective) == (SolverStatus.TIME_LIMIT, 0.0)


def test_gap_stop(solver: Solver) -> None:
    """A requested gap is a gap proved, and no more work than that is done."""
    result = solver.solve(hard(), Limits(time_s=60.0, rel_gap=0.1))
    assert result.status is SolverStatus.OPTIMAL
    assert result.objective is not None
    assert result.bound is not None
    assert 0 < result.bound - result.objective <= 0.1 * result.objective * (1 + 1e-9)


def test_absolute_gap_stop(solver: Solver) -> None:
    """The absolute gap stops a solve by itself."""
    result = solver.solve(hard(), Limits(time_s=60.0, rel_gap=0.0, abs_gap=700.0))
    assert result.status is SolverStatus.OPTIMAL
    assert result.objective is not None
    assert result.bound is not None
    assert 0 < result.bound - result.objective <= 700.0 + 1e-6


@pytest.mark.parametrize(
    ("form", "good"), [(covering(400, 40), 5000.0), (hard(), 6000.0)], ids=["min", "max"]
)
def test_objective_stop(solver: Solver, form: StandardForm, good: float) -> None:
    """The first solution that is good enough ends the solve."""
    result = solver.solve(form, Limits(time_s=60.0, rel_gap=0.0, objective_stop=good))
    assert result.status is SolverStatus.OBJECTIVE_STOP
    assert result.objective is not None
    assert form.sense * (result.objective - good) <= 0


def test_objective_stop_out_of_reach(solver: Solver) -> None:
    """A stop that no solution reaches changes nothing."""
    result = solver.solve(covering(), Limits(time_s=60.0, rel_gap=0.0, objective_stop=502.5))
    assert (result.status, result.objective) == (SolverStatus.OPTIMAL, 503.0)


@pytest.mark.parametrize("sense", [MINIMIZE, MAXIMIZE])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_objective_cutoff(solver: Solver, sense: int, offset: float) -> None:
    """A cutoff beyond the optimum changes nothing; one short of it is proved, with its bound."""
    costs = covering().objective * sense
    form = StandardForm.from_arrays(
        covering().matrix,
        costs,
        upper=1.0,
        row_lower=covering().row_lower,
        integer=True,
        sense=sense,
        offset=offset,
    )
    best = sense * 503.0 + offset
    found = solver.solve(form, Limits(time_s=60.0, rel_gap=0.0, objective_cutoff=best + 5 * sense))
    assert (found.status, found.objective) == (SolverStatus.OPTIMAL, best)
    cutoff, seen = best - 5 * sense, list[BackendProgress]()
    none = solver.solve(
        form,
        Limits(time_s=60.0, rel_gap=0.0, objective_cutoff=cutoff),
        on_progress=seen.append,
    )
    assert (none.status, none.infeasible) == (SolverStatus.CUTOFF, False)
    assert (none.x, none.bound) == (None, cutoff)
    assert all(sense * (news.bound - cutoff) <= 0 for news in seen if news.bound is not None)


def test_start_accepted(solver: Solver) -> None:
    """A feasible start is the first solution reported and the worst one returned."""
    form, seen = hard(), list[BackendProgress]()
    good = solver.solve(form, Limits(time_s=60.0, rel_gap=0.1)).x
    assert good is not None
    result = solver.solve(
        form, Limits(time_s=60.0, rel_gap=0.1), start=good, on_progress=seen.append
    )
    assert result.start_accepted is True
    assert seen[0].incumbent == form.value(good)
    assert result.objective is not None
    assert result.objective >= form.value(good)


def test_start_infeasible_is_ignored(solver: Solver) -> None:
    """A start that breaks the model is said to, and the optimum is found all the same."""
    result = solver.solve(covering(), SAFE, start=np.zeros(40))
    assert result.start_accepted is False
    assert (result.status, result.objective) == (SolverStatus.OPTIMAL, 503.0)


@pytest.mark.parametrize("values", [1.0, 0.0])
def test_start_partial(solver: Solver, values: float) -> None:
    """A start with gaps, extensible or not, does no harm."""
    start = np.full(40, np.nan)
    start[:20] = values
    result = solver.solve(covering(), SAFE, start=start)
    assert result.start_accepted is None
    assert (result.status, result.objective) == (SolverStatus.OPTIMAL, 503.0)


def test_start_of_a_continuous_model(solver: Solver) -> None:
    """Models without integers take a start as well."""
    form = covering(integer=False)
    result = solver.solve(form, SAFE, start=np.ones(40))
    assert (result.status, result.start_accepted) == (SolverStatus.OPTIMAL, True)
    assert result.objective is not None
    assert result.objective < form.value(np.ones(40))


@pytest.mark.parametrize("start", [np.zeros(39), np.full(40, np.inf)])
def test_start_malformed(solver: Solver, start: Any) -> None:
    """A start that cannot belong to the model is the caller's mistake."""
    with pytest.raises(InputError, match="start: expected"):
        solver.solve(covering(), SAFE, start=start)


def test_unknown_option(solver: Solver) -> None:
    """An option that the solver does not have is an error that names it."""
    with pytest.raises(UnknownOptionError, match="no_such_option"):
        solver.solve(tiny(), Limits(options={"no_such_option": 1}))


@pytest.mark.parametrize("value", [-3.0, "wide"])
def test_refused_option_value(solver: Solver, value: float | str) -> None:
    """A value that the solver refuses is an error that names option and value."""
    with pytest.raises(UnknownOptionError, match=GAP[solver.name]):
        solver.solve(tiny(), Limits(options={GAP[solver.name]: value}))


def test_option_of_the_solver_is_set(solver: Solver) -> None:
    """The solver's own options reach it and win, here over a search without limits."""
    result = solver.solve(
        knapsack(60, 10), Limits(time_s=60.0, rel_gap=0.0, options={NODE_LIMIT[solver.name]: 1})
    )
    assert result.status is SolverStatus.OTHER_LIMIT
    assert result.objective is not None


def test_stop_before_the_start(solver: Solver) -> None:
    """A stop event set beforehand ends the solve at once."""
    stop = threading.Event()
    stop.set()
    assert solver.solve(hard(), SAFE, stop=stop).status is SolverStatus.INTERRUPTED


@FIRST_QUICKLY
def test_stop_from_another_thread(solver: Solver) -> None:
    """Any thread can stop a running solve, which keeps what it has found."""
    stop, found = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (found.wait(60.0), stop.set()))
    thread.start()

    def progress(news: BackendProgress) -> None:
        if news.bound is not None and news.incumbent is not None:
            found.set()

    result = solver.solve(hard(), SAFE, on_progress=progress, stop=stop)
    thread.join()
    assert result.status is SolverStatus.INTERRUPTED
    assert result.objective is not None
    assert result.bound is not None


@FIRST_QUICKLY
def test_stop_without_progress(solver: Solver) -> None:
    """The stop event works where nobody listens for progress."""
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    result = solver.solve(hopeless(), SAFE, stop=stop)
    timer.join()
    assert result.status is SolverStatus.INTERRUPTED
    assert result.x is None


@FIRST_QUICKLY
def test_progress_may_stop(solver: Solver) -> None:
    """Returning False stops the solve; returning anything else does not."""
    seen: list[BackendProgress] = []

    def until_three(news: BackendProgress) -> bool:
        seen.append(news)
        return len(seen) < 3

    result = solver.solve(hard(), SAFE, on_progress=until_three)
    assert result.status is SolverStatus.INTERRUPTED
    assert len(seen) == 3


def test_progress_may_raise(solver: Solver) -> None:
    """An exception in the callback stops the solve and comes out as itself, once."""
    calls: list[BackendProgress] = []

    def fail(news: BackendProgress) -> NoReturn:
        calls.append(news)
        raise RuntimeError("the display fell over")

    with pytest.raises(RuntimeError, match="the display fell over"):
        solver.solve(hard(), SAFE, on_progress=fail)
    assert len(calls) == 1
    assert solver.solve(tiny(), SAFE).objective == 1.0


@pytest.mark.parametrize("form", [covering(), knapsack(50, 8)], ids=["min", "max"])
def test_progress_is_honest(solver: Solver, form: StandardForm) -> None:
    """Solutions on the way are feasible and improve; bounds hold and never slacken."""
    seen: list[BackendProgress] = []
    result = solver.solve(form, SAFE, on_progress=seen.append)
    assert result.objective is not None
    brought = [news for news in seen if news.x is not None]
    assert brought
    for news in brought:
        assert news.x is not None
        assert form.violation(news.x) <= 1e-6
        assert form.value(news.x) == pytest.approx(news.incumbent, abs=1e-6)
    values = [form.sense * form.value(news.x) for news in brought if news.x is not None]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(form.sense * result.objective, abs=1e-6)
    bounds = [form.sense * news.bound for news in seen if news.bound is not None]
    assert bounds == sorted(bounds)
    assert all(bound <= form.sense * result.objective + 1e-6 for bound in bounds)


def test_solving_within_a_callback(solver: Solver) -> None:
    """A callback may solve another model with the same back end."""
    inner: list[float | None] = []

    def progress(_: BackendProgress) -> None:
        inner.append(solver.solve(tiny(), SAFE).objective)

    limits = Limits(time_s=60.0, rel_gap=0.0, threads=2)
    result = solver.solve(covering(), limits, on_progress=progress)
    assert result.objective == 503.0
    assert set(inner) == {1.0}


@FIRST_QUICKLY
def test_reuse_is_deterministic(solver: Solver) -> None:
    """Two solves in one process with one seed do the same work and give the same answer."""
    form = knapsack(50, 8)
    first, second = (solver.solve(form, Limits(time_s=60.0, rel_gap=0.0, seed=7)) for _ in "ab")
    assert first.status is second.status is SolverStatus.OPTIMAL
    assert first.nodes == second.nodes
    assert first.nodes is not None
    assert first.nodes > 1
    assert np.array_equal(np.asarray(first.x), np.asarray(second.x))


def test_bound_of_the_root_is_told(solver: Solver) -> None:
    """It is no better than the last one, and the relaxation proves no more; 503 is the optimum."""
    result = solver.solve(covering(), SAFE)
    relaxed = solver.solve(covering().relaxed(), SAFE)
    assert result.root_bound is not None
    assert relaxed.objective - 1e-6 <= result.root_bound <= result.bound
    assert relaxed.root_bound is None


@FIRST_QUICKLY
def test_threads_may_change(solver: Solver) -> None:
    """One thread, then two, then one again, all in one process."""
    for threads in (1, 2, 1):
        result = solver.solve(covering(), Limits(time_s=60.0, rel_gap=0.0, threads=threads))
        assert (result.status, result.objective) == (SolverStatus.OPTIMAL, 503.0)


@FIRST_QUICKLY
def test_solves_side_by_side(solver: Solver) -> None:
    """Solves in two threads of one process, with other thread counts, leave each other alone."""
    results: dict[int, Any] = {}

    def work(threads: int) -> None:
        for _ in range(3):
            limits = Limits(time_s=60.0, rel_gap=0.0, threads=threads)
            results[threads] = solver.solve(covering(), limits)

    workers = [threading.Thread(target=work, args=(threads,)) for threads in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [results[threads].objective for threads in (1, 2)] == [503.0, 503.0]


@FIRST_QUICKLY
def test_other_threads_run_meanwhile(solver: Solver) -> None:
    """A solve leaves the interpreter to other threads."""
    ticks, done = [0], threading.Event()

    def count() -> None:
        while not done.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    solver.solve(hopeless(), Limits(time_s=0.4))
    done.set()
    thread.join()
    assert ticks[0] > 10


def test_empty_model(solver: Solver) -> None:
    """A model without columns has its constant as optimum; with a broken row it is infeasible."""
    nothing = StandardForm.from_arrays(np.zeros((0, 0)), [], offset=7.0)
    result = solver.solve(nothing, SAFE)
    assert (result.status, result.objective, result.bound) == (SolverStatus.OPTIMAL, 7.0, 7.0)
    assert result.x is not None
    assert result.x.shape == (0,)
    broken = StandardForm.from_arrays(np.zeros((1, 0)), [], row_lower=1.0)
    assert solver.solve(broken, SAFE).infeasible


def test_rows_without_columns(solver: Solver) -> None:
    """Empty rows are dropped where they hold and make the model infeasible where they do not."""
    matrix = [[1.0, 1.0], [0.0, 0.0]]
    holds = StandardForm.from_arrays(matrix, [1.0, 2.0], upper=1.0, row_lower=[1.0, -1.0])
    assert solver.solve(holds, SAFE).objective == pytest.approx(1.0)
    broken = StandardForm.from_arrays(matrix, [1.0, 2.0], upper=1.0, row_lower=[1.0, 1.0])
    assert solver.solve(broken, SAFE).infeasible


def test_no_rows(solver: Solver) -> None:
    """Bounds alone make a model."""
    form = StandardForm.from_arrays(np.zeros((0, 2)), [1.0, -1.0], upper=3.0, integer=True)
    assert solver.solve(form, SAFE).objective == -3.0


def test_user_model(solver: Solver) -> None:
    """Blocks, ranges, equations, fixed and unused variables of a user's model all count."""
    model = pyo.ConcreteModel()
    model.x = pyo.Var(range(4), domain=pyo.Binary)
    model.fixed = pyo.Var(domain=pyo.NonNegativeReals)
    model.fixed.fix(2.0)
    model.unused = pyo.Var(bounds=(3, 9))
    model.range = pyo.Constraint(expr=pyo.inequality(1, sum(model.x[i] for i in range(4)), 2))
    model.own = pyo.Block()
    model.own.y = pyo.Var(domain=pyo.Integers, bounds=(-5, 5))
    model.own.link = pyo.Constraint(expr=model.own.y == model.x[0] + model.x[1] - model.fixed)
    model.own.floor = pyo.Constraint(expr=model.own.y + model.fixed >= 1)
    model.cost = pyo.Objective(
        expr=3 * model.x[0] + 4 * model.x[1] - 5 * model.x[2] + model.own.y + 10 * model.fixed
    )
    form = compile_model(model)
    result = solver.solve(form, SAFE)
    # x0 = x2 = 1, y = 1 - 2 = -1: 3 - 5 - 1 + 20 = 17
    assert (result.status, result.objective) == (SolverStatus.OPTIMAL, pytest.approx(17.0))
    assert result.x is not None
    load_values(form, result.x)
    assert [pyo.value(model.x[i]) for i in range(4)][:3] == [1, 0, 1]
    assert (pyo.value(model.own.y), pyo.value(model.fixed), pyo.value(model.unused)) == (-1, 2, 3)
    assert pyo.value(model.cost) == pytest.approx(17.0)


def test_training_step(solver: Solver) -> None:
    """Homes are equations between binaries; what lives on beside them is continuous."""
    for number in range(4):
        problem = state_problem(f"conformance/{number}", minimize="energy")
        best, model = optimum(problem), build(problem)
        result = solver.solve(compile_model(model), SAFE)
        if best is None:
            assert result.status is SolverStatus.INFEASIBLE
            continue
        assert result.status is SolverStatus.OPTIMAL
        assert result.objective is not None
        above = best.value - problem.objective.baseline
        assert result.objective * model.objective_unit == pytest.approx(above, abs=1e-6)


def test_general_bounds(solver: Solver) -> None:
    """Negative, absent and fractional bounds of integers and reals are respected."""
    form = StandardForm.from_arrays(
        [[1.0, 1.0, 0.0], [0.0, 1.0, -1.0]],
        [1.0, 1.0, 1.0],
        lower=[-2.5, -np.inf, -np.inf],
        upper=[np.inf, 7.25, np.inf],
        row_lower=[-6.5, -1.0],
        row_upper=[np.inf, 2.5],
        integer=[True, False, True],
    )
    # x >= -2, x + y >= -6.5, z >= y - 2.5: the sum is (x + y) + z, and z falls with y
    result = solver.solve(form, Limits(time_s=60.0, rel_gap=0.0, options={}))
    assert result.status is SolverStatus.UNBOUNDED
    bounded = StandardForm.from_arrays(
        [[1.0, 1.0, 0.0], [0.0, 1.0, -1.0]],
        [1.0, 1.0, 1.0],
        lower=[-2.5, -4.75, -np.inf],
        upper=[np.inf, 7.25, np.inf],
        row_lower=[-6.5, -1.0],
        row_upper=[np.inf, 2.5],
        integer=[True, False, True],
    )
    # x = -2 and y = -4.5 meet the first row; z = -7 is the least whole number >= y - 2.5
    # with y <= -4.5; y = -4.75 needs x >= -1 and gains nothing
    best = solver.solve(bounded, SAFE)
    assert best.objective == pytest.approx(-13.5)


def test_log_is_passed_on_and_nothing_is_printed(
    solver: Solver, capfd: pytest.CaptureFixture[str]
) -> None:
    """The log goes to whoever requested it, and never to the terminal."""
    pieces: list[str] = []
    solver.solve(covering(), Limits(time_s=60.0, log=pieces.append))
    assert solver.name in "".join(pieces).lower()
    solver.solve(covering(), SAFE)
    assert capfd.readouterr() == ("", "")


def test_unknown_status_is_an_error(solver: Solver) -> None:
    """A status outside its table is never guessed at."""
    table = importlib.import_module(f"poetmodel.backends.{solver.name}").STATUS
    with pytest.raises(BackendError, match=f"'{solver.name}': returned the unknown status 'new'"):
        solver.translate("new", table)


def test_log_may_raise(solver: Solver) -> None:
    """An exception in the log's receiver comes out as itself."""

    def fail(_: str) -> NoReturn:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        solver.solve(hard(), Limits(time_s=60.0, log=fail))


def test_missing_package(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package a back end says what to install, and no other one steps in."""
    monkeypatch.setitem(sys.modules, PACKAGE[solver.name], None)
    assert not solver.available()
    for call in _uses(solver):
        with pytest.raises(BackendUnavailableError, match="pip install"):
            call()


def _uses(solver: Solver) -> tuple[Callable[[], object], ...]:
    return (lambda: solver.solve(tiny(), SAFE), solver.versions)


INTERRUPTED = """
import sys, threading
from poetmodel.backends import Limits, backend, run_interruptibly
from poetmodel.backends.standard_form import StandardForm
import numpy as np
rng = np.random.default_rng(0)
weights = rng.integers(1, 100, (40, 400))
form = StandardForm.from_arrays(weights, rng.integers(1, 100, 400), upper=1.0,
                                row_upper=weights.sum(1) // 2, integer=True, sense=-1)
reported = []
def progress(news):
    if news.incumbent is not None and news.bound is not None and not reported:
        reported.append(True)
        threading.Timer(0.1, lambda: print("running", flush=True)).start()
stop = threading.Event()
solver = backend(sys.argv[1])
result = run_interruptibly(
    lambda: solver.solve(form, Limits(time_s=120.0, rel_gap=0.0), on_progress=progress, stop=stop),
    stop,
)
print(result.status, result.objective is not None, result.bound is not None, flush=True)
"""


@FIRST_QUICKLY
def test_ctrl_c_keeps_the_incumbent(solver: Solver) -> None:
    """A real SIGINT stops the solver, and the best solution so far is still returned."""
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, solver.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=100.0)
    assert (out, errors, child.returncode) == ("interrupted True True\n", "", 0)
