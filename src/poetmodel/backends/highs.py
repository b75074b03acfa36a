"""HiGHS: the default back end, always installed.

Notes
-----
HiGHS checks its time limit and calls callbacks only between phases. The root of a model with
hundreds of thousands of rows can overrun the limit by several seconds. Setting the option
``mip_heuristic_run_feasibility_jump`` to False has helped on some models. Between presolve and the
root, ``HighsObjectiveFunction::setupCliquePartition`` does not check the clock, and no option turns
it off: on 118,260 columns and 150,137 rows of ``paper`` it took 20 to 43 s beyond the limit.
``HPresolve::strengthenInequalities`` checks the clock only between rows. In the presolve of a
sub-MIP, on 1,030 columns and 1,472 rows of ``lazy`` (ResNet-18/CIFAR on the Cortex-A72, 30 %,
serial deadline of 105 %, seed 0), it did not end within 57 s. With seed 1, or with
``mip_heuristic_run_rens`` set to False, the model takes 2 to 3 s. A solve that is started in a
callback of another solve uses the number of threads of the other solve.

HiGHS 1.13 to 1.16 lose rows in presolve after its rule "enumeration" has fixed columns, and then
report a feasible model as infeasible, or a worse solution as optimal
(https://github.com/ERGO-Code/HiGHS/issues/3216): this happened on 5 of 12,400 small exact models.
The rule is off. HiGHS detects such errors if a solution violates the original model, but reports
them only in its log. Such a model is solved again without presolve.

If a row implies a bound of a continuous column up to the tolerance, presolve turns the row into an
equation, and rounds the implied bounds of integers up: ``-p + k/6 <= -0.25`` with ``p >= 0.25 +
4e-8`` and a binary `k` becomes ``k >= 2.4e-7``, so ``k = 1``. All releases from 1.5.3 to 1.16.0 do
this. No presolve rule that can be turned off is the cause; ``presolve=off`` helps. Costs below the
tolerance of reduced costs cause wrong results of presolve, too. So costs below twice the tolerance,
of columns with finite bounds, are passed as 0 and accounted for in the bound, and proofs about
small models are confirmed by a second solve without presolve.

HiGHS 1.16 may lose the best solution of a model with a start. Presolve maps the start to a point of
the presolved model that is better than the start. If no solution is better than this point, HiGHS
reports the point's objective but returns the start. Such a model is solved again without the start.

The dual simplex method perturbs costs; the primal simplex method removes the perturbation at the
end. Degenerate models can stall in this phase: a linear relaxation of a T5 with AdamW (25,310
columns) reached its optimal value after 5 s, but had no proof after 40 s. With a tenth of the
perturbation it takes 2 s.
"""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from poetmodel.backends.call import SolverCall, finite_or_none
from poetmodel.backends.protocol import Basis, OptionValue, RawSolution, SolverStatus
from poetmodel.backends.solver import Solver
from poetmodel.backends.standard_form import StandardForm, round_integers
from poetmodel.errors import BackendError, UnknownOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Feature: TypeAlias = Literal["presolve", "start"]
    """What may make a solve go wrong, so that HiGHS solves again without it."""

