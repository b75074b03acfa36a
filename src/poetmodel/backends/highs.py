"""HiGHS: the default back end, always installed.

Notes
-----
HiGHS looks at its time limit and at callbacks only between steps; the root of a model with
hundreds of thousands of rows can overrun the limit by several seconds. Setting the option
``mip_heuristic_run_feasibility_jump`` to False has helped on some models. Between presolve and the
root, ``HighsObjectiveFunction::setupCliquePartition`` looks at no clock; no option for it is known:
on 118,260 columns and 150,137 rows of ``paper`` it took 20 to 43 s beyond the limit.
``HPresolve::strengthenInequalities`` looks at the clock between rows only. In the presolve of a
sub-MIP, on 1,030 columns and 1,472 rows of ``lazy`` (ResNet-18/CIFAR on the Cortex-A72, 30 %,
serial deadline of 105 %, seed 0), it had no end in 57 s. With seed 1, or
``mip_heuristic_run_rens`` False, the model takes 2 to 3 s.
A solve started from inside a callback of another one uses as many threads as that one.

HiGHS 1.13 to 1.16 lose rows in presolve after its rule "enumeration" has fixed columns, and then
call a feasible model infeasible, or a worse solution the best
(https://github.com/ERGO-Code/HiGHS/issues/3216): of 12,400 small exact models 5 ended so. The rule
is off. HiGHS notices such errors when a solution does not fit the model that it was given, and
says so in its log only; a solve that does is done again without presolve.

Presolve makes an equation of a row that implies a bound of a continuous column, the bound being off
by less than the tolerance, and rounds what follows from it up to whole numbers: ``-p + k/6 <=
-0.25`` with ``p >= 0.25 + 4e-8`` and a binary `k` becomes ``k >= 2.4e-7``, so ``k = 1``. All
releases from 1.5.3 to 1.16.0 do; no rule that can be switched off is the cause, ``presolve=off``
helps. Costs below the tolerance of reduced costs mislead presolve, too. So such costs are given as
0 and paid for in the bound, and what is proved of a small model is confirmed without presolve.

HiGHS 1.16 may lose the best solution of a model with a start: presolve turns the start into a point
of the presolved model that is better than the start, and where nothing is better than this point,
its value is claimed, and the start itself returned. Such a model is solved again without the start.

The dual simplex method perturbs costs, and the primal one takes that back at the end. Degenerate
models can stay there: a linear relaxation of a T5 with AdamW (25,310 columns) had its optimal value
after 5 s and its proof not after 40 s. With a tenth of the perturbation it takes 2 s.
"""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.call import SolverCall, finite
from poetmodel.backends.protocol import Basis, OptionValue, RawSolution, SolverStatus
from poetmodel.backends.solver import Solver
from poetmodel.backends.standard_form import StandardForm, round_binaries
from poetmodel.errors import BackendError, UnknownOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


STATUS: Final[Mapping[str, SolverStatus]] = {
    "kNotset": SolverStatus.FAILED,
    "kLoadError": SolverStatus.FAILED,
    "kModelError": SolverStatus.FAILED,
    "kPresolveError": SolverStatus.FAILED,
    "kSolveError": SolverStatus.FAILED,
    "kPostsolveError": SolverStatus.FAILED,
    "kModelEmpty": SolverStatus.FAILED,  # a model without columns never gets here
    "kOptimal": SolverStatus.OPTIMAL,
    "kInfeasible": SolverStatus.INFEASIBLE,
    "kUnboundedOrInfeasible": SolverStatus.INFEASIBLE_OR_UNBOUNDED,
    "kUnbounded": SolverStatus.UNBOUNDED,
    "kObjectiveBound": SolverStatus.CUTOFF,
    "kObjectiveTarget": SolverStatus.OBJECTIVE_STOP,
    "kTimeLimit": SolverStatus.TIME_LIMIT,
    "kIterationLimit": SolverStatus.OTHER_LIMIT,
    "kUnknown": SolverStatus.FAILED,
    "kSolutionLimit": SolverStatus.OTHER_LIMIT,
    "kInterrupt": SolverStatus.INTERRUPTED,
    "kHighsInterrupt": SolverStatus.OTHER_LIMIT,  # by HiGHS itself, not by the user
    "kMemoryLimit": SolverStatus.OTHER_LIMIT,
}
"""Meaning of each member of ``HighsModelStatus``."""

