"""Gurobi: an optional back end, from ``poetmodel[gurobi]``.

Notes
-----
The licence in the package allows 2,000 variables and 2,000 constraints. Gurobi checks the size of a
model only when the solve starts. A range row counts as two constraints.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.call import SolverCall, finite_or_none
from poetmodel.backends.protocol import Capabilities, OptionValue, RawSolution, SolverStatus
from poetmodel.backends.solver import Solver
from poetmodel.errors import BackendError, LicenceError, UnknownOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from poetmodel.backends.standard_form import StandardForm

STATUS: Final[Mapping[str, SolverStatus]] = {
    "LOADED": SolverStatus.FAILED,
    "OPTIMAL": SolverStatus.OPTIMAL,
    "INFEASIBLE": SolverStatus.INFEASIBLE,
    "INF_OR_UNBD": SolverStatus.INFEASIBLE_OR_UNBOUNDED,
    "UNBOUNDED": SolverStatus.INFEASIBLE_OR_UNBOUNDED,  # does not imply that a solution exists
    "CUTOFF": SolverStatus.CUTOFF,
    "ITERATION_LIMIT": SolverStatus.OTHER_LIMIT,
    "NODE_LIMIT": SolverStatus.OTHER_LIMIT,
    "TIME_LIMIT": SolverStatus.TIME_LIMIT,
    "SOLUTION_LIMIT": SolverStatus.OTHER_LIMIT,
    "INTERRUPTED": SolverStatus.INTERRUPTED,
    "NUMERIC": SolverStatus.FAILED,
    "SUBOPTIMAL": SolverStatus.OTHER_LIMIT,
    "INPROGRESS": SolverStatus.FAILED,
    "USER_OBJ_LIMIT": SolverStatus.OBJECTIVE_STOP,
    "WORK_LIMIT": SolverStatus.OTHER_LIMIT,
    "MEM_LIMIT": SolverStatus.OTHER_LIMIT,
    "LOCALLY_OPTIMAL": SolverStatus.FAILED,  # only for nonlinear models
    "LOCALLY_INFEASIBLE": SolverStatus.FAILED,
}
"""Meaning of each member of ``GRB.Status``."""

_OPTIMALITY_TOLERANCE: Final = 1e-9
"""Tolerance of reduced costs. With Gurobi's default of 1e-6, bounds are less accurate than
solutions."""
_LICENCE_ERRORS: Final = ("NO_LICENSE", "NETWORK", "JOB_REJECTED", "CSWORKER", "CLOUD")
"""Errors of Gurobi's licence service, members of ``GRB.Error``."""


class Gurobi(Solver):
    """Back end that solves with Gurobi in this process."""

    name = "gurobi"
    package = "gurobipy"
    remedy = 'pip install "poetmodel[gurobi]"'
    display_name = "Gurobi"
    capabilities = Capabilities(licence_free_size=2_000)
    statuses = STATUS
    managed_options = MappingProxyType(
        {
            "TimeLimit": "time_limit",
            "Threads": "threads",
            "Seed": "seed",
            "MIPGap": "gap",
            "MIPGapAbs": "gap",
            "OutputFlag": "log",
            "LogToConsole": "log",
            "LogFile": "log",
        }
    )
    node_limit_option = "NodeLimit"
    gap_option = "MIPGap"
    options_page = "https://docs.gurobi.com/projects/optimizer/en/current/reference/parameters.html"

    def versions(self) -> Mapping[str, str]:
        """Return the versions of Gurobi and of gurobipy, by `name` and `package`."""
        version_numbers = self.import_package().gurobi.version()
        return {"gurobi": ".".join(map(str, version_numbers)), "gurobipy": version("gurobipy")}

    def run(self, call: SolverCall) -> RawSolution:
        """Solve a model that has columns and no trivial contradiction; see `Solver.run`."""
        gurobipy = self.import_package()
        with _open_model(gurobipy, is_quiet=call.limits.log is None) as model:
            try:
                return self._solve(gurobipy, model, call)
            except gurobipy.GurobiError as error:
                raise _translate_error(gurobipy, error, model) from error

    def _solve(self, gurobipy: Any, model: Any, call: SolverCall) -> RawSolution:
        """Fill the empty `model` and optimize it; TIME_LIMIT if filling it took all the time."""
        start = call.start
        columns = _add_columns_and_rows(gurobipy, model, call.form)
        _set_options(gurobipy, model, call)
        if start is not None:
            columns.Start = np.where(np.isnan(start), gurobipy.GRB.UNDEFINED, start)
        model.update()
        remaining_s = call.finish_build()
        if remaining_s == 0.0:
            return RawSolution(status=SolverStatus.TIME_LIMIT)
        # Names of Gurobi's parameters ignore case.
        is_limit_given = any(name.casefold() == "timelimit" for name in call.options)
        if remaining_s is not None and not is_limit_given:
            _set_option(gurobipy, model, "TimeLimit", remaining_s)
        model.optimize(_make_callback(gurobipy, columns, call))
        name_of_code = {getattr(gurobipy.GRB.Status, name): name for name in STATUS}
        status = self.translate_status(name_of_code.get(model.Status, model.Status), STATUS)
        return _read_result(model, columns, call.form, status)


