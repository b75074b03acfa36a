"""What all back ends share: the course of a solve around the solver itself."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from poetmodel.backends.protocol import RawSolution, Termination
from poetmodel.backends.standard_form import round_binaries
from poetmodel.backends.watch import Watch
from poetmodel.errors import BackendError, BackendUnavailableError, InputError

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from poetmodel.backends.protocol import Feature, Limits, OnProgress
    from poetmodel.backends.standard_form import StandardForm

_CERTAIN: Final = 1e-9
"""A start that breaks the model by no more than this disproves "infeasible"."""


class Status(StrEnum):
    """What a solver's own status means; every back end has a closed table to it."""

    OPTIMAL = "optimal"
    """Gap at most the tolerance."""
    INFEASIBLE = "infeasible"
    """No solution, or none within the cutoff if one was set."""
    INFEASIBLE_OR_UNBOUNDED = "infeasible_or_unbounded"
    """The solver left open which."""
    UNBOUNDED = "unbounded"
    """Solutions without a best one."""
    CUTOFF = "cutoff"
    """No solution within the cutoff."""
    OBJECTIVE_STOP = "objective_stop"
    """Good enough by `Limits.objective_stop`."""
    TIME_LIMIT = "time_limit"
    """Out of time."""
    INTERRUPTED = "interrupted"
    """Told to stop."""
    OTHER_LIMIT = "other_limit"
    """Another limit, or numerical trouble with something in hand."""
    FAILED = "failed"
    """Not a result."""


_TERMINATION: Final[Mapping[Status, Termination]] = {
    Status.OPTIMAL: Termination.PROVED,
    Status.INFEASIBLE: Termination.PROVED,
    Status.UNBOUNDED: Termination.UNBOUNDED,
    Status.CUTOFF: Termination.CUTOFF,
    Status.OBJECTIVE_STOP: Termination.OBJECTIVE_STOP,
    Status.TIME_LIMIT: Termination.TIME_LIMIT,
    Status.INTERRUPTED: Termination.INTERRUPTED,
    Status.OTHER_LIMIT: Termination.OTHER_LIMIT,
}

_WITHOUT_SOLUTION: Final = frozenset({Status.INFEASIBLE, Status.UNBOUNDED, Status.CUTOFF})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a solver said, in its own numbers."""

    status: Status
    """Why it stopped."""
    x: NDArray[np.float64] | None = None
    """Its best solution."""
    bound: float | None = None
    """Its bound, in the model's sense."""
    nodes: int | None = None
    """Its branch-and-bound nodes."""
    build_s: float = 0.0
    """Time until the solver was ready to start [s]."""
    solved_again: bool = False
    """Whether this is a second run, after one that went wrong."""