_ENUMERATION: Final = 1 << 16
"""Presolve's rule "enumeration", as a bit of the option ``presolve_rule_off``."""
_MISFIT: Final = "has untransformed violations: "
"""How HiGHS says that a solution of the presolved model is none of the model itself.

What follows is "bound = 0; integrality = 0; row = 2 (row 7)", and from HiGHS 1.16 on
"variable bound = 0; constraint bound = 2 (row 7); integrality = 0".
"""
_VIOLATION: Final = re.compile(r" = ([^\s;]+)")
_LARGE_MISFIT: Final = 1e-3
"""Least violation of a row or bound that no rounding explains."""
_LOST: Final = 1e-6
"""Least difference, relative or absolute, of a claimed value from that of the solution that no
rounding explains."""
_BY_ROW: Final = 2
_LINEAR_PERTURBATION: Final = 0.1
"""Perturbation of the costs of a model without integers, relative to HiGHS's default."""
_SMALLEST_COEFFICIENT: Final = 1e-12
_FEASIBLE: Final = 2
_SMALLEST_COST: Final = 2e-7
"""Costs below this, twice the tolerance of reduced costs, are given as 0."""
_MOST_CONFIRMED: Final = 300
"""Most columns of a model of which each proof is confirmed without presolve."""
_CONFIRMING_S: Final = 10.0
"""Longest that confirming one proof may take [s]; nearly all take less than 0.1 s, a few minutes
(10,000 problems, and every twelfth published one)."""
_REFUTED: Final = 1e-6
"""By how much a solution is better than a bound that it refutes, absolutely, and relative to a
thousand units."""
_BEYOND: Final = 2e-6
"""By how much it is better than a cutoff below which nothing is said to be, also relatively."""
_UNFINISHED: Final = frozenset({SolverStatus.TIME_LIMIT, SolverStatus.INTERRUPTED})
_PROOFS: Final = frozenset({SolverStatus.OPTIMAL, SolverStatus.INFEASIBLE, SolverStatus.CUTOFF})

_callback = threading.local()
"""Per thread: `threads`, while a callback of a solve with that many threads is running in it."""


