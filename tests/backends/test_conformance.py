"""One suite for all back ends.

Instances are random with fixed seeds. *Hard* ones cannot be finished within minutes by any
available solver, so that only the tested limit stops the solver. A time limit of a minute prevents
endless tests; a test that reaches it fails, because its termination is wrong.
"""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse import block_array, eye_array

from poetmodel.backends import Limits, SolverStatus, backend, backend_class
from poetmodel.backends.registry import backend_names
from poetmodel.backends.standard_form import MAXIMIZE, MINIMIZE, StandardForm
from poetmodel.errors import BackendError, BackendUnavailableError, InputError, UnknownOptionError

OPTIONAL = ("scip", "gurobi")
"""Built-in back ends whose tests have a marker of their name."""
MATRIX = [
    pytest.param(name, marks=[getattr(pytest.mark, name)] if name in OPTIONAL else [])
    for name in backend_names()
]
FIRST_QUICKLY = pytest.mark.parametrize(
    "solver",
    [
        pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.slow])
        if name in OPTIONAL
        else name
        for name in backend_names()
    ],
    indirect=True,
)
"""For what takes a while: the built-in optional back ends with the slow tests."""

SAFE = Limits(time_s=60.0, rel_gap=0.0)
"""To the end, and never for ever."""


@pytest.fixture(params=MATRIX)
def solver(request):
    """Return one back end after the other; the default one is never skipped."""
    name = request.param
    if name != "highs":
        pytest.importorskip(backend_class(name).package)
    return backend(name)


def needs(solver, *capabilities):
    """Skip a test that needs a capability that a back end does not declare."""
    for name in capabilities:
        if not getattr(solver.capabilities, name):
            pytest.skip(f"{solver.display_name} declares no {name}")


