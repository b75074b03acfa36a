"""SCIP: the second back end, from ``poetmodel[scip]``.

Notes
-----
SCIP searches with one thread; `Limits.threads` changes nothing. Its relative gap is measured
against the smaller of objective and bound, so that it never stops earlier than the others.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.call import SolverCall, finite
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
    """Solves with SCIP, in this process."""

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
        """Return the versions of SCIP and of PySCIPOpt."""
        pyscipopt = self.module()
        model = pyscipopt.Model()
        number = (model.getMajorVersion(), model.getMinorVersion(), model.getTechVersion())
        return {"scip": ".".join(map(str, number)), "pyscipopt": str(pyscipopt.__version__)}

    def run(self, call: SolverCall) -> RawSolution:
        """Solve a model that has columns and no trivial contradiction."""
        pyscipopt = self.module()
        model = pyscipopt.Model()
        model.hideOutput()
        variables = _load(pyscipopt, model, call.form)
        _configure(model, call)
        if call.start is not None:
            _offer(model, variables, call.start)
        with _log(model, call) as pass_on:
            _listen(pyscipopt, model, variables, call, pass_on)
            remaining_s = call.built()
            if remaining_s == 0.0:
                return RawSolution(status=SolverStatus.TIME_LIMIT)
            if remaining_s is not None and "limits/time" not in call.options:
                _set(model, "limits/time", remaining_s)
            _optimize(model)
        status = self.translate(model.getStatus(), STATUS)
        outcome = _collect(model, variables, call.form, status)
        model.freeProb()
        return outcome


@contextmanager
def _log(model: Any, call: SolverCall) -> Iterator[Callable[[], None]]:
    """Give a function that passes on what SCIP has logged since it was last called.

    SCIP's log goes through a file: redirecting its output to Python crashes the process when a
    solve without the GIL writes to it.
    """
    if call.limits.log is None:
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="poetmodel-") as folder:
        path = Path(folder) / "scip.log"
        model.setLogfile(str(path))
        with path.open("rb") as stream:

            def pass_on() -> None:
                call.write(stream.read().decode("utf-8", errors="replace"))

            try:
                yield pass_on
            finally:
                model.setLogfile(None)
                pass_on()


def _optimize(model: Any) -> None:
    """Solve without the GIL, which ``optimize`` would keep from all other threads."""
    try:
        model.optimizeNogil()
    except Exception as error:  # PySCIPOpt knows nothing more specific
        raise BackendError(f"backend 'scip': failed ({error})") from error


def _configure(model: Any, call: SolverCall) -> None:
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
        _set(model, name, value)


def _set(model: Any, name: str, value: OptionValue) -> None:
    try:
        model.setParam(name, value)
    except (KeyError, ValueError, TypeError) as error:
        raise UnknownOptionError(
            f"backend 'scip': does not know the option {name!r}, or refuses {value!r} for it; "
            f"see {Scip.options_page}"
        ) from error


def _load(pyscipopt: Any, model: Any, form: StandardForm) -> list[Any]:
    """Add columns and rows; rows go in coefficient by coefficient, which is the quickest way."""
    infinity = model.infinity()
    stated = (form.lower, form.upper, form.integer, form.objective)
    columns = zip(*(values.tolist() for values in stated), strict=True)
    variables = [
        model.addVar(
            name=f"x{j}",
            vtype="I" if whole else "C",
            lb=max(low, -infinity),
            ub=min(up, infinity),
            obj=cost,
        )
        for j, (low, up, whole, cost) in enumerate(columns)
    ]
    ends = form.matrix.indptr.tolist()
    indices, data = form.matrix.indices.tolist(), form.matrix.data.tolist()
    sides = zip(form.row_lower.tolist(), form.row_upper.tolist(), strict=True)
    for i, (low, up) in enumerate(sides):
        begin, end = ends[i], ends[i + 1]
        least, most = (None if abs(side) >= infinity else side for side in (low, up))
        if begin == end or (least is None and most is None):
            continue
        head = data[begin] * variables[indices[begin]]
        row = model.addCons(pyscipopt.ExprCons(head, least, most), name=f"c{i}")
        for k in range(begin + 1, end):
            model.addCoefLinear(row, variables[indices[k]], data[k])
    if form.sense == MAXIMIZE:
        model.setMaximize()
    model.addObjoffset(form.offset)
    return variables


def _offer(model: Any, variables: list[Any], start: NDArray[np.float64]) -> None:
    """Add the start to SCIP's solutions; SCIP completes a partial one if it can."""
    partial = bool(np.isnan(start).any())
    solution = model.createPartialSol() if partial else model.createSol()
    for variable, value in zip(variables, start.tolist(), strict=True):
        if not math.isnan(value):
            model.setSolVal(solution, variable, value)
    model.addSol(solution)


def _listen(
    pyscipopt: Any, model: Any, variables: list[Any], call: SolverCall, pass_on: Callable[[], None]
) -> None:
    """Route SCIP's events to the call."""
    kinds, stages = pyscipopt.SCIP_EVENTTYPE, pyscipopt.SCIP_STAGE

    def values() -> NDArray[np.float64]:
        best = model.getBestSol()
        return np.array([model.getSolVal(best, variable) for variable in variables])

    def happened(_: Any, event: Any) -> None:
        bound = finite(model.getDualbound())
        if event.getType() == kinds.BESTSOLFOUND:
            # during this event SCIP's primal bound is still that of the solution before
            halt = call.solution(model.getSolObjVal(model.getBestSol()), values, bound)
        else:
            halt = call.tick(bound, model.getNTotalNodes())
        pass_on()
        # SCIP refuses while it sets up the search; the next event finds the call stopping, too.
        if (halt or call.stopping) and model.getStage() != stages.INITSOLVE:
            model.interruptSolve()

    names = ("BESTSOLFOUND", "PRESOLVEROUND", "FIRSTLPSOLVED", "LPSOLVED", "NODEFOCUSED")
    model.attachEventHandlerCallback(happened, [getattr(kinds, name) for name in names])


def _collect(
    model: Any, variables: list[Any], form: StandardForm, status: SolverStatus
) -> RawSolution:
    x = None
    if model.getNSols() and status is not SolverStatus.UNBOUNDED:
        best = model.getBestSol()
        x = np.array([model.getSolVal(best, variable) for variable in variables])
    nodes = int(model.getNTotalNodes()) if form.is_mip else None
    return RawSolution(status=status, x=x, bound=finite(model.getDualbound()), nodes=nodes)
