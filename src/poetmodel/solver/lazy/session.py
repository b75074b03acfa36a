"""The shared state of a lazy solve: parameters, bounds, the solver, the clock and statistics."""

from __future__ import annotations

import math
import threading
from dataclasses import InitVar, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.protocol import (
    BackendProgress,
    Basis,
    Limits,
    RawSolution,
    SolverStatus,
)
from poetmodel.backends.registry import backend
from poetmodel.clock import time_limit
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import PenalizedObjective
from poetmodel.model.events import recomputable_nodes
from poetmodel.result import Termination, relative_gap
from poetmodel.solver.lazy.relaxation import Relaxation
from poetmodel.solver.outcome import (
    SOLVER_ERROR,
    Candidate,
    is_gap_closed,
    make_candidate,
    safe_bound,
)
from poetmodel.solver.policy import CUT_FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from poetmodel.backends.solver import Solver
    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.policy import Policy
    from poetmodel.solver.request import Request

CUTOFF_MARGIN: Final = 2 * SOLVER_ERROR
"""Distance of a cutoff above a value: in units of the objective, plus the same fraction of the
value. If a solver finds no point below the cutoff, no point is below the value, in spite of the
solver's tolerances."""


@dataclass(slots=True)
class BoundTracker:
    """Proven bound, incumbent and gap of one solve. Thread-safe.

    All values are those of the minimized quantity minus its baseline, in the unit of the quantity.
    """

    problem: Problem
    tolerance: float
    """Gap at which the solve ends."""
    incumbent: Candidate | None = None
    """Best schedule that the verifier accepted; None without one."""
    ceiling: float = math.inf
    """Value from which schedules are useless. The solve ends when the bound reaches it."""
    lower_bound: float = 0.0
    """Best proven bound, from the start at least the objective's `known_bound`."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.lower_bound = max(self.lower_bound, self.problem.objective.known_bound)

    def raise_bound(self, bound: float) -> bool:
        """Raise the proven bound to `bound` if that is higher; return whether it was raised."""
        with self.lock:
            is_higher = bound > self.lower_bound
            self.lower_bound = max(bound, self.lower_bound)
        return is_higher

    def replace_bound(self, bound: float) -> None:
        """Set the proven bound to `bound`, also to a lower one if a solver's bound was wrong."""
        with self.lock:
            self.lower_bound = bound

    def replace_incumbent(self, candidate: Candidate) -> bool:
        """Replace the incumbent by `candidate`, a valid schedule, if its value is smaller.

        Without an incumbent, any candidate becomes the incumbent, even above `ceiling`. Return
        whether `candidate` became the incumbent.
        """
        with self.lock:
            is_better = self.incumbent is None or candidate.value < self.incumbent.value
            if is_better:
                self.incumbent = candidate
        return is_better

    def upper_value(self) -> float | None:
        """Return the smaller of the incumbent's value and `ceiling`; None without either."""
        incumbent = self.incumbent
        upper = self.ceiling if incumbent is None else min(incumbent.value, self.ceiling)
        return None if math.isinf(upper) else upper

    def gap(self) -> float:
        """Return the gap between `lower_bound` and `upper_value`; infinite without the latter."""
        upper = self.upper_value()
        return math.inf if upper is None else relative_gap(upper, self.lower_bound)

    def is_closed(self) -> bool:
        """Return whether the incumbent's gap is closed, or the bound reaches `ceiling`."""
        with self.lock:
            if self.lower_bound >= self.ceiling:
                return True
            if self.incumbent is None:
                return False
            value = self.incumbent.value
            return is_gap_closed(self.problem, value, self.lower_bound, self.tolerance)


