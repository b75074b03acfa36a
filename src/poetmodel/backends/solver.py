"""Common part of all back ends: the course of a solve around the solver itself."""

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
from poetmodel.backends.standard_form import StandardForm, round_binaries
from poetmodel.errors import BackendError, BackendUnavailableError, InputError, shown

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from numpy.typing import NDArray


_CERTAIN: Final = 1e-9
"""A start that breaks the model by no more than this disproves "infeasible"."""

_WITHOUT_SOLUTION: Final = frozenset(
    {SolverStatus.INFEASIBLE, SolverStatus.UNBOUNDED, SolverStatus.CUTOFF}
)


class Solver(ABC):
    """A back end: subclasses fill in `run`.

    Every solve makes a solver object of its own, so that calls do not influence each other.
    """

    name: ClassVar[str]
    """Name by which users choose it."""
    display_name: ClassVar[str]
    """Its name as its authors write it."""
    package: ClassVar[str]
    """Package to install, and module that has to be importable."""
    remedy: ClassVar[str]
    """Command that installs it."""
    capabilities: ClassVar[Capabilities] = Capabilities()
    statuses: ClassVar[Mapping[Any, SolverStatus]] = MappingProxyType({})
    """Meaning of each status of the solver: a closed table."""
    managed_options: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Options of the solver that `poetmodel.solve` sets itself, with the parameter that does."""
    node_limit_option: ClassVar[str] = ""
    """Option that limits branch-and-bound nodes; empty without one."""
    gap_option: ClassVar[str] = ""
    """Option that is the relative gap at which the solver stops; empty without one."""
    options_page: ClassVar[str] = ""
    """Page that lists the options of the solver."""

    def check_options(self, options: Mapping[Any, Any]) -> None:
        """Refuse options that the solver does not know, or that parameters of `solve` set.

        Raises
        ------
        BackendUnavailableError
            If the package is missing.
        InputError
            If an option is one that `poetmodel.solve` sets itself, or no name with a value.
        UnknownOptionError
            If the solver does not know an option, or refuses its value.
        """
        faults = []
        managed = {name.casefold(): by for name, by in self.managed_options.items()}
        for name, value in options.items():
            is_value = isinstance(value, int | str) or (
                isinstance(value, float) and math.isfinite(value)
            )
            if not isinstance(name, str) or not is_value:
                faults.append(
                    "solver_options: expected names with a finite number, a text, True or False, "
                    f"got {shown(name)}: {shown(value)}"
                )
            elif name.casefold() in managed:
                parameter = managed[name.casefold()]
                faults.append(f"solver_options: {name!r} is what {parameter} sets; use that")
        if faults:
            raise InputError(faults)
        if options:
            nothing = StandardForm.from_arrays(np.zeros((1, 1)), [0.0], upper=1.0, row_upper=1.0)
            self.solve(nothing, Limits(options=options))

    def available(self) -> bool:
        """Return whether its package is installed; imports nothing."""
        return importlib.util.find_spec(self.package) is not None

    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Return the versions of the solver and of its wrapper.

        Raises
        ------
        BackendUnavailableError
            If the package is missing.
        """

    @abstractmethod
    def run(self, call: SolverCall) -> RawSolution:
        """Solve a model that has columns and no trivial contradiction.

        Returns
        -------
        RawSolution
            What the solver says: status, and as far as known solution, bound and nodes.
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
        """Solve a model.

        Parameters
        ----------
        form : StandardForm
            The model.
        limits : Limits
            When to stop.
        start : ndarray of float64, shape (n_columns,)
            Values to begin from; NaN where none is given.
        basis : Basis
            Of a like model without integers, which this solver has solved: for each of this one's
            columns and rows. HiGHS begins from it, without presolve; the others do not look at it.
        on_progress : callable
            Called from the solver's thread at every better solution and otherwise a few times a
            second; returning False stops the solve, an exception stops it and is raised again.
        stop : threading.Event
            Stops the solve when set, by any thread.

        Raises
        ------
        BackendUnavailableError
            If the package is missing, or its licence refuses the model.
        UnknownOptionError
            If the solver does not know one of `Limits.options`, or refuses its value.
        BackendError
            If the solver fails, or returns what cannot be a solution.
        """
        call = SolverCall(form, limits, on_progress, stop)
        self.module()
        known, accepted = _examine(start, form, limits)
        call.start, call.basis = known, basis
        if accepted and known is not None:
            call.solution(form.value(known), lambda: known)
        raw = _settled(call) or self.run(call)
        if _is_disproved(raw, form, limits, known if accepted else None) and limits.presolve:
            call.limits = replace(limits, presolve=False)
            call.forget()
            raw = replace(self.run(call), solved_again=True)
        call.raise_failure()
        if raw.status is SolverStatus.FAILED and call.stopping:
            raw = replace(raw, status=SolverStatus.INTERRUPTED)
        if raw.status is SolverStatus.INFEASIBLE_OR_UNBOUNDED:
            raw = replace(raw, status=self._decide(call))
        raw = replace(raw, root_bound=call.root_bound)
        raw = _honest(raw, form, limits, known if accepted else None)
        return replace(
            raw,
            build_s=call.build_s,
            solve_s=max(0.0, call.elapsed_s - call.build_s),
            start_accepted=False if accepted and raw.infeasible else accepted,
        )

    def module(self) -> Any:
        """Import the solver's package.

        Raises
        ------
        BackendUnavailableError
            If it is not installed, or cannot be loaded.
        """
        try:
            return importlib.import_module(self.package)
        except ImportError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C while it was loaded
                raise error.__cause__ from None
            raise BackendUnavailableError(
                f"backend {self.name!r}: the package {self.package} is missing or cannot be loaded "
                f"({error}); install it with: {self.remedy}"
            ) from error

    def translate(self, status: object, table: Mapping[Any, SolverStatus]) -> SolverStatus:
        """Look a solver's own status up in its closed table.

        Raises
        ------
        BackendError
            If the table lacks it.
        """
        try:
            return table[status]
        except KeyError:
            raise BackendError(
                f"backend {self.name!r}: returned the unknown status {status!r}"
            ) from None

    def _decide(self, call: SolverCall) -> SolverStatus:
        """Tell infeasible from unbounded: by the bounds, else by solving for any solution."""
        form, remaining_s = call.form, call.remaining_s
        if form.is_bounded():
            return SolverStatus.INFEASIBLE
        if call.stopping:
            return SolverStatus.INTERRUPTED
        if remaining_s == 0.0:
            return SolverStatus.TIME_LIMIT
        anything = replace(form, objective=np.zeros(form.n_columns))
        limits = replace(
            call.limits, time_s=remaining_s, objective_stop=None, objective_cutoff=None
        )
        status = self.run(SolverCall(anything, limits, lambda _: not call.stopping)).status
        return SolverStatus.UNBOUNDED if status is SolverStatus.OPTIMAL else status


def _examine(
    start: NDArray[np.float64] | None, form: StandardForm, limits: Limits
) -> tuple[NDArray[np.float64] | None, bool | None]:
    """Return the start with its near-integers rounded, and whether it is a solution."""
    if start is None:
        return None, None
    values = np.array(start, dtype=np.float64)
    if values.shape != (form.n_columns,):
        raise InputError(
            f"start: expected {form.n_columns} values, one per column, got shape {values.shape}"
        )
    if np.isinf(values).any():
        raise InputError(
            "start: expected finite values, or NaN where none is given, got an infinite one"
        )
    whole = np.rint(values)
    near = form.integer & (np.abs(values - whole) <= limits.tolerance)
    values = np.where(near, whole, values)
    given = ~np.isnan(values)
    if not given.all():
        return (values, None) if given.any() else (None, None)
    return values, form.violation(values) <= limits.tolerance


def _settled(call: SolverCall) -> RawSolution | None:
    """Answer without a solver where there is nothing to solve, or no time to."""
    form = call.form
    if form.contradiction() is not None:
        return RawSolution(status=SolverStatus.INFEASIBLE, nodes=0 if form.is_mip else None)
    if form.n_columns == 0:
        return RawSolution(status=SolverStatus.OPTIMAL, x=np.zeros(0), bound=form.offset)
    if call.stopping:
        return RawSolution(status=SolverStatus.INTERRUPTED)
    return None


def _honest(
    raw: RawSolution, form: StandardForm, limits: Limits, start: NDArray[np.float64] | None
) -> RawSolution:
    """Make what a solver says keep the common promises; `start` is one that is a solution."""
    x = None if raw.x is None else round_binaries(raw.x, form)
    status = _heed_cutoff(raw.status, x, form, limits.objective_cutoff)
    if _is_disproved(raw, form, limits, start):
        status = SolverStatus.OTHER_LIMIT
    if status in _WITHOUT_SOLUTION:
        x = None
    elif start is not None and (x is None or _is_worse(form.value(x), form.value(start), form)):
        x = round_binaries(start, form)
    failed = status in (SolverStatus.FAILED, SolverStatus.INFEASIBLE_OR_UNBOUNDED)
    if failed or (status is SolverStatus.OPTIMAL and x is None):
        raise BackendError(f"the solver stopped without a result ({raw.status})")
    objective = None if x is None else form.value(x)
    bound = _honest_bound(raw.bound, status, objective, form, limits.objective_cutoff)
    root = raw.root_bound if raw.nodes is not None else None
    if raw.nodes in (0, 1):
        root = bound
    if root is not None and bound is not None:
        root = form.sense * min(form.sense * root, form.sense * bound)
    return replace(raw, status=status, x=x, objective=objective, bound=bound, root_bound=root)


def _is_disproved(
    raw: RawSolution, form: StandardForm, limits: Limits, start: NDArray[np.float64] | None
) -> bool:
    """Return whether a model that is called infeasible has the start as a solution.

    One that is off by the tolerance disproves nothing, nor does one beyond a cutoff.
    """
    if raw.status is not SolverStatus.INFEASIBLE or limits.objective_cutoff is not None:
        return False
    return start is not None and form.violation(start) <= _CERTAIN


def _heed_cutoff(
    status: SolverStatus, x: NDArray[np.float64] | None, form: StandardForm, cutoff: float | None
) -> SolverStatus:
    """Return `SolverStatus.CUTOFF` for what a cutoff makes of "infeasible" and of "optimal".

    With a cutoff below the optimum HiGHS returns as optimal, bound and all, whatever solution it
    has come across; the others call the model infeasible.
    """
    if cutoff is None:
        return status
    beyond = x is not None and _is_worse(form.value(x), cutoff, form)
    if status is SolverStatus.INFEASIBLE or (status is SolverStatus.OPTIMAL and beyond):
        return SolverStatus.CUTOFF
    return status


def _honest_bound(
    bound: float | None,
    status: SolverStatus,
    objective: float | None,
    form: StandardForm,
    cutoff: float | None,
) -> float | None:
    """Return the bound, never beyond the objective found nor, being unproven there, the cutoff."""
    if status in (SolverStatus.INFEASIBLE, SolverStatus.UNBOUNDED):
        return None
    if status is SolverStatus.CUTOFF:
        return cutoff
    if bound is None:
        return None
    caps = [form.sense * cap for cap in (objective, cutoff) if cap is not None]
    return form.sense * min([form.sense * bound, *caps])


def _is_worse(objective: float, reference: float, form: StandardForm) -> bool:
    """Tell whether one objective is worse than another by more than rounding."""
    return form.sense * (objective - reference) > _CERTAIN * max(1.0, abs(reference))