def knapsack(items, rows, **changes):
    """Return a maximisation for which the empty selection is feasible."""
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 100, (rows, items))
    fields = {"upper": 1.0, "row_upper": weights.sum(1) // 2, "integer": True, "sense": MAXIMIZE}
    return StandardForm.from_arrays(weights, rng.integers(1, 100, items), **fields | changes)


def covering(items=40, rows=5, **changes):
    """Return a minimisation in which taking everything is feasible; its optimum is 503.

    As a maximisation it has the same with costs below 0.
    """
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 100, (rows, items))
    costs = rng.integers(1, 100, items) * changes.get("sense", MINIMIZE)
    fields = {"upper": 1.0, "row_lower": weights.sum(1) // 2, "integer": True}
    return StandardForm.from_arrays(weights, costs, **fields | changes)


def hard():
    """Return a knapsack whose gap no solver reduces below a percent within minutes."""
    return knapsack(400, 40)


def hopeless():
    """Return a market split: equations that hardly any choice of binaries meets."""
    rng = np.random.default_rng(0)
    shares = rng.integers(0, 100, (5, 40))
    half = shares.sum(1) // 2
    return StandardForm.from_arrays(
        shares, np.ones(40), upper=1.0, row_lower=half, row_upper=half, integer=True
    )


def tiny(**changes):
    """Return ``min x + 2 y`` over binaries with ``x + y >= 1``; the optimum is 1."""
    fields = {"upper": 1.0, "row_lower": 1.0, "integer": True}
    return StandardForm.from_arrays([[1.0, 1.0]], [1.0, 2.0], **fields | changes)


def test_matrix_holds_every_registered_back_end():
    """A back end cannot be registered without going through this suite."""
    assert {param.values[0] for param in MATRIX} == set(backend_names())
    assert backend_names()[0] == "highs"
    for name in backend_names():
        kind = backend_class(name)
        assert kind.name == name
        assert kind.display_name
        assert kind.remedy.startswith("pip install")


def test_name_and_versions(solver, monkeypatch):
    """A back end states its name, whether it is installed, and the versions of solver and wrapper.

    Without its package, the error states how to install it, and no other back end replaces it.
    """
    versions = solver.versions()
    assert solver.is_available()
    assert {solver.name, solver.package} == set(versions)
    assert all(version[0].isdigit() and "." in version for version in versions.values())
    monkeypatch.setitem(sys.modules, solver.package, None)
    assert not solver.is_available()
    for use in (lambda: solver.solve(tiny(), SAFE), solver.versions):
        with pytest.raises(BackendUnavailableError, match="pip install"):
            use()


@pytest.mark.parametrize(
    ("sense", "offset", "best"),
    [(MINIMIZE, 0.0, 1.0), (MINIMIZE, -7.5, -6.5), (MAXIMIZE, 2.0, 5.0)],
)
def test_optimal(solver, sense, offset, best):
    """The optimum, its objective with the constant, and an equal bound are returned."""
    form = tiny(sense=sense, offset=offset)
    result = solver.solve(form, SAFE)
    assert (result.status, result.is_infeasible) == (SolverStatus.OPTIMAL, False)
    assert result.objective == pytest.approx(best, abs=1e-9)
    assert result.bound == pytest.approx(best, abs=1e-6)
    assert form.objective_value(result.x) == result.objective
    assert form.max_violation(result.x) == 0.0
    assert result.start_accepted is None
    assert result.build_s > 0
    assert result.solve_s > 0


def test_optimal_after_search(solver):
    """A model that requires a search ends at its known optimum, with whole numbers.

    The bound of the root is at most the final one, and the relaxation proves no more. A
    stopping value that no solution reaches has no effect.
    """
    result = solver.solve(covering(), SAFE)
    assert (result.status, result.objective) == (SolverStatus.OPTIMAL, 503.0)
    assert result.bound == pytest.approx(503.0, abs=1e-6)
    assert set(result.x.tolist()) == {0.0, 1.0}
    assert isinstance(result.nodes, int)
    relaxed = solver.solve(covering().linear_relaxation(), SAFE)
    if solver.capabilities.callbacks:
        assert relaxed.objective - 1e-6 <= result.root_bound <= result.bound
    assert relaxed.root_bound is None
    result = solver.solve(covering(), Limits(time_s=60.0, rel_gap=0.0, objective_stop=502.5))
    assert (result.status, result.objective) == (SolverStatus.OPTIMAL, 503.0)


def test_continuous(solver):
    """A model without integers has optimum and bound, counts no nodes, and accepts a start."""
    result = solver.solve(tiny(integer=False, row_lower=1.5), SAFE)
    assert result.status is SolverStatus.OPTIMAL
    assert result.x == pytest.approx([1.0, 0.5])
    assert result.bound == pytest.approx(2.0)
    assert result.nodes is None
    form = covering(integer=False)
    result = solver.solve(form, SAFE, start=np.ones(40))
    assert (result.status, result.start_accepted) == (SolverStatus.OPTIMAL, True)
    assert result.objective < form.objective_value(np.ones(40))


def test_large_linear_models_of_highs():
    """Other methods solve models of 20,000 columns: with a basis, from which a solve can start."""
    costs = np.random.default_rng(0).uniform(1.0, 2.0, (10_000, 2))
    rows = eye_array(10_000, format="csr")
    form = StandardForm.from_arrays(
        block_array([[rows, rows]]), np.concatenate([costs[:, 0], costs[:, 1]]), row_lower=1.0
    )
    optimum = costs.min(axis=1).sum()
    limits = replace(SAFE, options={"presolve": "off"})
    result = backend("highs").solve(form, limits)
    assert (result.objective, result.bound) == pytest.approx((optimum, optimum))
    again = backend("highs").solve(form, limits, basis=result.basis)
    assert again.bound == pytest.approx(optimum)
    crossed = replace(form, upper=np.full(20_000, 0.25))
    assert backend("highs").solve(crossed, limits).is_infeasible


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
def test_infeasible(solver, form):
    """Infeasibility is proved, whether rows, integrality or crossed bounds cause it."""
    result = solver.solve(form, SAFE)
    assert (result.status, result.is_infeasible) == (SolverStatus.INFEASIBLE, True)
    assert (result.x, result.objective, result.bound) == (None,) * 3


def test_infeasible_only_as_integers(solver):
    """Equations are infeasible for integers and feasible for reals, or unbounded for those."""
    form = StandardForm.from_arrays(
        [[4.0, 6.0]], [1.0, 1.0], upper=9.0, row_lower=9.0, row_upper=9.0, integer=True
    )
    assert solver.solve(form, SAFE).is_infeasible
    relaxed = solver.solve(form.linear_relaxation(), SAFE)
    assert not relaxed.is_infeasible
    assert relaxed.objective == pytest.approx(1.5)
    form = StandardForm.from_arrays(
        [[1.0, -2.0, 0.0], [0.0, 0.0, 2.0]],
        [-1.0, 1.0, 0.0],
        upper=[np.inf, np.inf, 5.0],
        row_lower=[-np.inf, 3.0],
        row_upper=[1.0, 3.0],
        integer=True,
    )
    result = solver.solve(form, SAFE)
    assert (result.status, result.is_infeasible) == (SolverStatus.INFEASIBLE, True)


@pytest.mark.parametrize("integer", [[True, True], [True, False], [False, False]])
def test_unbounded(solver, integer):
    """An unbounded model has no best solution, and the reason states this."""
    form = StandardForm.from_arrays([[1.0, -2.0]], [-1.0, 1.0], row_upper=1.0, integer=integer)
    result = solver.solve(form, SAFE)
    assert result.status is SolverStatus.UNBOUNDED
    assert (result.is_infeasible, result.x, result.bound) == (False, None, None)


@FIRST_QUICKLY
def test_time_limit_with_incumbent(solver):
    """At the time limit, the best solution and a bound beyond it are returned."""
    result = solver.solve(hard(), Limits(time_s=0.5, rel_gap=0.0), start=np.zeros(400))
    assert result.status is SolverStatus.TIME_LIMIT
    assert not result.is_infeasible
    assert result.objective >= 0.0
    assert result.bound is None or result.bound > result.objective


def test_limits_before_anything_is_found(solver):
    """Without a result, values are None; a feasible start is never lost; a stop has effect."""
    result = solver.solve(hopeless(), Limits(time_s=0.2))
    assert result.status is SolverStatus.TIME_LIMIT
    assert (result.is_infeasible, result.x, result.objective) == (False, None, None)
    result = solver.solve(hard(), Limits(time_s=1e-9), start=np.zeros(400))
    assert result.start_accepted is True
    assert (result.status, result.objective) == (SolverStatus.TIME_LIMIT, 0.0)
    stop = threading.Event()
    stop.set()
    assert solver.solve(hard(), SAFE, stop=stop).status is SolverStatus.INTERRUPTED


@pytest.mark.parametrize("form", [hard(), hopeless(), covering(integer=False)])
def test_time_limit_in_no_time(solver, form):
    """A limit that building uses up is a time limit, not an error."""
    result = solver.solve(form, Limits(time_s=1e-9))
    assert result.status is SolverStatus.TIME_LIMIT
    assert result.x is None


@pytest.mark.parametrize("gap", [{"rel_gap": 0.1}, {"rel_gap": 0.0, "abs_gap": 700.0}])
def test_gap_stop(solver, gap):
    """A requested gap is a gap proved, either alone, and no more work than that is done."""
    needs(solver, *(["absolute_gap"] if "abs_gap" in gap else []))
    result = solver.solve(hard(), Limits(time_s=60.0, **gap))
    assert result.status is SolverStatus.OPTIMAL
    most = gap.get("abs_gap") or 0.1 * result.objective
    assert 0 < result.bound - result.objective <= most * (1 + 1e-9)


@pytest.mark.parametrize(
    ("form", "good"), [(covering(400, 40), 5000.0), (hard(), 6000.0)], ids=["min", "max"]
)
def test_objective_stop(solver, form, good):
    """The first solution that is good enough ends the solve."""
    needs(solver, "cutoffs")
    result = solver.solve(form, Limits(time_s=60.0, rel_gap=0.0, objective_stop=good))
    assert result.status is SolverStatus.OBJECTIVE_STOP
    assert form.sense * (result.objective - good) <= 0


@pytest.mark.parametrize("sense", [MINIMIZE, MAXIMIZE])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_objective_cutoff(solver, sense, offset):
    """A cutoff beyond the optimum has no effect; one below it is proven, with its bound."""
    form, seen = covering(sense=sense, offset=offset), []
    best = sense * 503.0 + offset
    found = solver.solve(form, Limits(time_s=60.0, rel_gap=0.0, objective_cutoff=best + 5 * sense))
    assert (found.status, found.objective) == (SolverStatus.OPTIMAL, best)
    cutoff = best - 5 * sense
    limits = Limits(time_s=60.0, rel_gap=0.0, objective_cutoff=cutoff)
    none = solver.solve(form, limits, on_progress=seen.append)
    assert (none.status, none.is_infeasible) == (SolverStatus.CUTOFF, False)
    assert (none.x, none.bound) == (None, cutoff)
    assert all(sense * (news.bound - cutoff) <= 0 for news in seen if news.bound is not None)


def test_start_accepted(solver):
    """A feasible start is the first solution reported and the worst one returned."""
    needs(solver, "starts")
    form, seen = hard(), []
    good = solver.solve(form, Limits(time_s=60.0, rel_gap=0.1)).x
    result = solver.solve(
        form, Limits(time_s=60.0, rel_gap=0.1), start=good, on_progress=seen.append
    )
    assert result.start_accepted is True
    assert seen[0].incumbent == form.objective_value(good)
    assert result.objective >= form.objective_value(good)


@pytest.mark.parametrize(
    ("start", "accepted"), [((0.0, 0.0), False), ((1.0, np.nan), None), ((0.0, np.nan), None)]
)
def test_start_does_no_harm(solver, start, accepted):
    """An infeasible start is reported; an incomplete one may be extended or not."""
    result = solver.solve(covering(), SAFE, start=np.repeat(start, 20))
    assert result.start_accepted is accepted
    assert (result.status, result.objective) == (SolverStatus.OPTIMAL, 503.0)


@pytest.mark.parametrize("start", [np.zeros(39), np.full(40, np.inf)])
def test_start_malformed(solver, start):
    """A start that cannot belong to the model is the caller's mistake."""
    with pytest.raises(InputError, match="start: expected"):
        solver.solve(covering(), SAFE, start=start)


def test_unknown_option(solver):
    """The solver's own options have precedence; unknown ones are named."""
    with pytest.raises(UnknownOptionError, match="no_such_option"):
        solver.solve(tiny(), Limits(options={"no_such_option": 1}))
    result = solver.solve(
        knapsack(60, 10), Limits(time_s=60.0, rel_gap=0.0, options={solver.node_limit_option: 1})
    )
    assert result.status is SolverStatus.OTHER_LIMIT
    assert result.objective is not None


@pytest.mark.parametrize("value", [-3.0, "wide"])
def test_refused_option_value(solver, value):
    """A value that the solver refuses is an error that names option and value."""
    with pytest.raises(UnknownOptionError, match=solver.gap_option):
        solver.solve(tiny(), Limits(options={solver.gap_option: value}))


def test_options_of_users_are_checked(solver):
    """Options that parameters of `solve` set, and unknown options, are refused by name."""
    solver.check_options({})
    solver.check_options({solver.node_limit_option: 100})
    for name, parameter in solver.managed_options.items():
        with pytest.raises(InputError, match=f"{name}.*{parameter}"):
            solver.check_options({name: 1})
    assert {"time_limit", "gap"} <= set(solver.managed_options.values())
    assert solver.gap_option in solver.managed_options
    for options in ({"no_such_option": 1}, {solver.node_limit_option: "many"}):
        with pytest.raises(UnknownOptionError, match=next(iter(options))):
            solver.check_options(options)
    for options in ({1: 1}, {"name": None}, {"name": float("nan")}):
        with pytest.raises(InputError, match="solver_options: expected"):
            solver.check_options(options)


@FIRST_QUICKLY
def test_stop_from_another_thread(solver):
    """Any thread can stop a running solve, which retains its solution."""
    needs(solver, "callbacks")
    stop, found = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (found.wait(60.0), stop.set()))
    thread.start()

    def progress(news):
        if news.bound is not None and news.incumbent is not None:
            found.set()

    result = solver.solve(hard(), SAFE, on_progress=progress, stop=stop)
    thread.join()
    assert result.status is SolverStatus.INTERRUPTED
    assert result.objective is not None
    assert result.bound is not None