@dataclass(slots=True)
class Session:
    """One lazy solve: problem, bounds, solver, clock and statistics. Thread-safe."""

    problem: Problem
    request: Request
    first_candidate: InitVar[Candidate | None] = None
    """A valid first schedule, the first incumbent."""
    ceiling: InitVar[float] = math.inf
    """Value from which schedules are useless."""
    bound: InitVar[float] = 0.0
    """Proven bound so far, without the baseline, in the unit of the minimized quantity."""
    give_up_s: float = math.inf
    """Time since the request at which a solve without any schedule ends [s]."""
    stop_reason: Termination | None = None
    """Termination of the session if it was stopped; None otherwise."""
    build_s: float = 0.0
    """Time to build and compile all relaxations [s]."""
    max_columns: int = 0
    """Maximum number of columns of a solved model, linear or integer."""
    max_rows: int = 0
    """Maximum number of rows of a solved model, cuts included."""
    n_nodes: int = 0
    """Number of branch-and-bound nodes of all integer models."""
    root_bound: float | None = None
    """Bound before the first integer model, without the baseline, in the unit of the minimized
    quantity; None before that model."""
    stop_event: threading.Event = field(default_factory=threading.Event)
    """Event that ends the running solver call, and then the session."""
    is_abandoned: bool = False
    """Whether the thread of the solve exceeded the limit; later results are not reported."""
    log: list[str] = field(default_factory=list)
    bounds: BoundTracker = field(init=False)
    solver: Solver = field(init=False)
    is_recomputable: tuple[bool, ...] = field(init=False)
    """Whether models have decisions to recompute a node, by node: `recomputable_nodes`."""
    penalized_objective: PenalizedObjective | None = field(init=False, default=None)
    """Penalized objective if user-defined constraints or the objective reward decisions; None
    otherwise."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Lock of `build_s`, `max_columns` and `max_rows`."""
    report_lock: threading.RLock = field(default_factory=threading.RLock)
    """Lock held during a report, so that reports are sequential and in order."""

    def __post_init__(
        self, first_candidate: Candidate | None, ceiling: float, bound: float
    ) -> None:
        """Start the bounds, make the solver, and find the nodes that models recompute.

        The incumbent is `first_candidate`; the proven bound is `bound`, or the objective's
        `known_bound` if that is higher. With rewards, also makes the penalized objective. Raises
        `InputError` for an unknown back end.
        """
        gap = self.request.gap
        self.bounds = BoundTracker(
            self.problem, gap, first_candidate, ceiling=ceiling, lower_bound=bound
        )
        self.solver = backend(self.request.backend)
        self.is_recomputable = recomputable_nodes(self.problem)
        if any(any(column) for column in self.problem.rewards):
            self.penalized_objective = PenalizedObjective(self.problem)

    @property
    def policy(self) -> Policy:
        """The parameters of the search."""
        return self.request.policy

    # -- bounds and schedules ------------------------------------------------------------------

    def is_done(self) -> bool:
        """Return whether the gap is closed, the session was stopped or its time is up.

        Sets `stop_reason`, unless it is set: to INTERRUPTED if `stop_event` is set (by Ctrl-C, an
        error of the primal worker, or because the solve's thread was abandoned), to TIME_LIMIT at
        the time limit, or at `give_up_s` without a schedule. A closed gap sets no `stop_reason`.
        """
        if self.stop_reason is None and self.stop_event.is_set():
            self.stop_reason = Termination.INTERRUPTED
        gives_up = self.bounds.incumbent is None and self.request.elapsed_s() > self.give_up_s
        if self.stop_reason is None and (gives_up or self.request.remaining_s() <= 0):
            self.stop_reason = Termination.TIME_LIMIT
        return self.stop_reason is not None or self.bounds.is_closed()

    def best_known(self) -> tuple[float, Candidate | None]:
        """Return the proven bound and the incumbent so far."""
        return self.bounds.lower_bound, self.bounds.incumbent

    def raise_bound(self, bound: float) -> None:
        """Raise the proven lower bound to `bound` and report it, if that is higher."""
        if self.bounds.raise_bound(bound):
            self.report()

    def offer_schedule(self, schedule: Schedule) -> bool:
        """Verify a schedule without its unneeded decisions; make it the incumbent if it is better.

        Rewarded decisions count as needed. Return whether the schedule is valid. Reports a new
        incumbent. Raises `TimeLimitError` if the time limit passes, and the errors of the progress
        callback.
        """
        problem, rewards = (
            self.problem,
            None if self.penalized_objective is None else self.problem.rewards,
        )
        needed_decisions = PartialSchedule.from_schedule(
            problem.graph, schedule, rewards, working_graph=problem.working_graph
        )
        candidate = make_candidate(problem, needed_decisions.schedule())
        if candidate.violations:
            return False
        if self.bounds.replace_incumbent(candidate):
            self.report()
        return True

    def abandon(self) -> None:
        """Stop the session and its reports, because the solve exceeded the time limit."""
        with self.report_lock:
            self.is_abandoned = True
        self.stop_reason = self.stop_reason or Termination.TIME_LIMIT

    def report(self) -> None:
        """Report the bound and the incumbent to the progress callback of the request.

        If the callback returns False, sets `stop_reason` to INTERRUPTED, unless it is set. Has no
        effect after `abandon`. Raises the errors of the callback.
        """
        with self.report_lock:
            if self.is_abandoned:
                return
            incumbent = self.bounds.incumbent
            value, schedule = (
                (None, None) if incumbent is None else (incumbent.value, incumbent.schedule)
            )
            if self.request.report(value, self.bounds.lower_bound, schedule) is False:
                self.stop_reason = self.stop_reason or Termination.INTERRUPTED

    # -- models and solver ---------------------------------------------------------------------

    def build_relaxation(
        self, grouping: Grouping, coarser_relaxation: Relaxation | None = None
    ) -> Relaxation:
        """Build the relaxation of a grouping with the separators of the enabled cut families.

        If `coarser_relaxation` is given, its cuts are restated for the new one. Adds the time to
        build and compile the model to `build_s`. Raises `TimeLimitError` if the time limit passes.
        """
        with time_limit(self.request.remaining_s()):
            relaxation = Relaxation.build(self.problem, grouping, self.is_recomputable)
            for family in CUT_FAMILIES:
                if family in self.policy.cuts:
                    module = import_module(f"poetmodel.solver.lazy.cuts.{family}")
                    separator = module.make_separator(relaxation, self.policy, self.is_done)
                    relaxation.separators[family] = separator
            if coarser_relaxation is not None:
                relaxation.restate_cuts(coarser_relaxation)
        with self.lock:
            self.build_s += relaxation.build_s
        return relaxation

    def cutoff_limits(self, relaxation: Relaxation) -> dict[str, float]:
        """Return the cutoff with which a solver searches only for better schedules.

        Better schedules have values below `BoundTracker.upper_value`. The result is the field
        ``objective_cutoff`` of `Limits`: `upper_value` divided by the relaxation's unit, raised by
        `CUTOFF_MARGIN`; {} if `upper_value` is None.
        """
        upper = self.bounds.upper_value()
        if upper is None:
            return {}
        value = upper / relaxation.unit
        return {"objective_cutoff": value + CUTOFF_MARGIN * (1.0 + abs(value))}

    def to_problem_bound(self, relaxation: Relaxation, bound: float) -> float:
        """Convert a bound of an integer solve to the unit of the problem, limited to `upper_value`.

        `safe_bound` reduces the bound first. The solve's cutoff is above `BoundTracker.upper_value`
        by `CUTOFF_MARGIN`. If no point is below the cutoff, the proof holds up to `upper_value`
        only. A bound more than twice the margin above `upper_value` is not limited, so that a
        contradiction to the incumbent is detected.
        """
        value = safe_bound(self.problem, bound) * relaxation.unit
        upper = self.bounds.upper_value()
        if upper is None or value > upper + 2 * CUTOFF_MARGIN * (relaxation.unit + abs(upper)):
            return value
        return min(value, upper)

    def start_point(self, relaxation: Relaxation) -> NDArray[Any] | None:
        """Return the incumbent as a point of a relaxation.

        Return None without an incumbent, or if the relaxation cannot represent it.
        """
        incumbent = self.bounds.incumbent
        return None if incumbent is None else relaxation.schedule_point(incumbent.schedule)

    def solve_form(
        self,
        form: StandardForm,
        *,
        max_s: float | None = None,
        extra_limits: Mapping[str, Any] | None = None,
        start: NDArray[Any] | None = None,
        basis: Basis | None = None,
        progress_callback: Callable[[BackendProgress], bool] | None = None,
    ) -> RawSolution | None:
        """Solve the form of a relaxation with one thread, within the remaining time and `max_s`.

        `extra_limits` are further fields of `Limits`. During the solve, reports the session's bound
        and incumbent. Before each report, calls `progress_callback`, which may raise the bound; if
        it returns False, this solver call ends, but not the session. If the back end solves again,
        the bound is first reset to that before this call. Updates `max_columns`, `max_rows`,
        `n_nodes`, `log` and, before the first integer model, `root_bound`. The caller raises the
        bound to that of the result. Returns None if no time remains or the session was stopped.
        May set `stop_reason`, as `is_done` does. Raises the errors of the solver and of the
        callbacks.
        """
        wall_s = self.request.remaining_wall_s()
        if wall_s <= 0 or self.request.remaining_s() <= 0 or self.stop_reason is not None:
            self.is_done()
            return None
        limits = Limits(
            time_s=wall_s if max_s is None else min(max_s, wall_s),
            rel_gap=self.request.gap / 2,
            seed=self.request.seed,
            presolve=self.request.presolve,
            log=self.log.append,
            options=self.request.solver_options,
            **(extra_limits or {}),
        )

        def on_progress(progress: BackendProgress) -> bool:
            if progress.is_restart:
                self.bounds.replace_bound(known_bound)
            if progress_callback is not None and not progress_callback(progress):
                return False
            self.report()
            return self.stop_reason is None

        with self.lock:
            self.max_columns = max(self.max_columns, form.n_columns)
            self.max_rows = max(self.max_rows, form.n_rows)
        known_bound = self.bounds.lower_bound
        if form.is_mip and self.root_bound is None:
            self.root_bound = known_bound
        raw = self.solver.solve(
            form, limits, start=start, basis=basis, on_progress=on_progress, stop=self.stop_event
        )
        self.n_nodes += raw.nodes or 0
        if raw.status == SolverStatus.INTERRUPTED:
            self.is_done()  # sets `stop_reason` after Ctrl-C
        return raw