STATUS: Final[Mapping[str, SolverStatus]] = {
    "kNotset": SolverStatus.FAILED,
    "kLoadError": SolverStatus.FAILED,
    "kModelError": SolverStatus.FAILED,
    "kPresolveError": SolverStatus.FAILED,
    "kSolveError": SolverStatus.FAILED,
    "kPostsolveError": SolverStatus.FAILED,
    "kModelEmpty": SolverStatus.FAILED,  # `Solver.solve` handles models without columns
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

_ENUMERATION_RULE_BIT: Final = 1 << 16
"""Bit of the presolve rule "enumeration" in the option ``presolve_rule_off``."""
_VIOLATION_MESSAGE: Final = "has untransformed violations: "
"""Log message of HiGHS about a solution of the presolved model that violates the original model.

The message continues with "bound = 0; integrality = 0; row = 2 (row 7)", and from HiGHS 1.16 on
"variable bound = 0; constraint bound = 2 (row 7); integrality = 0".
"""
_VIOLATION_VALUE: Final = re.compile(r" = ([^\s;]+)")
_MIN_VIOLATION: Final = 1e-3
"""Violation of a row, bound or integrality above which rounding errors are no explanation."""
_MIN_OBJECTIVE_DIFFERENCE: Final = 1e-6
"""Difference between the reported objective and the objective of the solution above which rounding
errors are no explanation; relative for objectives above 1."""
_ROW_WISE: Final = 2
"""Argument of ``passModel``: the matrix is stored by rows."""
_LINEAR_PERTURBATION: Final = 0.1
"""Cost perturbation of models without integers, relative to HiGHS's default."""
_INTERIOR_COLUMNS: Final = 20_000
"""Number of columns from which models without integers and basis are solved by the interior point
method, then crossover: 60,028 columns of a transformer in 1.2 s, by the simplex method in 9.8 s."""
_MIN_COEFFICIENT: Final = 1e-12
"""HiGHS drops coefficients up to this magnitude."""
_PRIMAL_FEASIBLE: Final = 2
"""Value of ``primal_solution_status`` for a feasible solution."""
_MIN_COST: Final = 2e-7
"""Costs below this magnitude, twice the tolerance of reduced costs, are passed as 0 for columns
with finite bounds."""
_MAX_CONFIRMED_COLUMNS: Final = 300
"""Maximum number of columns of models whose proofs are confirmed without presolve."""
_MAX_CONFIRMATION_S: Final = 10.0
"""Time limit of confirming one proof [s]. Without it, nearly all take less than 0.1 s, and a few
take minutes (measured on 10,000 problems, and on every twelfth published one)."""
_MIN_BOUND_VIOLATION: Final = 1e-6
"""Minimum improvement that refutes a bound: absolute for bounds up to 1,000, otherwise per 1,000
units of the bound."""
_MIN_CUTOFF_VIOLATION: Final = 2e-6
"""Minimum improvement over the cutoff that refutes a claim that no solution is better than the
cutoff; relative for values above 1."""
_UNFINISHED_STATUSES: Final = frozenset(
    {
        SolverStatus.TIME_LIMIT,
        SolverStatus.OTHER_LIMIT,
        SolverStatus.INTERRUPTED,
        SolverStatus.FAILED,
    }
)
_PROOF_STATUSES: Final = frozenset(
    {SolverStatus.OPTIMAL, SolverStatus.INFEASIBLE, SolverStatus.CUTOFF}
)

_callback_state = threading.local()
"""Its attribute `threads` is the thread count of the solve whose callback this thread executes."""


class Highs(Solver):
    """Back end that solves with HiGHS in this process."""

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
        """Return the versions of HiGHS and of highspy, by `name` and `package`."""
        return dict(_read_versions(self.import_package()))

    def run(self, call: SolverCall) -> RawSolution:
        """Solve a model that has columns and no trivial contradiction.

        A wrong result of presolve or the start is solved again without it, unless the user set
        ``presolve``. A proof that cannot be confirmed becomes OTHER_LIMIT.
        """
        solved_again = False
        if not call.limits.presolve:
            call.options.setdefault("presolve", "off")
        while True:
            outcome, failed_feature = self._solve_once(call)
            if outcome.status is SolverStatus.OPTIMAL and outcome.x is None:
                # Observed once, on a machine under load. Not even the bound can be trusted then.
                outcome = RawSolution(status=SolverStatus.OTHER_LIMIT, nodes=outcome.nodes)
                failed_feature = "presolve"
            if failed_feature is None:
                confirmed_outcome = self._confirm_proof(call, outcome)
                if confirmed_outcome is not None:
                    return replace(confirmed_outcome, solved_again=solved_again)
                failed_feature = "presolve"
            if failed_feature == "presolve" and "presolve" not in call.options:
                call.options["presolve"] = "off"
            elif failed_feature == "start":
                call.start = None
            else:
                return replace(outcome, solved_again=solved_again)
            call.write_log(f"poetmodel: {failed_feature} went wrong; solving again without it\n")
            call.discard_progress()
            solved_again = True

    def _solve_once(self, call: SolverCall) -> tuple[RawSolution, Feature | None]:
        """Solve once; return the result, and what made it wrong, if anything."""
        highspy, start = self.import_package(), call.start
        highs = create_quiet_highs(highspy)
        reduced_model = _ReducedModel.from_form(call.form)
        _set_options(highspy, highs, call, reduced_model)
        violation_messages: list[str] = []
        _subscribe_callbacks(highs, call, reduced_model, violation_messages)
        _pass_model(highspy, highs, reduced_model.form)
        if start is not None:
            start_columns = np.flatnonzero(~np.isnan(start)).astype(np.int32)
            status_code = highs.setSolution(start_columns.size, start_columns, start[start_columns])
            _raise_on_error(highspy, status_code, "refused the start")
        if call.basis is not None:
            _raise_on_error(
                highspy, highs.setBasis(_to_highs_basis(highspy, call.basis)), "refused the basis"
            )
        remaining_s = call.finish_build()
        if remaining_s == 0.0:
            return RawSolution(status=SolverStatus.TIME_LIMIT), None
        if remaining_s is not None and "time_limit" not in call.options:
            _set_option(highspy, highs, "time_limit", remaining_s)
        reset_scheduler(highspy)
        status_code = highs.run()
        status = self.translate_status(highs.getModelStatus().name, STATUS)
        if status_code == highspy.HighsStatus.kError and not call.should_stop:
            if "presolve" not in call.options:
                return RawSolution(status=SolverStatus.FAILED), "presolve"
            raise BackendError(
                f"backend 'highs': stopped with an error ({highs.getModelStatus().name})"
            )
        outcome = _read_result(highspy, highs, reduced_model, status)
        if violation_messages:
            return outcome, "presolve"
        return outcome, "start" if _has_returned_start(
            highs, call, reduced_model.form, outcome
        ) else None

    def _confirm_proof(self, call: SolverCall, outcome: RawSolution) -> RawSolution | None:
        """Search without presolve for a solution that refutes a proof of the first solve.

        Return None if there is one; the outcome as OTHER_LIMIT if the search does not end; and
        otherwise, as without a proof or for a large model, the outcome itself.
        """
        form, limits = call.form, call.limits
        is_confirmable = form.n_columns <= _MAX_CONFIRMED_COLUMNS and "presolve" not in call.options
        is_infeasible = outcome.status is SolverStatus.INFEASIBLE
        if (
            outcome.status not in _PROOF_STATUSES
            or not is_confirmable
            or not (form.is_mip or is_infeasible)
        ):
            return outcome
        target_value = math.inf
        if limits.objective_cutoff is not None:
            cutoff = form.sense * limits.objective_cutoff
            target_value = cutoff - _MIN_CUTOFF_VIOLATION * max(1.0, abs(cutoff))
        if outcome.status is SolverStatus.OPTIMAL and outcome.bound is not None:
            bound = form.sense * outcome.bound
            target_value = min(
                target_value, bound - _MIN_BOUND_VIOLATION * max(1.0, abs(bound) / 1000)
            )
        target = None if math.isinf(target_value) else form.sense * target_value
        remaining_s = math.inf if call.remaining_s is None else call.remaining_s
        second_outcome = RawSolution(status=SolverStatus.TIME_LIMIT)
        if remaining_s > 0.0 and not call.should_stop:
            second_outcome = self._solve_without_presolve(
                call, min(remaining_s, _MAX_CONFIRMATION_S), target
            )
        if second_outcome.status is SolverStatus.OBJECTIVE_STOP:
            return None
        if second_outcome.x is not None:
            x = round_integers(second_outcome.x, form)
            if (
                form.sense * form.objective_value(x) <= target_value
                and form.max_violation(x) <= limits.tolerance
            ):
                return None
        if second_outcome.status not in _UNFINISHED_STATUSES:
            return outcome
        call.write_log("poetmodel: the proof was not confirmed without presolve\n")
        proven_bound = second_outcome.bound
        if proven_bound is not None and outcome.bound is not None:
            proven_bound = form.sense * min(form.sense * proven_bound, form.sense * outcome.bound)
        return replace(outcome, status=SolverStatus.OTHER_LIMIT, bound=proven_bound)

    def _solve_without_presolve(
        self, call: SolverCall, time_s: float, target: float | None
    ) -> RawSolution:
        """Search without presolve, up to `time_s`, for one solution at least as good as `target`.

        Without a target, solve to optimality. A failure counts as TIME_LIMIT.
        """
        limits = replace(
            call.limits,
            time_s=time_s,
            objective_cutoff=target,
            objective_stop=target,
            log=None,
            options=dict(call.options) | {"presolve": "off"},
        )
        call_without_presolve = SolverCall(
            call.form, limits, on_progress=lambda _: not call.should_stop
        )
        try:
            return self._solve_once(call_without_presolve)[0]
        except BackendError:
            return RawSolution(status=SolverStatus.TIME_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReducedModel:
    """A model with its tiny costs set to 0, and the range of the sum of the removed costs."""

    form: StandardForm
    """The model without the tiny costs."""
    best_removed_cost: float
    """Best possible sum of the removed costs, in the model's sense."""
    worst_removed_cost: float
    """Worst possible sum of the removed costs, in the model's sense."""

    @classmethod
    def from_form(cls, form: StandardForm) -> _ReducedModel:
        """Return `form` without tiny costs of bounded columns, and the range of their sum.

        HiGHS returns wrong results for costs below `_MIN_COST` in magnitude.
        """
        costs = form.objective
        is_tiny = (costs != 0.0) & (np.abs(costs) < _MIN_COST)
        is_tiny &= np.isfinite(form.lower) & np.isfinite(form.upper)
        if not is_tiny.any():
            return cls(form=form, best_removed_cost=0.0, worst_removed_cost=0.0)
        contributions = costs[is_tiny] * np.array([form.lower[is_tiny], form.upper[is_tiny]])
        min_sum, max_sum = (
            math.fsum(contributions.min(axis=0)),
            math.fsum(contributions.max(axis=0)),
        )
        best, worst = (min_sum, max_sum) if form.sense > 0 else (max_sum, min_sum)
        reduced_form = replace(form, objective=np.where(is_tiny, 0.0, costs))
        return cls(form=reduced_form, best_removed_cost=best, worst_removed_cost=worst)

    def original_bound(self, reduced_bound: float) -> float | None:
        """Convert a bound of the reduced model to one of the original; None for "no bound"."""
        bound = finite_or_none(reduced_bound)
        return None if bound is None else bound + self.best_removed_cost


def create_quiet_highs(highspy: Any) -> Any:
    """Return a ``highspy.Highs`` without the header that highspy 1.16 prints when created."""
    return _make_quiet_class(highspy)()


@cache
def _make_quiet_class(highspy: Any) -> Any:
    def enable_callbacks(highs: Any) -> None:  # the constructor calls this method first
        highs.setOptionValue("log_to_console", False)  # noqa: FBT003 - takes no keyword
        highspy.Highs.enableCallbacks(highs)

    return type("QuietHighs", (highspy.Highs,), {"enableCallbacks": enable_callbacks})


@cache
def _read_versions(highspy: Any) -> tuple[tuple[str, str], ...]:
    """Return (name, version) pairs; cached, because reading package metadata takes milliseconds."""
    return (("highs", str(create_quiet_highs(highspy).version())), ("highspy", version("highspy")))


def reset_scheduler(highspy: Any) -> None:
    """Reset HiGHS's task scheduler of this thread, unless the thread executes a callback.

    There is one per thread, and a solve with another number of threads than the first one fails
    silently. A solve that is started in a callback must not reset the outer solve's.
    """
    if _outer_thread_count() is None:
        highs_class = highspy.Highs
        reset = (
            getattr(highs_class, "resetThreadScheduler", None) or highs_class.resetGlobalScheduler
        )
        reset(True)  # noqa: FBT003 - takes no keyword


def _outer_thread_count() -> int | None:
    """Return the threads of the solve whose callback this thread executes; None without one."""
    threads: int | None = getattr(_callback_state, "threads", None)
    return threads


def _set_options(highspy: Any, highs: Any, call: SolverCall, reduced_model: _ReducedModel) -> None:
    """Set threads, seed, gaps, tolerances and objective limits, then the options of the call.

    A solve inside of a callback gets the thread count of the outer solve.
    """
    limits = call.limits
    settings: dict[str, OptionValue] = {
        "presolve_rule_off": _ENUMERATION_RULE_BIT,
        "threads": _outer_thread_count() or int(limits.threads),
        "random_seed": int(limits.seed),
        "mip_rel_gap": float(limits.rel_gap),
        "mip_abs_gap": float(limits.abs_gap),
        "mip_feasibility_tolerance": float(limits.tolerance),
        "primal_feasibility_tolerance": float(limits.tolerance),
        "small_matrix_value": _MIN_COEFFICIENT,
    }
    if limits.objective_stop is not None:
        settings["objective_target"] = (
            float(limits.objective_stop) - reduced_model.worst_removed_cost
        )
    if limits.objective_cutoff is not None:  # HiGHS expects the value for minimization
        cutoff = float(limits.objective_cutoff) - reduced_model.best_removed_cost
        settings["objective_bound"] = call.form.sense * cutoff
    if not call.form.is_mip:
        settings["dual_simplex_cost_perturbation_multiplier"] = _LINEAR_PERTURBATION
        if call.basis is None and call.form.n_columns >= _INTERIOR_COLUMNS:
            settings["solver"] = "ipm"
    for name, value in (settings | call.options).items():
        _set_option(highspy, highs, name, value)


def _set_option(highspy: Any, highs: Any, name: str, value: OptionValue) -> None:
    if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
        raise UnknownOptionError(
            f"backend 'highs': does not know the option {name!r}, or refuses {value!r} for it; "
            f"see {Highs.options_page}"
        )


def _pass_model(highspy: Any, highs: Any, form: StandardForm) -> None:
    """Pass the arrays of a form to HiGHS; raise `BackendError` if HiGHS rejects it."""
    matrix = form.matrix
    status = highs.passModel(
        form.n_columns,
        form.n_rows,
        matrix.nnz,
        _ROW_WISE,
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
    _raise_on_error(highspy, status, "refused the model; are there coefficients of 1e15 or more?")


def _subscribe_callbacks(
    highs: Any, call: SolverCall, reduced_model: _ReducedModel, violation_messages: list[str]
) -> None:
    """Forward bounds, nodes and log to the call; interrupt HiGHS if the call should stop.

    Log messages about a violated original model are appended to `violation_messages`.
    """

    def on_improvement(event: Any) -> None:
        """Report a solution, with its value in `call.form` and the bound of the original model."""
        data = event.data_out
        x = np.array(data.mip_solution)
        call.report_solution(
            call.form.objective_value(x),
            lambda: x,
            reduced_model.original_bound(data.mip_dual_bound),
        )

    def on_mip_step(event: Any) -> None:
        data = event.data_out
        if call.report_progress(
            reduced_model.original_bound(data.mip_dual_bound), data.mip_node_count
        ):
            event.interrupt()

    def on_lp_step(event: Any) -> None:
        if call.report_progress():
            event.interrupt()

    def on_log(event: Any) -> None:
        if _reports_violation(event.message):
            violation_messages.append(event.message)
        call.write_log(event.message)

    wrap = partial(_wrap_callback, call.limits.threads)
    highs.cbMipInterrupt.subscribe(wrap(on_mip_step))
    highs.cbSimplexInterrupt.subscribe(wrap(on_lp_step))
    highs.cbIpmInterrupt.subscribe(wrap(on_lp_step))
    if call.on_progress is not None:
        highs.cbMipImprovingSolution.subscribe(wrap(on_improvement))
        highs.cbMipLogging.subscribe(wrap(on_mip_step))
    highs.cbLogging.subscribe(wrap(on_log))


def _reports_violation(message: str) -> bool:
    """Return whether a message reports a violation of the original model above `_MIN_VIOLATION`."""
    violations = _VIOLATION_VALUE.findall(message.partition(_VIOLATION_MESSAGE)[2])
    return any(float(violation) > _MIN_VIOLATION for violation in violations)


def _wrap_callback(threads: int, handle: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a callback so that `_outer_thread_count` returns `threads` during the callback."""

    def wrapper(event: Any) -> None:
        outer_threads = _outer_thread_count()
        _callback_state.threads = outer_threads or threads
        try:
            handle(event)
        finally:
            _callback_state.threads = outer_threads

    return wrapper


def _to_highs_basis(highspy: Any, basis: Basis) -> Any:
    highs_basis = highspy.HighsBasis()
    highs_basis.col_status, highs_basis.row_status = basis.columns, basis.rows
    highs_basis.valid = True
    return highs_basis


def _read_basis(highspy: Any, highs: Any) -> Basis | None:
    """Return the basis of the last solve; None if HiGHS has no valid basis."""
    basis = highs.getBasis()
    if not basis.valid:
        return None
    basic = highspy.HighsBasisStatus.kBasic
    return Basis(columns=list(basis.col_status), rows=list(basis.row_status), basic=basic)


def _read_result(
    highspy: Any, highs: Any, reduced_model: _ReducedModel, status: SolverStatus
) -> RawSolution:
    """Return status, solution, nodes and basis of a solve, and the bound of the original model."""
    info = highs.getInfo()
    is_feasible = info.valid and info.primal_solution_status == _PRIMAL_FEASIBLE
    x = np.array(highs.getSolution().col_value) if is_feasible else None
    if reduced_model.form.is_mip:
        bound, nodes = (
            reduced_model.original_bound(info.mip_dual_bound),
            max(0, int(info.mip_node_count)),
        )
        return RawSolution(status=status, x=x, bound=bound, nodes=nodes)
    if status is not SolverStatus.OPTIMAL:
        return RawSolution(status=status, x=x)
    bound = reduced_model.original_bound(info.objective_function_value)
    return RawSolution(status=status, x=x, bound=bound, basis=_read_basis(highspy, highs))


def _has_returned_start(
    highs: Any, call: SolverCall, form: StandardForm, outcome: RawSolution
) -> bool:
    """Return whether a solve with a start lost its best solution and returned the start.

    HiGHS then reports a better objective than that of the returned solution in `form`.
    """
    is_finished = outcome.status in (SolverStatus.OPTIMAL, SolverStatus.OBJECTIVE_STOP)
    if call.start is None or outcome.x is None or not is_finished:
        return False
    reported_value = highs.getInfo().objective_function_value
    value = form.objective_value(outcome.x)
    return bool(
        form.sense * (value - reported_value)
        > _MIN_OBJECTIVE_DIFFERENCE * max(1.0, abs(reported_value))
    )


def _raise_on_error(highspy: Any, status: Any, message: str) -> None:
    if status == highspy.HighsStatus.kError:
        raise BackendError(f"backend 'highs': {message}")