@FIRST_QUICKLY
def test_stop_without_progress(solver):
    """The event stops a solve without a callback; only a callback that returns False stops it."""
    needs(solver, "callbacks")
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    result = solver.solve(hopeless(), SAFE, stop=stop)
    assert (result.status, result.x) == (SolverStatus.INTERRUPTED, None)
    seen = []

    def until_three(news):
        seen.append(news)
        return len(seen) < 3

    result = solver.solve(hard(), SAFE, on_progress=until_three)
    assert result.status is SolverStatus.INTERRUPTED
    assert len(seen) == 3


def test_progress_and_log_may_raise(solver):
    """An exception of a callback stops the solve and is raised once, unchanged."""
    needs(solver, "callbacks", "log")
    calls = []

    def fail(news):
        calls.append(news)
        raise RuntimeError("the display fell over")

    for options in ({"on_progress": fail}, {"limits": Limits(time_s=60.0, log=fail)}):
        calls.clear()
        with pytest.raises(RuntimeError, match="the display fell over"):
            solver.solve(hard(), **{"limits": SAFE, **options})
        assert len(calls) == 1 or "limits" in options
    assert solver.solve(tiny(), SAFE).objective == 1.0


@pytest.mark.parametrize("form", [covering(), knapsack(50, 8)], ids=["min", "max"])
def test_progress_is_honest(solver, form):
    """Solutions on the way are feasible and improve; bounds hold and never slacken."""
    needs(solver, "callbacks")
    seen = []
    result = solver.solve(form, SAFE, on_progress=seen.append)
    brought = [news for news in seen if news.x is not None]
    assert brought
    for news in brought:
        assert form.max_violation(news.x) <= 1e-6
        assert form.objective_value(news.x) == pytest.approx(news.incumbent, abs=1e-6)
    values = [form.sense * form.objective_value(news.x) for news in brought if news.x is not None]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(form.sense * result.objective, abs=1e-6)
    bounds = [form.sense * news.bound for news in seen if news.bound is not None]
    assert bounds == sorted(bounds)
    assert all(bound <= form.sense * result.objective + 1e-6 for bound in bounds)


