"""SCIP: the second back end, from ``poetmodel[scip]``.

Notes
-----
SCIP searches with one thread and ignores `Limits.threads`. Its relative gap is relative to the
smaller of objective and bound, so that it never stops at a larger gap than the other solvers.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.call import SolverCall, finite_or_none
from poetmodel.backends.protocol import Capabilities, OptionValue, RawSolution, SolverStatus
from poetmodel.backends.solver import Solver
from poetmodel.backends.standard_form import MAXIMIZE, StandardForm
from poetmodel.errors import BackendError, UnknownOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray


STATUS: Final[Mapping[str, SolverStatus]] = {
    "unknown": SolverStatus.FAILED,
    "userinterrupt": SolverStatus.INTERRUPTED,
    "nodelimit": SolverStatus.OTHER_LIMIT,
    "totalnodelimit": SolverStatus.OTHER_LIMIT,
    "stallnodelimit": SolverStatus.OTHER_LIMIT,
    "timelimit": SolverStatus.TIME_LIMIT,
    "memlimit": SolverStatus.OTHER_LIMIT,
    "gaplimit": SolverStatus.OPTIMAL,
    "primallimit": SolverStatus.OBJECTIVE_STOP,
    "duallimit": SolverStatus.OTHER_LIMIT,
    "sollimit": SolverStatus.OTHER_LIMIT,
    "bestsollimit": SolverStatus.OTHER_LIMIT,
    "restartlimit": SolverStatus.OTHER_LIMIT,
    "optimal": SolverStatus.OPTIMAL,
    "infeasible": SolverStatus.INFEASIBLE,
    "unbounded": SolverStatus.UNBOUNDED,
    "inforunbd": SolverStatus.INFEASIBLE_OR_UNBOUNDED,
}
"""Meaning of each status that ``Model.getStatus`` returns."""


class Scip(Solver):
    """Back end that solves with SCIP in this process."""

    name = "scip"
    package = "pyscipopt"
    remedy = 'pip install "poetmodel[scip]"'
    display_name = "SCIP"
    capabilities = Capabilities(threads=False)
    statuses = STATUS
    managed_options = MappingProxyType(
        {
            "limits/time": "time_limit",
            "parallel/maxnthreads": "threads",
            "parallel/minnthreads": "threads",
            "lp/threads": "threads",
            "randomization/randomseedshift": "seed",
            "limits/gap": "gap",
            "limits/absgap": "gap",
            "display/verblevel": "log",
        }
    )
    node_limit_option = "limits/nodes"
    gap_option = "limits/gap"
    options_page = "https://www.scipopt.org/doc/html/PARAMETERS.php"

    def versions(self) -> Mapping[str, str]:
        """Return the versions of SCIP and of PySCIPOpt, by `name` and `package`."""
        pyscipopt = self.import_package()
        model = pyscipopt.Model()
        version_numbers = (model.getMajorVersion(), model.getMinorVersion(), model.getTechVersion())
        return {
            "scip": ".".join(map(str, version_numbers)),
            "pyscipopt": str(pyscipopt.__version__),
        }

    def run(self, call: SolverCall) -> RawSolution:
        """Solve a model that has columns and no trivial contradiction; see `Solver.run`."""
        pyscipopt = self.import_package()
        model = pyscipopt.Model()
        model.hideOutput()
        variables = _add_columns_and_rows(pyscipopt, model, call.form)
        _set_options(model, call)
        if call.start is not None:
            _add_start(model, variables, call.start)
        with _open_log_forwarder(model, call) as forward_log:
            _attach_event_handler(pyscipopt, model, variables, call, forward_log)
            remaining_s = call.finish_build()
            if remaining_s == 0.0:
                return RawSolution(status=SolverStatus.TIME_LIMIT)
            if remaining_s is not None and "limits/time" not in call.options:
                _set_option(model, "limits/time", remaining_s)
            _optimize(model)
        status = self.translate_status(model.getStatus(), STATUS)
        outcome = _read_result(model, variables, call.form, status)
        model.freeProb()
        return outcome


@contextmanager
def _open_log_forwarder(model: Any, call: SolverCall) -> Iterator[Callable[[], None]]:
    """Yield a function that passes new log output of SCIP, in a temporary file, to the call.

    Redirecting the output to Python crashes the process if a solve without the GIL writes to it.
    """
    if call.limits.log is None:
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="poetmodel-") as folder:
        path = Path(folder) / "scip.log"
        model.setLogfile(str(path))
        with path.open("rb") as stream:

            def forward_log() -> None:
                call.write_log(stream.read().decode("utf-8", errors="replace"))

            try:
                yield forward_log
            finally:
                model.setLogfile(None)
                forward_log()


def _optimize(model: Any) -> None:
    """Solve without the GIL, because ``optimize`` would block all other threads."""
    try:
        model.optimizeNogil()
    except Exception as error:  # PySCIPOpt raises no more specific class
        raise BackendError(f"backend 'scip': failed ({error})") from error


def _set_options(model: Any, call: SolverCall) -> None:
    """Set seed, gaps, tolerance, presolve, limits and options; turn SCIP's Ctrl-C off."""
    limits = call.limits
    settings: dict[str, OptionValue] = {
        "misc/catchctrlc": False,
        "limits/gap": float(limits.rel_gap),
        "limits/absgap": float(limits.abs_gap),
        "numerics/feastol": float(limits.tolerance),
        "randomization/randomseedshift": int(limits.seed),
    }
    if not limits.presolve:
        settings["presolving/maxrounds"] = 0
    if limits.objective_stop is not None:
        settings["limits/primal"] = float(limits.objective_stop)
    if limits.objective_cutoff is not None:
        model.setObjlimit(float(limits.objective_cutoff))
    for name, value in (settings | call.options).items():
        _set_option(model, name, value)


