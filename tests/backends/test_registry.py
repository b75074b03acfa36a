"""The registered back ends, and tests of HiGHS only."""

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kit.instances import scarce_problem
from poetmodel.backends import (
    Limits,
    RawSolution,
    SolverStatus,
    backend,
    backend_class,
    backend_names,
)
from poetmodel.backends.call import SolverCall
from poetmodel.backends.compiler import compile_model
from poetmodel.backends.highs import Highs, _reports_violation, reset_scheduler
from poetmodel.backends.standard_form import StandardForm
from poetmodel.errors import BackendError, InputError
from poetmodel.model import build

ROOT = Path(__file__).parents[2]


def printed(script):
    """Return the output of a script that runs in a separate process."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("name", ["", "HiGHS", "cplex"])
def test_unknown_name_is_refused(name):
    """An unknown name is an input error that lists the known ones."""
    with pytest.raises(InputError, match=f"backend '{name}': expected one of highs, scip, gurobi"):
        backend(name)


def test_optional_back_ends_have_an_extra_of_their_name():
    """The remedy of each names it; that of the default one is its requirement."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in backend_names():
        kind = backend_class(name)
        required = project["dependencies"] if name == "highs" else extras[name]
        (stated,) = (text for text in required if text.startswith(f"{kind.package}>="))
        assert (stated if name == "highs" else f"poetmodel[{name}]") in kind.remedy


def test_no_solver_is_loaded_before_it_is_used():
    """Looking a back end up, or asking whether it is there, imports no solver."""
    code = (
        "import sys\n"
        "from poetmodel.backends import backend, backend_names\n"
        "[backend(name).is_available() for name in backend_names()]\n"
        "print([m for m in ('highspy', 'pyscipopt', 'gurobipy', 'pyomo') if m in sys.modules])\n"
    )
    assert printed(code) == "[]\n"


# -- what a solve loads, and what it leaves of Pyomo ---------------------------------------------
SOLVE = (
    "import sys\nimport poetmodel as pm\n"
    "graph = pm.zoo.mlp()\n"
    "costs = pm.Costs.estimate(graph, pm.Device.load('mkr1000'))\n"
    "result = pm.solve(pm.Problem(graph, costs, ram='70%'))\n"
    "assert result.status == 'optimal', result.status\n"
    "assert result.statistics['columns'] > 0, 'no model was stated'\n"
)


def test_default_solve_loads_little():
    """A model is stated and solved without Pyomo, scipy.stats and networkx."""
    heavy = "{'pyomo', 'scipy.stats', 'scipy.optimize', 'networkx', 'rich', 'torch'}"
    assert printed(SOLVE + f"print(sorted({heavy} & set(sys.modules)))") == "[]\n"


@pytest.mark.slow
def test_pyomo_has_scipy_afterwards():
    """Pyomo's own compiler, scipy.stats and every import hook work in the same process."""
    after = (
        "import pyomo.environ as pyo\n"
        "from pyomo.common import dependencies\n"
        "from pyomo.repn.plugins.standard_form import LinearStandardFormCompiler\n"
        "model = pm.build(result.problem)\n"
        "form = LinearStandardFormCompiler().write(model, mixed_form=True)\n"
        "assert form.A.nnz > 0\n"
        "assert dependencies.scipy_available\n"
        "assert dependencies.scipy.stats.norm.cdf(0) == 0.5\n"
        "assert 'scipy.stats' in sys.modules and 'scipy.spatial' in sys.modules\n"
        "hook = dependencies.DeferredImportCallbackFinder\n"
        "print(sum(isinstance(found, hook) for found in sys.meta_path))"
    )
    assert printed(SOLVE + after) == "1\n"


@pytest.mark.slow
def test_scipy_may_be_loaded_before():
    """A process that has loaded scipy, or all of Pyomo, solves as well."""
    for first in ("import scipy.sparse", "import pyomo.environ", "import scipy.stats"):
        assert printed(f"{first}\n{SOLVE}print('solved')") == "solved\n"