class Highs(Solver):
    """Solves with HiGHS, in this process."""

    name = "highs"
    package = "highspy"
    remedy = 'pip install "highspy>=1.15"'
    display_name = "HiGHS"
    statuses = STATUS
    managed_options = MappingProxyType(
        {
            "time_limit": "time_limit",
            "threads": "threads",
            "random_seed": "seed",
            "mip_rel_gap": "gap",
            "mip_abs_gap": "gap",
            "output_flag": "log",
            "log_to_console": "log",
            "log_file": "log",
        }
    )
    node_limit_option = "mip_max_nodes"
    gap_option = "mip_rel_gap"
    options_page = "https://ergo-code.github.io/HiGHS/stable/options/definitions/"

    def versions(self) -> Mapping[str, str]:
        """Return the versions of HiGHS and of highspy."""
        return dict(_versions(self.module()))

    def run(self, call: SolverCall) -> RawSolution:
        """Solve a model that has columns and no trivial contradiction."""
        again = False
        if not call.limits.presolve:
            call.options.setdefault("presolve", "off")
        while True:
            outcome, misled_by = self._run_once(call)
            if outcome.status is SolverStatus.OPTIMAL and outcome.x is None:
                # Seen once, on a busy machine. Nothing is known then, the bound included.
                outcome = RawSolution(status=SolverStatus.OTHER_LIMIT, nodes=outcome.nodes)
                misled_by = "presolve"
            if misled_by is None:
                confirmed = self._confirmed(call, outcome)
                if confirmed is not None:
                    return replace(confirmed, solved_again=again)
                misled_by = "presolve"
            if misled_by == "presolve" and "presolve" not in call.options:
                call.options["presolve"] = "off"
            elif misled_by == "start":
                call.start = None
            else:
                return replace(outcome, solved_again=again)
            call.write(f"poetmodel: {misled_by} went wrong; solving again without it\n")
            call.forget()
            again = True

    def _run_once(self, call: SolverCall) -> tuple[RawSolution, str | None]:
        """Solve; return also what went wrong, "presolve" or "start", if something did."""
        highspy, start = self.module(), call.start
        highs = quiet_highs(highspy)
        resolved = _Resolved.of(call.form)
        _configure(highspy, highs, call, resolved)
        misfits: list[str] = []
        _listen(highs, call, resolved, misfits)
        _load(highspy, highs, resolved.form)
        if start is not None:
            given = np.flatnonzero(~np.isnan(start)).astype(np.int32)
            done = highs.setSolution(given.size, given, start[given])
            _check(highspy, done, "refused the start")
        if call.basis is not None:
            _check(highspy, highs.setBasis(_as_basis(highspy, call.basis)), "refused the basis")
        remaining_s = call.built()
        if remaining_s == 0.0:
            return RawSolution(status=SolverStatus.TIME_LIMIT), None
        if remaining_s is not None and "time_limit" not in call.options:
            _set(highspy, highs, "time_limit", remaining_s)
        fresh_scheduler(highspy)
        done = highs.run()
        status = self.translate(highs.getModelStatus().name, STATUS)
        if done == highspy.HighsStatus.kError and not call.stopping:
            if "presolve" not in call.options:
                return RawSolution(status=SolverStatus.FAILED), "presolve"
            raise BackendError(
                f"backend 'highs': stopped with an error ({highs.getModelStatus().name})"
            )
        outcome = _collect(highspy, highs, resolved, status)
        if misfits:
            return outcome, "presolve"
        return outcome, "start" if _is_lost(highs, call, resolved.form, outcome) else None

    def _confirmed(self, call: SolverCall, outcome: RawSolution) -> RawSolution | None:
        """Return the outcome of an attempt without presolve to refute the proof of a solve.

        That looks for what is better than the bound, in small models only. None where it finds
        something. Where it does not end, the bound is what it proved itself, and nothing is proved.
        """
        form, limits = call.form, call.limits
        small = form.n_columns <= _MOST_CONFIRMED and "presolve" not in call.options
        infeasible = outcome.status is SolverStatus.INFEASIBLE
        if outcome.status not in _PROOFS or not small or not (form.is_mip or infeasible):
            return outcome
        most = math.inf
        if limits.objective_cutoff is not None:
            cutoff = form.sense * limits.objective_cutoff
            most = cutoff - _BEYOND * max(1.0, abs(cutoff))
        if outcome.status is SolverStatus.OPTIMAL and outcome.bound is not None:
            bound = form.sense * outcome.bound
            most = min(most, bound - _REFUTED * max(1.0, abs(bound) / 1000))
        target = None if math.isinf(most) else form.sense * most
        remaining_s = math.inf if call.remaining_s is None else call.remaining_s
        solution = RawSolution(status=SolverStatus.TIME_LIMIT)
        if remaining_s > 0.0 and not call.stopping:
            solution = self._without_presolve(call, min(remaining_s, _CONFIRMING_S), target)
        if solution.status is SolverStatus.OBJECTIVE_STOP:
            return None
        if solution.x is not None:
            x = round_binaries(solution.x, form)
            if form.sense * form.value(x) <= most and form.violation(x) <= limits.tolerance:
                return None
        if solution.status not in _UNFINISHED:
            return outcome
        call.write("poetmodel: what was proved was not confirmed without presolve\n")
        proved = solution.bound
        if proved is not None and outcome.bound is not None:
            proved = form.sense * min(form.sense * proved, form.sense * outcome.bound)
        return replace(outcome, status=SolverStatus.OTHER_LIMIT, bound=proved)

    def _without_presolve(
        self, call: SolverCall, time_s: float, target: float | None
    ) -> RawSolution:
        """Look for a solution that is at least as good as a target, until one is found."""
        limits = replace(
            call.limits,
            time_s=time_s,
            objective_cutoff=target,
            objective_stop=target,
            log=None,
            options=dict(call.options) | {"presolve": "off"},
        )
        again = SolverCall(call.form, limits, on_progress=lambda _: not call.stopping)
        try:
            return self._run_once(again)[0]
        except BackendError:
            return RawSolution(status=SolverStatus.TIME_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resolved:
    """A model without the costs that HiGHS does not resolve."""

    form: StandardForm
    best: float
    """Least sum of the costs that are left out."""
    worst: float
    """Greatest sum of those costs."""

    @classmethod
    def of(cls, form: StandardForm) -> _Resolved:
        """Leave out what is too small and has bounds."""
        costs = form.objective
        tiny = (costs != 0.0) & (np.abs(costs) < _SMALLEST_COST)
        tiny &= np.isfinite(form.lower) & np.isfinite(form.upper)
        if not tiny.any():
            return cls(form=form, best=0.0, worst=0.0)
        ends = costs[tiny] * np.array([form.lower[tiny], form.upper[tiny]])
        least, most = math.fsum(ends.min(axis=0)), math.fsum(ends.max(axis=0))
        best, worst = (least, most) if form.sense > 0 else (most, least)
        kept = replace(form, objective=np.where(tiny, 0.0, costs))
        return cls(form=kept, best=best, worst=worst)

    def bound(self, value: float) -> float | None:
        """Return the bound on the whole model that a bound of the model without them proves."""
        proven = finite(value)
        return None if proven is None else proven + self.best


def quiet_highs(highspy: Any) -> Any:
    """Return a new ``highspy.Highs`` that prints nothing.

    The constructor of highspy 1.16 prints a header before its caller can set an option.
    """
    return _quiet_class(highspy)()


@cache
def _quiet_class(highspy: Any) -> Any:
    def enable_callbacks(highs: Any) -> None:  # what the constructor calls first
        highs.setOptionValue("log_to_console", False)  # noqa: FBT003 - takes no keyword
        highspy.Highs.enableCallbacks(highs)

    return type("QuietHighs", (highspy.Highs,), {"enableCallbacks": enable_callbacks})


@cache
def _versions(highspy: Any) -> tuple[tuple[str, str], ...]:
    """Return the versions; looking the package's own up takes milliseconds."""
    return (("highs", str(quiet_highs(highspy).version())), ("highspy", version("highspy")))


def fresh_scheduler(highspy: Any) -> None:
    """Give this thread a fresh task scheduler.

    HiGHS keeps one scheduler per thread of the process, and a run with another number of
    threads than the first one did fails without a word. Resetting concerns the calling thread
    only (highspy 1.16 names it so), so that solves in other threads are safe; but a solve started
    from a callback must not pull the scheduler away from the solve around it.
    """
    if _outer_threads() is None:
        kind = highspy.Highs
        reset = getattr(kind, "resetThreadScheduler", None) or kind.resetGlobalScheduler
        reset(True)  # noqa: FBT003 - takes no keyword


def _outer_threads() -> int | None:
    """Return the number of threads of the solve whose callback is running here, if one is."""
    threads: int | None = getattr(_callback, "threads", None)
    return threads


def _configure(highspy: Any, highs: Any, call: SolverCall, resolved: _Resolved) -> None:
    limits = call.limits
    settings: dict[str, OptionValue] = {
        "presolve_rule_off": _ENUMERATION,
        "threads": _outer_threads() or int(limits.threads),
        "random_seed": int(limits.seed),
        "mip_rel_gap": float(limits.rel_gap),
        "mip_abs_gap": float(limits.abs_gap),
        "mip_feasibility_tolerance": float(limits.tolerance),
        "primal_feasibility_tolerance": float(limits.tolerance),
        "small_matrix_value": _SMALLEST_COEFFICIENT,
    }
    if limits.objective_stop is not None:
        settings["objective_target"] = float(limits.objective_stop) - resolved.worst
    if limits.objective_cutoff is not None:  # HiGHS reads this one as of a minimisation
        cutoff = float(limits.objective_cutoff) - resolved.best
        settings["objective_bound"] = call.form.sense * cutoff
    if not call.form.is_mip:
        settings["dual_simplex_cost_perturbation_multiplier"] = _LINEAR_PERTURBATION
    for name, value in (settings | call.options).items():
        _set(highspy, highs, name, value)


def _set(highspy: Any, highs: Any, name: str, value: OptionValue) -> None:
    if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
        raise UnknownOptionError(
            f"backend 'highs': does not know the option {name!r}, or refuses {value!r} for it; "
            f"see {Highs.options_page}"
        )


def _load(highspy: Any, highs: Any, form: StandardForm) -> None:
    matrix = form.matrix
    done = highs.passModel(
        form.n_columns,
        form.n_rows,
        matrix.nnz,
        _BY_ROW,
        form.sense,
        form.offset,
        form.objective,
        form.lower,
        form.upper,
        form.row_lower,
        form.row_upper,
        matrix.indptr.astype(np.int32),
        matrix.indices.astype(np.int32),
        matrix.data,
        form.integer.astype(np.int32),
    )
    _check(highspy, done, "refused the model; are there coefficients of 1e15 or more?")


def _listen(highs: Any, call: SolverCall, resolved: _Resolved, misfits: list[str]) -> None:
    """Route what HiGHS says during a run to the call, and note solutions that do not fit."""

    def improved(event: Any) -> None:
        data = event.data_out
        x = np.array(data.mip_solution)
        call.solution(call.form.value(x), lambda: x, resolved.bound(data.mip_dual_bound))

    def mip_asked(event: Any) -> None:
        data = event.data_out
        if call.tick(resolved.bound(data.mip_dual_bound), data.mip_node_count):
            event.interrupt()

    def lp_asked(event: Any) -> None:
        if call.tick():
            event.interrupt()

    def printed(event: Any) -> None:
        if _is_misfit(event.message):
            misfits.append(event.message)
        call.write(event.message)

    marked = partial(_marked, call.limits.threads)
    highs.cbMipInterrupt.subscribe(marked(mip_asked))
    highs.cbSimplexInterrupt.subscribe(marked(lp_asked))
    highs.cbIpmInterrupt.subscribe(marked(lp_asked))
    if call.on_progress is not None:
        highs.cbMipImprovingSolution.subscribe(marked(improved))
        highs.cbMipLogging.subscribe(marked(mip_asked))
    highs.cbLogging.subscribe(marked(printed))


def _is_misfit(message: str) -> bool:
    """Return whether HiGHS says that a solution does not fit the model, rounding errors apart."""
    violations = _VIOLATION.findall(message.partition(_MISFIT)[2])
    return any(float(violation) > _LARGE_MISFIT for violation in violations)


def _marked(threads: int, handle: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a callback in which `_outer_threads` knows of the solve around it."""

    def called(event: Any) -> None:
        before = _outer_threads()
        _callback.threads = before or threads
        try:
            handle(event)
        finally:
            _callback.threads = before

    return called


def _as_basis(highspy: Any, basis: Basis) -> Any:
    given = highspy.HighsBasis()
    given.col_status, given.row_status = basis.columns, basis.rows
    given.valid = True
    return given


def _basis(highspy: Any, highs: Any) -> Basis | None:
    basis = highs.getBasis()
    if not basis.valid:
        return None
    basic = highspy.HighsBasisStatus.kBasic
    return Basis(columns=list(basis.col_status), rows=list(basis.row_status), basic=basic)


def _collect(highspy: Any, highs: Any, resolved: _Resolved, status: SolverStatus) -> RawSolution:
    info = highs.getInfo()
    held = info.valid and info.primal_solution_status == _FEASIBLE
    x = np.array(highs.getSolution().col_value) if held else None
    if resolved.form.is_mip:
        bound, nodes = resolved.bound(info.mip_dual_bound), max(0, int(info.mip_node_count))
        return RawSolution(status=status, x=x, bound=bound, nodes=nodes)
    if status is not SolverStatus.OPTIMAL:
        return RawSolution(status=status, x=x)
    bound = resolved.bound(info.objective_function_value)
    return RawSolution(status=status, x=x, bound=bound, basis=_basis(highspy, highs))


def _is_lost(highs: Any, call: SolverCall, form: StandardForm, outcome: RawSolution) -> bool:
    """Return whether a solve that came to its end returned the start in place of the best."""
    ended = outcome.status in (SolverStatus.OPTIMAL, SolverStatus.OBJECTIVE_STOP)
    if call.start is None or outcome.x is None or not ended:
        return False
    claimed = highs.getInfo().objective_function_value
    value = form.value(outcome.x)
    return bool(form.sense * (value - claimed) > _LOST * max(1.0, abs(claimed)))


def _check(highspy: Any, done: Any, what: str) -> None:
    if done == highspy.HighsStatus.kError:
        raise BackendError(f"backend 'highs': {what}")