class Solver(ABC):
    """A back end, less the solver: subclasses fill in `run`.

    Every solve makes a solver object of its own, so that calls do not influence each other.
    """

    name: ClassVar[str]
    """Name by which users choose it."""
    features: ClassVar[frozenset[Feature]]
    """What it does beyond the common ground."""
    package: ClassVar[str]
    """Module that has to be importable."""
    remedy: ClassVar[str]
    """What to type to install it."""

    def available(self) -> bool:
        """Return whether its package is installed; imports nothing."""
        return importlib.util.find_spec(self.package) is not None

    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Return the versions of the solver and of its wrapper."""

    @abstractmethod
    def run(
        self,
        form: StandardForm,
        limits: Limits,
        watch: Watch,
        start: NDArray[np.float64] | None,
    ) -> Outcome:
        """Solve a model that has columns and no trivial contradiction."""

    def solve(
        self,
        form: StandardForm,
        limits: Limits,
        *,
        start: NDArray[np.float64] | None = None,
        on_progress: OnProgress | None = None,
        stop: threading.Event | None = None,
    ) -> RawSolution:
        """Solve a model; see `Backend.solve`."""
        watch = Watch(form, limits, on_progress, stop)
        self.module()
        start, accepted = _examine(start, form, limits)
        if accepted and start is not None:
            known = start
            watch.solution(form.value(known), lambda: known)
        outcome = _settled(form, watch) or self._ask(form, limits, watch, start)
        watch.raise_failure()
        if outcome.status is Status.INFEASIBLE_OR_UNBOUNDED:
            outcome = self._decide(outcome, form, limits, watch)
        return _raw(outcome, form, limits, watch, start, accepted=accepted)

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
            msg = (
                f"backend {self.name!r}: the package {self.package} is missing or cannot be loaded "
                f"({error}); install it with: {self.remedy}"
            )
            raise BackendUnavailableError(msg) from error

    def translate(self, status: object, table: Mapping[Any, Status]) -> Status:
        """Look a solver's status up in its closed table.

        Raises
        ------
        BackendError
            If the table lacks it.
        """
        try:
            return table[status]
        except KeyError:
            msg = f"backend {self.name!r}: returned the unknown status {status!r}"
            raise BackendError(msg) from None

    def _ask(
        self,
        form: StandardForm,
        limits: Limits,
        watch: Watch,
        start: NDArray[np.float64] | None,
    ) -> Outcome:
        outcome = self.run(form, limits, watch, start)
        if outcome.status is Status.FAILED and watch.stopping:
            return replace(outcome, status=Status.INTERRUPTED)
        return outcome

    def _decide(
        self, outcome: Outcome, form: StandardForm, limits: Limits, watch: Watch
    ) -> Outcome:
        """Tell infeasible from unbounded: by the bounds, else by solving for any solution."""
        if form.is_bounded():
            return replace(outcome, status=Status.INFEASIBLE)
        remaining_s = watch.remaining_s
        if watch.stopping:
            return replace(outcome, status=Status.INTERRUPTED)
        if remaining_s == 0.0:
            return replace(outcome, status=Status.TIME_LIMIT)
        anything = replace(form, objective=np.zeros(form.n_columns))
        plain = replace(limits, time_s=remaining_s, objective_stop=None, objective_cutoff=None)
        inner = Watch(anything, plain, lambda _: not watch.stopping, None)
        found = self.run(anything, plain, inner, None)
        if found.status is Status.OPTIMAL:
            return replace(outcome, status=Status.UNBOUNDED)
        return replace(outcome, status=found.status)


def _examine(
    start: NDArray[np.float64] | None, form: StandardForm, limits: Limits
) -> tuple[NDArray[np.float64] | None, bool | None]:
    """Return the start with its near-integers rounded, and whether it is a solution."""
    if start is None:
        return None, None
    values = np.array(start, dtype=np.float64)
    if values.shape != (form.n_columns,):
        msg = f"start: expected {form.n_columns} values, one per column, got shape {values.shape}"
        raise InputError(msg)
    if np.isinf(values).any():
        msg = "start: expected finite values, or NaN where none is given, got an infinite one"
        raise InputError(msg)
    whole = np.rint(values)
    near = form.integer & (np.abs(values - whole) <= limits.tolerance)
    values = np.where(near, whole, values)
    given = ~np.isnan(values)
    if not given.all():
        return (values, None) if given.any() else (None, None)
    return values, form.violation(values) <= limits.tolerance


def _settled(form: StandardForm, watch: Watch) -> Outcome | None:
    """Answer without a solver where there is nothing to solve, or no time to."""
    if form.contradiction() is not None:
        return Outcome(status=Status.INFEASIBLE, nodes=0 if form.is_mip else None)
    if form.n_columns == 0:
        return Outcome(status=Status.OPTIMAL, x=np.zeros(0), bound=form.offset)
    if watch.stopping:
        return Outcome(status=Status.INTERRUPTED)
    return None


def _raw(
    outcome: Outcome,
    form: StandardForm,
    limits: Limits,
    watch: Watch,
    start: NDArray[np.float64] | None,
    *,
    accepted: bool | None,
) -> RawSolution:
    """Put an outcome into the common form and make it keep the common promises."""
    x = None if outcome.x is None else round_binaries(outcome.x, form)
    status = _heed_cutoff(outcome.status, x, form, limits.objective_cutoff)
    if status is Status.INFEASIBLE and accepted and start is not None:
        _refuse_contradiction(form, start)
        accepted = False
    if status in _WITHOUT_SOLUTION:
        x = None
    elif accepted and start is not None:
        x = _better(x, start, form)
    if status not in _TERMINATION or (status is Status.OPTIMAL and x is None):
        msg = f"the solver stopped without a result ({outcome.status})"
        raise BackendError(msg)
    objective = None if x is None else form.value(x)
    return RawSolution(
        termination=_TERMINATION[status],
        infeasible=status is Status.INFEASIBLE,
        x=x,
        objective=objective,
        bound=_honest_bound(outcome.bound, status, objective, form, limits.objective_cutoff),
        violation=None if x is None else form.violation(x),
        nodes=outcome.nodes,
        build_s=outcome.build_s,
        solve_s=max(0.0, watch.elapsed_s - outcome.build_s),
        start_accepted=accepted,
        log=watch.log,
        solved_again=outcome.solved_again,
    )


def _heed_cutoff(
    status: Status, x: NDArray[np.float64] | None, form: StandardForm, cutoff: float | None
) -> Status:
    """Return `Status.CUTOFF` for what a cutoff makes of "infeasible" and of "optimal".

    With a cutoff below the optimum HiGHS returns as optimal, bound and all, whatever solution it
    has come across; the others call the model infeasible.
    """
    if cutoff is None:
        return status
    beyond = x is not None and _is_worse(form.value(x), cutoff, form)
    if status is Status.INFEASIBLE or (status is Status.OPTIMAL and beyond):
        return Status.CUTOFF
    return status


def _refuse_contradiction(form: StandardForm, start: NDArray[np.float64]) -> None:
    """Raise if a start disproves infeasibility; one that is off by the tolerance does not."""
    if form.violation(start) <= _CERTAIN:
        msg = "the solver calls the model infeasible, yet the start that it was given satisfies it"
        raise BackendError(msg)


def _better(
    x: NDArray[np.float64] | None, start: NDArray[np.float64], form: StandardForm
) -> NDArray[np.float64]:
    """Return the start if the solver, out of time perhaps, has nothing as good."""
    if x is not None and not _is_worse(form.value(x), form.value(start), form):
        return x
    return round_binaries(start, form)


def _honest_bound(
    bound: float | None,
    status: Status,
    objective: float | None,
    form: StandardForm,
    cutoff: float | None,
) -> float | None:
    """Return the bound, never beyond the objective found nor, being unproven there, the cutoff."""
    if status in (Status.INFEASIBLE, Status.UNBOUNDED):
        return None
    if status is Status.CUTOFF:
        return cutoff
    if bound is None:
        return None
    caps = [form.sense * cap for cap in (objective, cutoff) if cap is not None]
    return form.sense * min([form.sense * bound, *caps])


def _is_worse(objective: float, reference: float, form: StandardForm) -> bool:
    """Tell whether one objective is worse than another by more than rounding."""
    return form.sense * (objective - reference) > _CERTAIN * max(1.0, abs(reference))