def test_solving_within_a_callback(solver):
    """A callback may solve another model with the same back end."""
    needs(solver, "callbacks")
    inner = []

    def progress(_):
        inner.append(solver.solve(tiny(), SAFE).objective)

    limits = Limits(time_s=60.0, rel_gap=0.0, threads=2)
    result = solver.solve(covering(), limits, on_progress=progress)
    assert result.objective == 503.0
    assert set(inner) == {1.0}


@FIRST_QUICKLY
def test_reuse_is_deterministic(solver):
    """Two solves in one process with one seed have the same work and result."""
    form = knapsack(50, 8)
    first, second = (solver.solve(form, Limits(time_s=60.0, rel_gap=0.0, seed=7)) for _ in "ab")
    assert first.status is second.status is SolverStatus.OPTIMAL
    assert first.nodes == second.nodes
    assert first.nodes > 1
    assert np.array_equal(np.asarray(first.x), np.asarray(second.x))


@FIRST_QUICKLY
def test_threads_may_change(solver):
    """One thread, then two, then one again, in one process; side by side with other counts."""
    for threads in (1, 2, 1):
        result = solver.solve(covering(), Limits(time_s=60.0, rel_gap=0.0, threads=threads))
        assert (result.status, result.objective) == (SolverStatus.OPTIMAL, 503.0)

    def work(threads):
        limits = Limits(time_s=60.0, rel_gap=0.0, threads=threads)
        return [solver.solve(covering(), limits).objective for _ in range(3)]

    with ThreadPoolExecutor(2) as workers:
        assert list(workers.map(work, (1, 2))) == [[503.0] * 3] * 2


