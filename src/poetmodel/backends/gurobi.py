"""Gurobi: an optional back end, from ``poetmodel[gurobi]``.

Notes
-----
The package brings a licence that allows 2,000 variables and 2,000 constraints; whether a model
fits is known only when the solve begins. A range row counts as two constraints.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.call import SolverCall, finite
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
    "UNBOUNDED": SolverStatus.INFEASIBLE_OR_UNBOUNDED,  # says nothing about feasibility
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
    "LOCALLY_OPTIMAL": SolverStatus.FAILED,  # of nonlinear models only
    "LOCALLY_INFEASIBLE": SolverStatus.FAILED,
}
"""Meaning of each member of ``GRB.Status``."""

_SMALLEST_TOLERANCE: Final = 1e-9
"""Gurobi's default for reduced costs is 1e-6: bounds are then wrong by more than solutions are."""
_LICENCE_ERRORS: Final = ("NO_LICENSE", "NETWORK", "JOB_REJECTED", "CSWORKER", "CLOUD")


class Gurobi(Solver):
    """Solves with Gurobi, in this process."""

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
        """Return the versions of Gurobi and of gurobipy."""
        number = self.module().gurobi.version()
        return {"gurobi": ".".join(map(str, number)), "gurobipy": version("gurobipy")}

    def run(self, call: SolverCall) -> RawSolution:
        """Solve a model that has columns and no trivial contradiction."""
        gurobipy = self.module()
        with _model(gurobipy, quiet=call.limits.log is None) as model:
            try:
                return self._solve(gurobipy, model, call)
            except gurobipy.GurobiError as error:
                raise _failure(gurobipy, error, model) from error

    def _solve(self, gurobipy: Any, model: Any, call: SolverCall) -> RawSolution:
        start = call.start
        columns = _load(gurobipy, model, call.form)
        _configure(gurobipy, model, call)
        if start is not None:
            columns.Start = np.where(np.isnan(start), gurobipy.GRB.UNDEFINED, start)
        model.update()
        remaining_s = call.built()
        if remaining_s == 0.0:
            return RawSolution(status=SolverStatus.TIME_LIMIT)
        if remaining_s is not None and "TimeLimit" not in call.options:
            _set(gurobipy, model, "TimeLimit", remaining_s)
        model.optimize(_listener(gurobipy, columns, call))
        names = {getattr(gurobipy.GRB.Status, name): name for name in STATUS}
        status = self.translate(names.get(model.Status, model.Status), STATUS)
        return _collect(model, columns, call.form, status)


@contextmanager
def _model(gurobipy: Any, *, quiet: bool) -> Iterator[Any]:
    """Give an empty model in an environment that prints nothing, and free both afterwards."""
    settings = {"LogToConsole": 0} | ({"OutputFlag": 0} if quiet else {})
    try:
        environment = gurobipy.Env(params=settings)
    except gurobipy.GurobiError as error:
        raise LicenceError(
            f"backend 'gurobi': cannot start ({error}); "
            "check the licence, or choose --backend highs"
        ) from error
    with environment, gurobipy.Model(env=environment) as model:
        yield model


def _configure(gurobipy: Any, model: Any, call: SolverCall) -> None:
    limits = call.limits
    settings: dict[str, OptionValue] = {
        "Threads": int(limits.threads),
        "Seed": int(limits.seed),
        "MIPGap": float(limits.rel_gap),
        "MIPGapAbs": float(limits.abs_gap),
        "FeasibilityTol": float(limits.tolerance),
        "IntFeasTol": float(limits.tolerance),
        "OptimalityTol": _SMALLEST_TOLERANCE,
    }
    if not limits.presolve:
        settings["Presolve"] = 0
    if limits.objective_stop is not None:
        settings["BestObjStop"] = float(limits.objective_stop)
    if limits.objective_cutoff is not None:
        settings["Cutoff"] = float(limits.objective_cutoff)
    for name, value in (settings | call.options).items():
        _set(gurobipy, model, name, value)


def _set(gurobipy: Any, model: Any, name: str, value: OptionValue) -> None:
    try:
        model.setParam(name, value)
    except (gurobipy.GurobiError, TypeError) as error:
        raise UnknownOptionError(
            f"backend 'gurobi': does not know the option {name!r}, or refuses {value!r} for it "
            f"({error}); see {Gurobi.options_page}"
        ) from error


def _load(gurobipy: Any, model: Any, form: StandardForm) -> Any:
    """Add columns and rows; a row with two different sides becomes two constraints."""
    columns = model.addMVar(
        form.n_columns,
        lb=form.lower,
        ub=form.upper,
        obj=form.objective,
        vtype=np.where(form.integer, gurobipy.GRB.INTEGER, gurobipy.GRB.CONTINUOUS),
    )
    model.ModelSense = form.sense
    model.ObjCon = form.offset
    equal = form.row_lower == form.row_upper
    for sense, chosen, side in (
        ("=", equal, form.row_upper),
        ("<", ~equal & np.isfinite(form.row_upper), form.row_upper),
        (">", ~equal & np.isfinite(form.row_lower), form.row_lower),
    ):
        if chosen.any():
            model.addMConstr(form.matrix[chosen], columns, sense, side[chosen])
    return columns


def _listener(gurobipy: Any, columns: Any, call: SolverCall) -> Callable[[Any, int], None]:
    """Return the callback that routes what Gurobi says during a solve to the call."""
    codes = gurobipy.GRB.Callback

    def happened(model: Any, where: int) -> None:
        if where == codes.MESSAGE:
            call.write(model.cbGet(codes.MSG_STRING))
        elif where == codes.MIPSOL:
            # not MIPSOL_OBJBST: during this event that is still the solution before
            call.solution(
                model.cbGet(codes.MIPSOL_OBJ),
                lambda: np.array(model.cbGetSolution(columns)),
                finite(model.cbGet(codes.MIPSOL_OBJBND)),
            )
        elif where == codes.MIP:
            nodes = model.cbGet(codes.MIP_NODCNT)
            call.tick(finite(model.cbGet(codes.MIP_OBJBND)), nodes)
        else:
            call.tick()
        if call.stopping:
            model.terminate()

    return happened


def _failure(gurobipy: Any, error: Any, model: Any) -> BackendError:
    """Return our error for one of Gurobi's during a solve."""
    codes = gurobipy.GRB.Error
    if error.errno == codes.SIZE_LIMIT_EXCEEDED:
        most = Gurobi.capabilities.licence_free_size or 0
        return LicenceError(
            f"backend 'gurobi': the size-limited licence allows {most:,} variables and {most:,} "
            f"constraints, this model has {model.NumVars:,} and {model.NumConstrs:,}; "
            "choose --backend highs, or install a full licence"
        )
    if error.errno in {getattr(codes, name) for name in _LICENCE_ERRORS}:
        return LicenceError(
            f"backend 'gurobi': the licence refuses the solve ({error}); choose --backend highs"
        )
    return BackendError(f"backend 'gurobi': failed ({error})")


def _collect(model: Any, columns: Any, form: StandardForm, status: SolverStatus) -> RawSolution:
    x = np.array(columns.X) if model.SolCount else None
    if form.is_mip:
        bound, nodes = finite(model.ObjBound), int(model.NodeCount)
    else:
        done = status is SolverStatus.OPTIMAL
        bound, nodes = (finite(model.ObjVal) if done else None), None
    return RawSolution(status=status, x=x, bound=bound, nodes=nodes)