# -- HiGHS ---------------------------------------------------------------------------------------
SMALL = StandardForm.from_arrays([[3.0, 5.0]], [4.0, 6.0], row_lower=7.0, integer=True)
"""Its optimum is 10."""
PAIR = StandardForm.from_arrays([[1.0, 1.0]], [1.0, 2.0], row_lower=1.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_basis_changes_no_value(seed):
    """Of a linear model that has got further rows, which its last optimum breaks."""
    rng = np.random.default_rng(seed)
    weights, costs = rng.integers(1, 100, (12, 40)), rng.integers(1, 100, 40)
    least = weights.sum(1) // 3
    few, all_rows = (
        StandardForm.from_arrays(weights[:n], costs, upper=1.0, row_lower=least[:n])
        for n in (3, 12)
    )
    first = Highs().solve(few, Limits())
    assert len(first.basis.columns) == 40
    assert sum(row == first.basis.basic for row in first.basis.rows) < 3
    basis = replace(first.basis, rows=[*first.basis.rows, *[first.basis.basic] * 9])
    again, anew = Highs().solve(all_rows, Limits(), basis=basis), Highs().solve(all_rows, Limits())
    assert again.status is SolverStatus.OPTIMAL
    assert again.objective == pytest.approx(anew.objective)
    assert again.bound == pytest.approx(again.objective)


def test_only_a_linear_optimum_has_a_basis():
    """Only an optimal linear model has a basis; the basis of another model is refused.

    Coefficients below 1e-9, which HiGHS drops by default, count; one that it refuses is an
    error.
    """
    basis = Highs().solve(PAIR, Limits()).basis
    with pytest.raises(BackendError, match="'highs': refused the basis"):
        Highs().solve(PAIR, Limits(), basis=replace(basis, rows=[]))
    for integer, least in ((True, 0.5), (False, 2.0)):
        form = StandardForm.from_arrays([[1.0]], [1.0], upper=1.0, row_lower=least, integer=integer)
        assert Highs().solve(form, Limits()).basis is None
    form = StandardForm.from_arrays([[1e-10]], [1.0], row_lower=1e-3, upper=1e8)
    assert Highs().solve(form, Limits()).objective == pytest.approx(1e7, rel=1e-3)
    with pytest.raises(BackendError, match="refused the model"):
        Highs().solve(StandardForm.from_arrays([[1e16]], [1.0], row_lower=1.0), Limits())


def test_scheduler_is_renewed_but_not_from_a_callback():
    """Every solve gets a fresh scheduler, except one inside another's callback."""
    resets = []
    fake = SimpleNamespace(Highs=SimpleNamespace(resetGlobalScheduler=resets.append))
    reset_scheduler(fake)
    assert resets == [True]
    Highs().solve(SMALL, Limits(), on_progress=lambda _: reset_scheduler(fake))
    assert resets == [True]
    reset_scheduler(fake)
    assert resets == [True, True]


@pytest.mark.parametrize("seed", [16475, 16560, 16859, 17078, 17570])
def test_presolve_does_not_lose_the_optimum(seed):
    """Models that HiGHS 1.15 and 1.16 call infeasible with all rules of their presolve.

    With the rule that misleads them the error shows, and such models are solved again.
    """
    problem = scarce_problem(f"rooms {seed}", (9, 13))
    form = compile_model(build(problem))
    safe = Highs().solve(form, Limits(rel_gap=0.0, options={"presolve": "off"}))
    best = form.objective @ safe.x
    for options in ({}, {"presolve_rule_off": 0}):
        lines = []
        raw = Highs().solve(form, Limits(rel_gap=0.0, options=options, log=lines.append))
        assert raw.status == SolverStatus.OPTIMAL
        assert form.objective @ raw.x == pytest.approx(best)
        again = any("solving again without it" in line for line in lines)
        assert raw.solved_again == again == any(map(_reports_violation, lines))
        assert options or not again


@pytest.mark.parametrize("misled_by", ["presolve", "start"])
def test_a_second_run_begins_with_nothing_of_the_first(monkeypatch, misled_by):
    """Neither a bound, nor a solution, nor a stop that was requested because of them."""
    form = compile_model(build(scarce_problem("rooms 16475", (9, 13))))
    run = Highs._solve_once
    runs = []
    reported = []

    def misled(self, call):
        runs.append((call.options.get("presolve"), call.start is not None))
        if len(runs) > 1:
            return run(self, call)
        call.report_solution(-5.0, lambda: np.zeros(form.n_columns), -5.0)
        call.report_progress(1e6)
        return RawSolution(status=SolverStatus.INTERRUPTED), misled_by

    def enough(progress):
        reported.append((progress.incumbent, progress.bound))
        return progress.incumbent != -5.0

    monkeypatch.setattr(Highs, "_solve_once", misled)
    best = run(Highs(), SolverCall(form, Limits(rel_gap=0.0)))[0].x
    raw = Highs().solve(form, Limits(rel_gap=0.0), start=best, on_progress=enough)
    again = ("off", True) if misled_by == "presolve" else (None, False)
    assert runs[:2] == [(None, True), again]
    assert (raw.status, raw.solved_again) == (SolverStatus.OPTIMAL, True)
    after = reported[reported.index((-5.0, -5.0)) + 1 :]
    assert all(incumbent != -5.0 for incumbent, _ in after)
    assert all(bound is None or bound <= raw.objective + 1e-6 for _, bound in after)


@pytest.fixture
def scripted(monkeypatch):
    """Replace the results of runs by those of a test, if any; record presolve and start of each."""
    run, runs = Highs._solve_once, []

    def script(answer):
        def run_once(self, call):
            runs.append((call.options.get("presolve"), call.start is not None))
            return answer(call) or run(self, call)

        monkeypatch.setattr(Highs, "_solve_once", run_once)
        return runs

    return script


def test_what_misleads_the_second_run_is_left_out_of_a_third(scripted):
    """The start first, then presolve, each once; an optimum without a solution is none."""
    misleading = iter(["start", "presolve", "presolve"])
    runs = scripted(lambda _: (RawSolution(status=SolverStatus.TIME_LIMIT), next(misleading)))
    raw = Highs().solve(SMALL, Limits(), start=np.array([0.0, 2.0]))
    assert runs == [(None, True), (None, False), ("off", False)]
    assert raw.solved_again
    scripted(lambda _: (WITHOUT_SOLUTION, None))
    raw = Highs().solve(SMALL, Limits(rel_gap=0.0))
    assert raw.solved_again
    assert (raw.status, raw.x, raw.bound) == (SolverStatus.OTHER_LIMIT, None, None)


WITHOUT_SOLUTION = RawSolution(status=SolverStatus.OPTIMAL, bound=9.0)


@pytest.mark.parametrize(
    "wrong",
    [
        WITHOUT_SOLUTION,
        RawSolution(status=SolverStatus.INFEASIBLE),
        RawSolution(status=SolverStatus.OPTIMAL, x=np.array([3.0, 0.0]), bound=12.0),
    ],
)
def test_proofs_of_small_models_are_confirmed(scripted, wrong):
    """A better solution of a solve without presolve replaces a wrong one."""
    runs = scripted(lambda call: None if "presolve" in call.options else (wrong, None))
    raw = Highs().solve(SMALL, Limits(rel_gap=0.0))
    assert wrong is WITHOUT_SOLUTION or runs == [(None, False), ("off", False), ("off", False)]
    assert (raw.status, raw.objective) == (SolverStatus.OPTIMAL, 10.0)
    assert raw.solved_again


@pytest.mark.parametrize("is_late", [True, False])
def test_what_was_not_confirmed_is_not_called_optimal(scripted, is_late):
    """An optimum whose confirmation without presolve fails or ends early is not called optimal."""

    def unfinished(call):
        if "presolve" not in call.options:
            return None
        if is_late:
            return RawSolution(status=SolverStatus.TIME_LIMIT, bound=9.0), None
        raise BackendError("stopped with an error")

    scripted(unfinished)
    lines = []
    raw = Highs().solve(SMALL, Limits(rel_gap=0.0, log=lines.append))
    assert (raw.status, raw.objective) == (SolverStatus.OTHER_LIMIT, 10.0)
    assert raw.bound == (9.0 if is_late else None)
    assert any("not confirmed" in line for line in lines)


def test_rounding_errors_are_no_misfit():
    """Violations by rounding errors, which HiGHS also reports, do not count; options are obeyed."""
    text = "WARNING: Solution with objective 6 has untransformed violations: "
    assert _reports_violation(f"{text}bound = 0; integrality = 0; row = 2 (row 7)")
    assert _reports_violation(f"{text}bound = 1.073 (col 1533); integrality = 1.386e-14; row = 0")
    assert not _reports_violation(f"{text}bound = 0; integrality = 0; row = 2.1e-06 (row 7)")
    newer = "variable bound = 0; constraint bound = {} (row 7); integrality = 1.2e-14"
    assert _reports_violation(text + newer.format("1"))
    assert not _reports_violation(text + newer.format("2.1e-06"))
    assert not _reports_violation("Solving report")
    form = compile_model(build(scarce_problem("rooms 16475", (9, 13))))
    options = {"presolve": "on", "presolve_rule_off": 0}
    assert Highs().solve(form, Limits(rel_gap=0.0, options=options)).is_infeasible


# -- what presolve gets wrong ------------------------------------------------------------------
@pytest.mark.parametrize("off", [0.0, 2e-8, 5e-8, 9e-8, 2e-7])
def test_a_bound_that_a_row_nearly_implies_stays_a_bound(off):
    """``min p`` with ``p >= 0.25 + off`` and ``p >= 0.25 + k / 6``; 0.41667 is not its optimum.

    Presolve makes an equation of the second row, and rounds ``k >= 6 off`` up to 1.
    """
    form = StandardForm.from_arrays(
        [[0.0, 1.0, 1.0], [-1.0, 1 / 6, 0.0]],
        [1.0, 0.0, 0.0],
        lower=[0.25 + off, 0.0, 0.0],
        upper=1.0,
        integer=[False, True, True],
        row_lower=[1.0, -np.inf],
        row_upper=[np.inf, -0.25],
    )
    raw = Highs().solve(form, Limits(rel_gap=0.0))
    assert raw.status is SolverStatus.OPTIMAL
    assert raw.objective == pytest.approx(0.25 + off, abs=1e-9)
    assert raw.bound <= 0.25 + off + 1e-9


TINY_COST = (
    [
        [-1.0, 1.0, -1.0, 0.0, -1.0, 0.0, 0.0],
        [0.0, -1.0, 0.0, -1.0, 0.0, -1.0, 0.0],
        [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -1.0],
        [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0],
        [1.0, 0.0, 1.0, 0.0, 1.0, 7 / 11, 0.0],
        [0.0, 1.0, 0.0, 7 / 23, 0.0, 7 / 23, 0.0],
    ],
    [0.0, -1.0, 0.0, 1.0, 1.0, 57 / 22, 57 / 46],
)
"""Rows and their right-hand sides of seven binaries, the first of which costs next to nothing."""


@pytest.mark.parametrize("cost", [0.0, 2e-11, 1e-9, 9e-8, 1.1e-7, 1e-3])
@pytest.mark.parametrize("sense", [1, -1])
def test_costs_below_the_tolerance_do_not_mislead(cost, sense):
    """The optimum is -383 less the small cost, and the bound is not above it; -234 is none."""
    rows, most = TINY_COST
    costs = np.array([-cost, 0.0, -234.0, -149.0, 0.0, 0.0, 0.0])
    form = StandardForm.from_arrays(
        rows, sense * costs, upper=1.0, integer=True, row_upper=most, sense=sense
    )
    raw = Highs().solve(form, Limits(rel_gap=0.0))
    assert raw.status is SolverStatus.OPTIMAL
    assert raw.objective == pytest.approx(-383.0 * sense - cost * sense, abs=2e-7)
    assert sense * raw.bound <= -383.0 - cost + 1e-9
    for cutoff, status in ((-382.0, SolverStatus.OPTIMAL), (-384.0, SolverStatus.CUTOFF)):
        limits = Limits(rel_gap=0.0, objective_cutoff=sense * cutoff)
        assert Highs().solve(form, limits).status is status
