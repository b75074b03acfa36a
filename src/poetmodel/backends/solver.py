"""`Solver`, the base class of back ends: checks and corrections around each solve."""

from __future__ import annotations

import importlib
import importlib.util
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from poetmodel.backends.call import SolverCall
from poetmodel.backends.protocol import (
    Basis,
    Capabilities,
    Limits,
    OnProgress,
    RawSolution,
    SolverStatus,
)
from poetmodel.backends.standard_form import StandardForm, round_integers
from poetmodel.errors import (
    BackendError,
    BackendUnavailableError,
    InputError,
    PoetModelError,
    quote,
)
from poetmodel.user_files import convert_user_errors, is_in_user_file

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from numpy.typing import NDArray


_TOLERANCE: Final = 1e-9
"""Violation up to which a start disproves the status "infeasible", and difference up to which two
objectives are equal, relative for objectives above 1."""

_NO_SOLUTION_STATUSES: Final = frozenset(
    {SolverStatus.INFEASIBLE, SolverStatus.UNBOUNDED, SolverStatus.CUTOFF}
)


class Solver(ABC):
    """Base class of back ends; subclasses implement `run` and `versions`.

    Each `run` creates new objects of the solver's package, so that calls do not influence each
    other.
    """

    name: ClassVar[str]
    """Name by which users select the back end."""
    display_name: ClassVar[str]
    """Name of the solver as its authors spell it."""
    package: ClassVar[str]
    """Package to install; also the name of the module to import."""
    remedy: ClassVar[str]
    """Command that installs the package."""
    capabilities: ClassVar[Capabilities] = Capabilities()
    statuses: ClassVar[Mapping[Any, SolverStatus]] = MappingProxyType({})
    """`SolverStatus` of each status of the solver; unlisted statuses are errors."""
    managed_options: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Options of the solver that `poetmodel.solve` sets itself, each with the parameter of
    `poetmodel.solve` that determines it."""
    node_limit_option: ClassVar[str] = ""
    """Solver option that limits branch-and-bound nodes; empty if there is none."""
    gap_option: ClassVar[str] = ""
    """Solver option for the relative gap at which it stops; empty if there is none."""
    options_page: ClassVar[str] = ""
    """URL of the list of the solver's options."""

    def __init_subclass__(cls) -> None:
        """Wrap `run` and `versions` of a class in a user's file: errors become `BackendError`."""
        super().__init_subclass__()
        for name in ("run", "versions"):
            function = vars(cls).get(name)
            if function is not None and is_in_user_file(cls):
                context = f"backend {cls.__name__}: {name} raised"
                wrapper = convert_user_errors(
                    function, BackendError, context, passed=(PoetModelError,)
                )
                setattr(cls, name, wrapper)

    def check_options(self, options: Mapping[Any, Any]) -> None:
        """Check solver options by solving a trivial model with them; do nothing without options.

        Raises
        ------
        BackendUnavailableError
            If the package is missing or cannot be loaded, or its licence refuses a solve.
        InputError
            If `poetmodel.solve` sets an option itself (upper and lower case are equal), a name or
            value has a wrong type, or a value is not finite. Has a message for each such option.
        UnknownOptionError
            If the solver has no such option, or refuses its value.
        BackendError
            If the solver fails with these options.
        """
        errors = []
        parameter_of_option = {
            name.casefold(): parameter_name for name, parameter_name in self.managed_options.items()
        }
        for name, value in options.items():
            is_valid_value = isinstance(value, int | str) or (
                isinstance(value, float) and math.isfinite(value)
            )
            if not isinstance(name, str) or not is_valid_value:
                errors.append(
                    "solver_options: expected names with a finite number, a text, True or False, "
                    f"got {quote(name)}: {quote(value)}"
                )
            elif name.casefold() in parameter_of_option:
                parameter = parameter_of_option[name.casefold()]
                errors.append(f"solver_options: {name!r} is set by {parameter}; use that parameter")
        if errors:
            raise InputError(errors)
        if options:
            trivial_model = StandardForm.from_arrays(
                np.zeros((1, 1)), [0.0], upper=1.0, row_upper=1.0
            )
            self.solve(trivial_model, Limits(options=options))

    def is_available(self) -> bool:
        """Return whether the solver's package is installed; does not import it."""
        return importlib.util.find_spec(self.package) is not None

    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Return the versions of the solver and of its Python package, by `name` and `package`.

        Raises
        ------
        BackendUnavailableError
            If the package is missing or cannot be loaded.
        """

    @abstractmethod
    def run(self, call: SolverCall) -> RawSolution:
        """Solve a model that has columns and no trivial contradiction.

        Reports progress and log to `call`, and stops when `call.should_stop` is True.

        Returns
        -------
        RawSolution
            Status, and solution, bound, nodes and basis if the solver reports them.

        Raises
        ------
        BackendUnavailableError
            If the package is missing or cannot be loaded, or its licence refuses the model.
        UnknownOptionError
            If the solver lacks an option of the call, or refuses its value.
        BackendError
            If the solver fails in another way and returns no status.
        """

    def solve(
        self,
        form: StandardForm,
        limits: Limits,
        *,
        start: NDArray[np.float64] | None = None,
        basis: Basis | None = None,
        on_progress: OnProgress | None = None,
        stop: threading.Event | None = None,
    ) -> RawSolution:
        """Solve a model, check the result, and correct it or raise if it is inconsistent.

        The model may be solved again: without presolve if a feasible start disproves the status
        INFEASIBLE, and without objective if the solver does not distinguish infeasible models from
        unbounded ones.

        In the result, integers are rounded, and bounds are clipped at objective and cutoff.
        INFEASIBLE becomes OTHER_LIMIT if the start still disproves it. With a cutoff, CUTOFF
        replaces INFEASIBLE, and OPTIMAL with a solution beyond the cutoff. Unless the status is
        INFEASIBLE, UNBOUNDED or CUTOFF, a feasible start replaces a missing or worse solution.

        Parameters
        ----------
        form : StandardForm
            The model.
        limits : Limits
            Stopping criteria and settings.
        start : ndarray of float64, shape (n_columns,)
            Start value of each column; NaN for columns without one. May be infeasible.
        basis : Basis
            Basis of a similar model without integers that this solver has solved, with one entry
            per column and row of `form`. HiGHS starts from it without presolve; other solvers
            ignore it.
        on_progress : callable
            Called at a feasible start and at each new incumbent, and otherwise at most ten times a
            second. Returning False stops the solve. An exception stops it and is raised afterwards.
        stop : threading.Event
            Event that stops the solve when any thread sets it.

        Raises
        ------
        BackendUnavailableError
            If the package is missing or cannot be loaded, or its licence refuses the model.
        InputError
            If the start has a wrong shape or an infinite value.
        UnknownOptionError
            If the solver lacks one of `Limits.options`, or refuses its value.
        BackendError
            If the solver fails, reports OPTIMAL without a solution, or returns a solution of a
            wrong size, with values that are not finite, or with integers that are not whole. Rows
            and bounds are not checked.
        """
        call = SolverCall(form, limits, on_progress, stop)
        self.import_package()
        start_values, is_start_feasible = _round_and_check_start(start, form, limits)
        call.start, call.basis = start_values, basis
        feasible_start = start_values if is_start_feasible else None
        if feasible_start is not None:
            call.report_solution(form.objective_value(feasible_start), lambda: feasible_start)
        raw_solution = _solve_trivially(call) or self.run(call)
        if not isinstance(raw_solution, RawSolution):
            raise BackendError(
                f"backend {self.name!r}: run returned {quote(raw_solution)}, not a RawSolution"
            )
        if (
            _start_disproves_infeasibility(raw_solution, form, limits, feasible_start)
            and limits.presolve
        ):
            call.limits = replace(limits, presolve=False)
            call.discard_progress()
            raw_solution = replace(self.run(call), solved_again=True)
        call.raise_failure()
        if raw_solution.status is SolverStatus.FAILED and call.should_stop:
            raw_solution = replace(raw_solution, status=SolverStatus.INTERRUPTED)
        if raw_solution.status is SolverStatus.INFEASIBLE_OR_UNBOUNDED:
            raw_solution = replace(raw_solution, status=self._distinguish_infeasible(call))
        raw_solution = replace(raw_solution, root_bound=call.root_bound)
        raw_solution = _correct_result(raw_solution, form, limits, feasible_start)
        return replace(
            raw_solution,
            build_s=call.build_s,
            solve_s=max(0.0, call.elapsed_s - call.build_s),
            start_accepted=False
            if is_start_feasible and raw_solution.is_infeasible
            else is_start_feasible,
        )

    def import_package(self) -> Any:
        """Import the solver's package and return the module.

        Raises
        ------
        BackendUnavailableError
            If the import raises `ImportError`, as without the package. Other errors pass unchanged.
        KeyboardInterrupt
            If Ctrl-C during the import caused the `ImportError`.
        """
        try:
            return importlib.import_module(self.package)
        except ImportError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C during the import
                raise error.__cause__ from None
            raise BackendUnavailableError(
                f"backend {self.name!r}: the package {self.package} is missing or cannot be loaded "
                f"({error}); install it with: {self.remedy}"
            ) from error

    def translate_status(
        self, status: object, statuses: Mapping[Any, SolverStatus]
    ) -> SolverStatus:
        """Return the `SolverStatus` of a status that the solver returned.

        Raises
        ------
        BackendError
            If the status is missing in `statuses`.
        """
        try:
            return statuses[status]
        except KeyError:
            raise BackendError(
                f"backend {self.name!r}: returned the unknown status {status!r}"
            ) from None

    def _distinguish_infeasible(self, call: SolverCall) -> SolverStatus:
        """Return INFEASIBLE or UNBOUNDED for a model that is INFEASIBLE_OR_UNBOUNDED.

        It is infeasible if its bounds limit the objective; otherwise it is solved without
        objective, and the status that stops this solve, such as TIME_LIMIT, may be returned.
        """
        form, remaining_s = call.form, call.remaining_s
        if form.is_bounded():
            return SolverStatus.INFEASIBLE
        if call.should_stop:
            return SolverStatus.INTERRUPTED
        if remaining_s == 0.0:
            return SolverStatus.TIME_LIMIT
        form_without_objective = replace(form, objective=np.zeros(form.n_columns))
        limits = replace(
            call.limits, time_s=remaining_s, objective_stop=None, objective_cutoff=None
        )
        second_call = SolverCall(form_without_objective, limits, lambda _: not call.should_stop)
        status = self.run(second_call).status
        second_call.raise_failure()
        return SolverStatus.UNBOUNDED if status is SolverStatus.OPTIMAL else status


def _round_and_check_start(
    start: NDArray[np.float64] | None, form: StandardForm, limits: Limits
) -> tuple[NDArray[np.float64] | None, bool | None]:
    """Return a rounded copy of the start, if any, and its feasibility (None if partial)."""
    if start is None:
        return None, None
    values = np.array(start, dtype=np.float64)
    if values.shape != (form.n_columns,):
        raise InputError(
            f"start: expected {form.n_columns} values, one per column, got shape {values.shape}"
        )
    if np.isinf(values).any():
        raise InputError(
            "start: expected finite values, or NaN for columns without a value, got an infinite one"
        )
    nearest_integers = np.rint(values)
    is_near_integer = form.integer & (np.abs(values - nearest_integers) <= limits.tolerance)
    values = np.where(is_near_integer, nearest_integers, values)
    has_value = ~np.isnan(values)
    if not has_value.all():
        return (values, None) if has_value.any() else (None, None)
    return values, form.max_violation(values) <= limits.tolerance


def _solve_trivially(call: SolverCall) -> RawSolution | None:
    """Return the result if no solve is needed (contradiction, no columns, stop), else None."""
    form = call.form
    if form.describe_contradiction() is not None:
        return RawSolution(status=SolverStatus.INFEASIBLE, nodes=0 if form.is_mip else None)
    if form.n_columns == 0:
        return RawSolution(status=SolverStatus.OPTIMAL, x=np.zeros(0), bound=form.offset)
    if call.should_stop:
        return RawSolution(status=SolverStatus.INTERRUPTED)
    return None


def _correct_result(
    raw_solution: RawSolution, form: StandardForm, limits: Limits, start: NDArray[np.float64] | None
) -> RawSolution:
    """Return the solver's result with its objective, and with inconsistent values corrected.

    A feasible `start` replaces a missing or worse solution.
    """
    x = None if raw_solution.x is None else round_integers(raw_solution.x, form)
    status = _correct_status(raw_solution.status, x, form, limits.objective_cutoff)
    if _start_disproves_infeasibility(raw_solution, form, limits, start):
        status = SolverStatus.OTHER_LIMIT
    if status in _NO_SOLUTION_STATUSES:
        x = None
    elif start is not None and (
        x is None or _is_worse(form.objective_value(x), form.objective_value(start), form)
    ):
        x = round_integers(start, form)
    is_failed = status in (SolverStatus.FAILED, SolverStatus.INFEASIBLE_OR_UNBOUNDED)
    if is_failed or (status is SolverStatus.OPTIMAL and x is None):
        raise BackendError(f"the solver stopped without a result ({raw_solution.status})")
    objective = None if x is None else form.objective_value(x)
    bound = _correct_bound(raw_solution.bound, status, objective, form, limits.objective_cutoff)
    root_bound = raw_solution.root_bound if raw_solution.nodes is not None else None
    if raw_solution.nodes in (0, 1):
        root_bound = bound
    if root_bound is not None and bound is not None:
        root_bound = form.sense * min(form.sense * root_bound, form.sense * bound)
    return replace(
        raw_solution, status=status, x=x, objective=objective, bound=bound, root_bound=root_bound
    )


def _start_disproves_infeasibility(
    raw_solution: RawSolution, form: StandardForm, limits: Limits, start: NDArray[np.float64] | None
) -> bool:
    """Return whether a feasible start, without a cutoff, disproves the status INFEASIBLE."""
    if raw_solution.status is not SolverStatus.INFEASIBLE or limits.objective_cutoff is not None:
        return False
    return start is not None and form.max_violation(start) <= _TOLERANCE


def _correct_status(
    status: SolverStatus, x: NDArray[np.float64] | None, form: StandardForm, cutoff: float | None
) -> SolverStatus:
    """Return the status; CUTOFF replaces INFEASIBLE, and OPTIMAL with a solution beyond the cutoff.

    If the cutoff is better than the optimum, HiGHS returns OPTIMAL with any solution that it found.
    """
    if cutoff is None:
        return status
    is_beyond_cutoff = x is not None and _is_worse(form.objective_value(x), cutoff, form)
    if status is SolverStatus.INFEASIBLE or (status is SolverStatus.OPTIMAL and is_beyond_cutoff):
        return SolverStatus.CUTOFF
    return status


def _correct_bound(
    bound: float | None,
    status: SolverStatus,
    objective: float | None,
    form: StandardForm,
    cutoff: float | None,
) -> float | None:
    """Return the bound, clipped at objective and cutoff; None if INFEASIBLE or UNBOUNDED."""
    if status in (SolverStatus.INFEASIBLE, SolverStatus.UNBOUNDED):
        return None
    if status is SolverStatus.CUTOFF:
        return cutoff
    if bound is None:
        return None
    upper_limits = [form.sense * limit for limit in (objective, cutoff) if limit is not None]
    return form.sense * min([form.sense * bound, *upper_limits])


def _is_worse(objective: float, reference: float, form: StandardForm) -> bool:
    """Return whether `objective` is worse than `reference` by more than a rounding error."""
    return form.sense * (objective - reference) > _TOLERANCE * max(1.0, abs(reference))