@FIRST_QUICKLY
def test_other_threads_run_meanwhile(solver):
    """A solve leaves the interpreter to other threads."""
    ticks, done = [], threading.Event()

    def count():
        while not done.wait(0.001):
            ticks.append(None)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(count)
        solver.solve(hopeless(), Limits(time_s=0.4))
        done.set()
    assert len(ticks) > 10


def test_empty_model(solver):
    """Without columns there is the constant; empty rows hold or make the model infeasible.

    Bounds alone make a model, too.
    """
    nothing = StandardForm.from_arrays(np.zeros((0, 0)), [], offset=7.0)
    result = solver.solve(nothing, SAFE)
    assert (result.status, result.objective, result.bound) == (SolverStatus.OPTIMAL, 7.0, 7.0)
    assert result.x.shape == (0,)
    broken = StandardForm.from_arrays(np.zeros((1, 0)), [], row_lower=1.0)
    assert solver.solve(broken, SAFE).is_infeasible
    for least, infeasible in ((-1.0, False), (1.0, True)):
        form = StandardForm.from_arrays(
            [[1.0, 1.0], [0.0, 0.0]], [1.0, 2.0], upper=1.0, row_lower=[1.0, least]
        )
        result = solver.solve(form, SAFE)
        assert result.is_infeasible == infeasible
        assert infeasible or result.objective == pytest.approx(1.0)
    form = StandardForm.from_arrays(np.zeros((0, 2)), [1.0, -1.0], upper=3.0, integer=True)
    assert solver.solve(form, SAFE).objective == -3.0