@contextmanager
def _open_model(gurobipy: Any, *, is_quiet: bool) -> Iterator[Any]:
    """Yield an empty model without console output or, if quiet, any log; or `LicenceError`."""
    settings = {"LogToConsole": 0} | ({"OutputFlag": 0} if is_quiet else {})
    try:
        environment = gurobipy.Env(params=settings)
    except gurobipy.GurobiError as error:
        raise LicenceError(
            f"backend 'gurobi': cannot start ({error}); "
            "check the licence, or choose --backend highs"
        ) from error
    with environment, gurobipy.Model(env=environment) as model:
        yield model


def _set_options(gurobipy: Any, model: Any, call: SolverCall) -> None:
    """Set threads, seed, gaps, tolerances and objective limits, then the options of the call."""
    limits = call.limits
    settings: dict[str, OptionValue] = {
        "Threads": int(limits.threads),
        "Seed": int(limits.seed),
        "MIPGap": float(limits.rel_gap),
        "MIPGapAbs": float(limits.abs_gap),
        "FeasibilityTol": float(limits.tolerance),
        "IntFeasTol": float(limits.tolerance),
        "OptimalityTol": _OPTIMALITY_TOLERANCE,
    }
    if not limits.presolve:
        settings["Presolve"] = 0
    if limits.objective_stop is not None:
        settings["BestObjStop"] = float(limits.objective_stop)
    if limits.objective_cutoff is not None:
        settings["Cutoff"] = float(limits.objective_cutoff)
    for name, value in (settings | call.options).items():
        _set_option(gurobipy, model, name, value)


def _set_option(gurobipy: Any, model: Any, name: str, value: OptionValue) -> None:
    """Set a parameter of `model`; raise `UnknownOptionError` if Gurobi refuses name or value."""
    try:
        model.setParam(name, value)
    except (gurobipy.GurobiError, TypeError) as error:
        raise UnknownOptionError(
            f"backend 'gurobi': does not know the option {name!r}, or refuses {value!r} for it "
            f"({error}); see {Gurobi.options_page}"
        ) from error


def _add_columns_and_rows(gurobipy: Any, model: Any, form: StandardForm) -> Any:
    """Add columns, rows, costs, sense and offset of a form to the model; return the columns."""
    columns = model.addMVar(
        form.n_columns,
        lb=form.lower,
        ub=form.upper,
        obj=form.objective,
        vtype=np.where(form.integer, gurobipy.GRB.INTEGER, gurobipy.GRB.CONTINUOUS),
    )
    model.ModelSense = form.sense
    model.ObjCon = form.offset
    is_equality = form.row_lower == form.row_upper
    for sense, is_selected, bounds in (
        ("=", is_equality, form.row_upper),
        ("<", ~is_equality & np.isfinite(form.row_upper), form.row_upper),
        (">", ~is_equality & np.isfinite(form.row_lower), form.row_lower),
    ):
        if is_selected.any():
            model.addMConstr(form.matrix[is_selected], columns, sense, bounds[is_selected])
    return columns


def _make_callback(gurobipy: Any, columns: Any, call: SolverCall) -> Callable[[Any, int], None]:
    """Return the callback that forwards Gurobi's log, solutions, bounds and nodes to the call."""
    codes = gurobipy.GRB.Callback

    def on_event(model: Any, where: int) -> None:
        """Forward the event of code `where` to the call; stop Gurobi if the call should stop."""
        if where == codes.MESSAGE:
            call.write_log(model.cbGet(codes.MSG_STRING))
        elif where == codes.MIPSOL:
            # MIPSOL_OBJBST would be wrong: in this event it is the value of the previous solution
            call.report_solution(
                model.cbGet(codes.MIPSOL_OBJ),
                lambda: np.array(model.cbGetSolution(columns)),
                finite_or_none(model.cbGet(codes.MIPSOL_OBJBND)),
            )
        elif where == codes.MIP:
            nodes = model.cbGet(codes.MIP_NODCNT)
            call.report_progress(finite_or_none(model.cbGet(codes.MIP_OBJBND)), nodes)
        else:
            call.report_progress()
        if call.should_stop:
            model.terminate()

    return on_event


def _translate_error(gurobipy: Any, error: Any, model: Any) -> BackendError:
    """Return a `LicenceError` if the licence refuses `model` or solve, else a `BackendError`."""
    codes = gurobipy.GRB.Error
    if error.errno == codes.SIZE_LIMIT_EXCEEDED:
        max_size = Gurobi.capabilities.licence_free_size or 0
        return LicenceError(
            f"backend 'gurobi': the size-limited licence allows {max_size:,} variables and "
            f"{max_size:,} constraints, this model has {model.NumVars:,} and {model.NumConstrs:,}; "
            "choose --backend highs, or install a full licence"
        )
    if error.errno in {getattr(codes, name) for name in _LICENCE_ERRORS}:
        return LicenceError(
            f"backend 'gurobi': the licence refuses the solve ({error}); choose --backend highs"
        )
    return BackendError(f"backend 'gurobi': failed ({error})")


def _read_result(model: Any, columns: Any, form: StandardForm, status: SolverStatus) -> RawSolution:
    """Return solution, bound and nodes of a finished solve; without integers, no nodes."""
    x = np.array(columns.X) if model.SolCount else None
    if form.is_mip:
        bound, nodes = finite_or_none(model.ObjBound), int(model.NodeCount)
    else:
        is_optimal = status is SolverStatus.OPTIMAL
        bound, nodes = (finite_or_none(model.ObjVal) if is_optimal else None), None
    return RawSolution(status=status, x=x, bound=bound, nodes=nodes)