def _set_option(model: Any, name: str, value: OptionValue) -> None:
    """Set a parameter of `model`; raise `UnknownOptionError` if SCIP refuses name or value."""
    try:
        model.setParam(name, value)
    except (KeyError, ValueError, TypeError) as error:
        raise UnknownOptionError(
            f"backend 'scip': does not know the option {name!r}, or refuses {value!r} for it; "
            f"see {Scip.options_page}"
        ) from error


def _add_columns_and_rows(pyscipopt: Any, model: Any, form: StandardForm) -> list[Any]:
    """Add columns, rows, costs, sense and offset of a form; return each column's variable.

    Rows are built coefficient by coefficient, the fastest option in PySCIPOpt.
    """
    infinity = model.infinity()
    arrays = (form.lower, form.upper, form.integer, form.objective)
    columns = zip(*(values.tolist() for values in arrays), strict=True)
    variables = [
        model.addVar(
            name=f"x{j}",
            vtype="I" if is_integer else "C",
            lb=max(lower, -infinity),
            ub=min(upper, infinity),
            obj=cost,
        )
        for j, (lower, upper, is_integer, cost) in enumerate(columns)
    ]
    row_starts = form.matrix.indptr.tolist()
    indices, coefficients = form.matrix.indices.tolist(), form.matrix.data.tolist()
    row_bounds = zip(form.row_lower.tolist(), form.row_upper.tolist(), strict=True)
    for i, (lower, upper) in enumerate(row_bounds):
        first, stop = row_starts[i], row_starts[i + 1]
        row_lower, row_upper = (
            None if abs(bound) >= infinity else bound for bound in (lower, upper)
        )
        if first == stop or (row_lower is None and row_upper is None):
            continue
        first_term = coefficients[first] * variables[indices[first]]
        row = model.addCons(pyscipopt.ExprCons(first_term, row_lower, row_upper), name=f"c{i}")
        for k in range(first + 1, stop):
            model.addCoefLinear(row, variables[indices[k]], coefficients[k])
    if form.sense == MAXIMIZE:
        model.setMaximize()
    model.addObjoffset(form.offset)
    return variables


def _add_start(model: Any, variables: list[Any], start: NDArray[np.float64]) -> None:
    """Add the start to SCIP's solutions; SCIP tries to complete a start with NaN values."""
    is_partial = bool(np.isnan(start).any())
    solution = model.createPartialSol() if is_partial else model.createSol()
    for variable, value in zip(variables, start.tolist(), strict=True):
        if not math.isnan(value):
            model.setSolVal(solution, variable, value)
    model.addSol(solution)


def _attach_event_handler(
    pyscipopt: Any,
    model: Any,
    variables: list[Any],
    call: SolverCall,
    forward_log: Callable[[], None],
) -> None:
    """Register an event handler that forwards progress to the call, and stops SCIP for it."""
    event_types, stages = pyscipopt.SCIP_EVENTTYPE, pyscipopt.SCIP_STAGE
    read_best = partial(_read_best_values, model, variables)

    def on_event(_: Any, event: Any) -> None:
        """Forward new solution, bound, nodes and log to the call; interrupt SCIP on request."""
        bound = finite_or_none(model.getDualbound())
        if event.getType() == event_types.BESTSOLFOUND:
            # in this event SCIP's primal bound is still the value of the previous solution
            should_stop = call.report_solution(
                model.getSolObjVal(model.getBestSol()), read_best, bound
            )
        else:
            should_stop = call.report_progress(bound, model.getNTotalNodes())
        forward_log()
        # SCIP rejects an interrupt while it prepares the search; the next event interrupts it.
        if (should_stop or call.should_stop) and model.getStage() != stages.INITSOLVE:
            model.interruptSolve()

    event_names = ("BESTSOLFOUND", "PRESOLVEROUND", "FIRSTLPSOLVED", "LPSOLVED", "NODEFOCUSED")
    model.attachEventHandlerCallback(on_event, [getattr(event_types, name) for name in event_names])


def _read_best_values(model: Any, variables: list[Any]) -> NDArray[np.float64]:
    best_solution = model.getBestSol()
    return np.array([model.getSolVal(best_solution, variable) for variable in variables])


def _read_result(
    model: Any, variables: list[Any], form: StandardForm, status: SolverStatus
) -> RawSolution:
    """Return best solution (none if UNBOUNDED), bound and, with integers, nodes of a solve."""
    x = None
    if model.getNSols() and status is not SolverStatus.UNBOUNDED:
        x = _read_best_values(model, variables)
    nodes = int(model.getNTotalNodes()) if form.is_mip else None
    return RawSolution(status=status, x=x, bound=finite_or_none(model.getDualbound()), nodes=nodes)