@pytest.mark.parametrize(("least", "best"), [(-np.inf, None), (-4.75, -13.5)])
def test_general_bounds(solver, least, best):
    """Negative, missing and fractional bounds of integers and reals are respected.

    As x >= -2, x + y >= -6.5, z >= y - 2.5, the sum is (x + y) + z, and z falls with y. With y
    bounded, x = -2 and y = -4.5 meet the first row; z = -7 is the least whole number >= y - 2.5
    with y <= -4.5; y = -4.75 needs x >= -1 and gains nothing.
    """
    form = StandardForm.from_arrays(
        [[1.0, 1.0, 0.0], [0.0, 1.0, -1.0]],
        [1.0, 1.0, 1.0],
        lower=[-2.5, least, -np.inf],
        upper=[np.inf, 7.25, np.inf],
        row_lower=[-6.5, -1.0],
        row_upper=[np.inf, 2.5],
        integer=[True, False, True],
    )
    result = solver.solve(form, Limits(time_s=60.0, rel_gap=0.0, options={}))
    if best is None:
        assert result.status is SolverStatus.UNBOUNDED
    else:
        assert result.objective == pytest.approx(best)


def test_log_is_passed_on_and_nothing_is_printed(solver, capfd):
    """The log is passed to the caller that requests it, and never printed."""
    pieces = []
    solver.solve(covering(), Limits(time_s=60.0, log=pieces.append))
    assert solver.name in "".join(pieces).lower() or not solver.capabilities.log
    solver.solve(covering(), SAFE)
    assert capfd.readouterr() == ("", "")


def test_every_status_has_a_meaning(solver):
    """A new release cannot add a status unseen; one outside its table is never guessed at."""
    table, module = solver.statuses, solver.import_package()
    known = {
        "highs": lambda: (module.HighsModelStatus.__members__, "kOptimal"),
        "scip": lambda: (map(str.lower, filter(str.isupper, dir(module.SCIP_STATUS))), "gaplimit"),
        "gurobi": lambda: (filter(str.isupper, dir(module.GRB.Status)), "OPTIMAL"),
    }.get(solver.name)
    assert SolverStatus.OPTIMAL in table.values()
    if known is not None:
        names, optimal = known()
        assert set(table) == set(names)
        assert table[optimal] is SolverStatus.OPTIMAL
    with pytest.raises(BackendError, match=f"'{solver.name}': returned the unknown status 'new'"):
        solver.translate_status("new", table)


@pytest.mark.scip
def test_nameless_exceptions_of_scip_are_failures():
    """PySCIPOpt's exceptions become errors of the back end."""
    pytest.importorskip("pyscipopt")
    from poetmodel.backends.scip import _optimize

    def fail():
        msg = "SCIP: error in LP solver!"
        raise Exception(msg)  # noqa: TRY002 - what PySCIPOpt does

    with pytest.raises(BackendError, match=r"'scip': failed .SCIP: error in LP solver!"):
        _optimize(SimpleNamespace(optimizeNogil=fail))


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
def test_ctrl_c_keeps_the_incumbent(solver):
    """A real SIGINT stops the solver, and the best solution so far is still returned."""
    needs(solver, "callbacks")
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, solver.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=100.0)
    assert (out, errors, child.returncode) == ("interrupted True True\n", "", 0)
