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
from poetmodel.solver.lazy.params import CUT_FAMILIES, LazyParams
from poetmodel.solver.lazy.relaxation import Relaxation
from poetmodel.solver.outcome import (
    SOLVER_ERROR,
    Candidate,
    is_gap_closed,
    make_candidate,
    safe_bound,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from poetmodel.backends.solver import Solver
    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import Request

CUTOFF_MARGIN: Final = 2 * SOLVER_ERROR
"""Distance of a cutoff above a value, in units of the objective and relative. If no point is below
the cutoff, then, whatever the solver's tolerances, no point is below the value."""


@dataclass(slots=True)
class BoundTracker:
    """Proven bound, incumbent and gap of one solve. It is thread-safe.

    Values are of the minimized quantity minus its baseline, in its unit.
    """

    problem: Problem
    tolerance: float
    """Gap at which the solve ends."""
    incumbent: Candidate | None = None
    """Best schedule that the verifier accepted."""
    ceiling: float = math.inf
    """Value above which schedules are useless. The solve ends if no schedule is below it."""
    lower: float = 0.0
    """Best proven bound."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.lower = max(self.lower, self.problem.objective.known_bound)

    def raise_to(self, bound: float) -> bool:
        """Raise the proven bound to `bound` if that is higher; return whether it was raised."""
        with self.lock:
            is_best = bound > self.lower
            self.lower = max(bound, self.lower)
        return is_best

    def replace_incumbent(self, candidate: Candidate) -> bool:
        """Replace the incumbent by a valid schedule if that is better.

        Return whether it was replaced.
        """
        with self.lock:
            is_best = self.incumbent is None or candidate.value < self.incumbent.value
            if is_best:
                self.incumbent = candidate
        return is_best

    def upper(self) -> float | None:
        """Return the smaller of the incumbent's value and the ceiling; None if both are missing."""
        best = self.incumbent
        upper = self.ceiling if best is None else min(best.value, self.ceiling)
        return None if math.isinf(upper) else upper

    def gap(self) -> float:
        """Return the gap between `lower` and `upper`; infinite if there is no `upper`."""
        upper = self.upper()
        return math.inf if upper is None else relative_gap(upper, self.lower)

    def closed(self) -> bool:
        """Return whether the incumbent is within the gap tolerance, or the bound at the ceiling."""
        with self.lock:
            if self.lower >= self.ceiling:
                return True
            if self.incumbent is None:
                return False
            value = self.incumbent.value
            return is_gap_closed(self.problem, value, self.lower, self.tolerance)


@dataclass(slots=True)
class Session:
    """One lazy solve: problem, bounds, solver, clock and statistics. It is thread-safe."""

    problem: Problem
    request: Request
    best: InitVar[Candidate | None] = None
    """A valid first schedule."""
    ceiling: InitVar[float] = math.inf
    """Value above which schedules are useless."""
    bound: InitVar[float] = 0.0
    """Proven bound so far, in the unit of the minimized quantity."""
    params: LazyParams = field(default_factory=LazyParams)
    give_up_s: float = math.inf
    """Time since the request at which a solve without any schedule ends [s]."""
    stopped: Termination | None = None
    """Why the solve stops; None while it continues."""
    build_s: float = 0.0
    columns: int = 0
    """Maximum number of columns of a solved model, linear or integer."""
    rows: int = 0
    """Maximum number of rows of a solved model, cuts included."""
    nodes: int = 0
    """Number of branch-and-bound nodes of all integer models."""
    root_bound: float | None = None
    """Bound before the first integer model, in the unit of the minimized quantity."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end every running solve."""
    is_abandoned: bool = False
    """Whether the solve's thread exceeded the limit; later results are not reported."""
    log: list[str] = field(default_factory=list)
    bounds: BoundTracker = field(init=False)
    solver: Solver = field(init=False)
    recomputable: tuple[bool, ...] = field(init=False)
    own: PenalizedObjective | None = field(init=False, default=None)
    """Penalized objective if user-defined constraints or the objective reward decisions; None
    otherwise."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    report_lock: threading.RLock = field(default_factory=threading.RLock)
    """Lock held during a report, so that reports are sequential and in order."""

    def __post_init__(self, best: Candidate | None, ceiling: float, bound: float) -> None:
        gap = self.request.gap
        self.bounds = BoundTracker(self.problem, gap, best, ceiling=ceiling, lower=bound)
        self.solver = backend(self.request.backend)
        self.recomputable = recomputable_nodes(self.problem)
        if any(any(column) for column in self.problem.rewards):
            self.own = PenalizedObjective(self.problem)

    # -- bounds and schedules ------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether the gap is closed, the solve was stopped or its time is up.

        Sets `stopped` after Ctrl-C, at the time limit, or at `give_up_s` without a schedule.
        """
        if self.stopped is None and self.stop.is_set():
            self.stopped = Termination.INTERRUPTED
        without_schedule = (
            self.bounds.incumbent is None and self.request.elapsed_s() > self.give_up_s
        )
        if self.stopped is None and (without_schedule or self.request.remaining_s() <= 0):
            self.stopped = Termination.TIME_LIMIT
        return self.stopped is not None or self.bounds.closed()

    def known(self) -> tuple[float, Candidate | None]:
        """Return the best bound and schedule so far."""
        return self.bounds.lower, self.bounds.incumbent

    def raise_bound(self, bound: float) -> None:
        """Raise the proven lower bound, and report it if it is the best."""
        if self.bounds.raise_to(bound):
            self.report()

    def offer(self, schedule: Schedule) -> bool:
        """Verify a schedule, and make it the incumbent if it is the best.

        Return whether it is valid.

        Unneeded decisions are removed first. A new incumbent is reported.
        """
        problem, rewards = self.problem, None if self.own is None else self.problem.rewards
        needed_decisions = PartialSchedule.of(
            problem.graph, schedule, rewards, working=problem.working_graph
        )
        cleaned = make_candidate(problem, needed_decisions.schedule())
        if cleaned.violations:
            return False
        if self.bounds.replace_incumbent(cleaned):
            self.report()
        return True

    def abandon(self) -> None:
        """Stop the solve and its reports, because the solver exceeded the time limit."""
        with self.report_lock:
            self.is_abandoned = True
        self.stopped = self.stopped or Termination.TIME_LIMIT

    def report(self) -> None:
        """Report the bound and the incumbent to the progress callback.

        Stop the solve if it returns False.
        """
        with self.report_lock:
            if self.is_abandoned:
                return
            best = self.bounds.incumbent
            value, schedule = (None, None) if best is None else (best.value, best.schedule)
            if self.request.report(value, self.bounds.lower, schedule) is False:
                self.stopped = self.stopped or Termination.INTERRUPTED

    # -- models and solver ---------------------------------------------------------------------

    def build(self, grouping: Grouping, coarser: Relaxation | None = None) -> Relaxation:
        """Build the relaxation of a grouping with separators, and the cuts of a coarser one.

        Raises `TimeLimitError` if the time limit passes.
        """
        with time_limit(self.request.remaining_s()):
            relaxation = Relaxation.build(self.problem, grouping, self.recomputable)
            for family in CUT_FAMILIES:
                if family in self.params.cuts:
                    module = import_module(f"poetmodel.solver.lazy.cuts.{family}")
                    separator = module.separator(relaxation, self.params, self.done)
                    relaxation.separators[family] = separator
            if coarser is not None:
                relaxation.restate_cuts(coarser)
        with self.lock:
            self.build_s += relaxation.build_s
        return relaxation

    def cutoff(self, relaxation: Relaxation) -> dict[str, float]:
        """Return `Limits` with which a solve searches only for schedules better than `upper`."""
        upper = self.bounds.upper()
        if upper is None:
            return {}
        value = upper / relaxation.unit
        return {"objective_cutoff": value + CUTOFF_MARGIN * (1.0 + abs(value))}

    def within_cutoff(self, relaxation: Relaxation, bound: float) -> float:
        """Convert a bound of an integer solve to the unit of the problem, limited to `upper`.

        The solve's cutoff is slightly above `upper`. If no point is below the cutoff, the proof
        holds up to `upper` only. A bound clearly above the cutoff is returned unchanged: it
        contradicts a schedule.
        """
        value = safe_bound(self.problem, bound) * relaxation.unit
        upper = self.bounds.upper()
        if upper is None or value > upper + 2 * CUTOFF_MARGIN * (relaxation.unit + abs(upper)):
            return value
        return min(value, upper)

    def start_point(self, relaxation: Relaxation) -> NDArray[Any] | None:
        """Return the incumbent as a point of a relaxation.

        Return None without an incumbent, or if the relaxation cannot represent it.
        """
        best = self.bounds.incumbent
        return None if best is None else relaxation.start(best.schedule)

    def relax(
        self,
        form: StandardForm,
        *,
        max_s: float | None = None,
        targets: Mapping[str, Any] | None = None,
        start: NDArray[Any] | None = None,
        basis: Basis | None = None,
        watch: Callable[[BackendProgress], bool] | None = None,
    ) -> RawSolution | None:
        """Solve a relaxation within the remaining time and `max_s`; None if no time remains.

        `targets` are further `Limits`. `watch` is called with the progress; False ends this solve
        only. Updates the statistics, and reports bound and incumbent.
        """
        remaining = self.request.remaining_s()
        if remaining <= 0 or self.stopped is not None:
            self.done()
            return None
        wall_s = self.request.remaining_wall_s()
        limits = Limits(
            time_s=wall_s if max_s is None else min(max_s, wall_s),
            rel_gap=self.request.gap / 2,
            seed=self.request.seed,
            presolve=self.request.presolve,
            log=self.log.append,
            options=self.request.solver_options,
            **(targets or {}),
        )

        def on_progress(progress: BackendProgress) -> bool:
            if watch is not None and not watch(progress):
                return False
            self.report()
            return self.stopped is None

        with self.lock:
            self.columns = max(self.columns, form.n_columns)
            self.rows = max(self.rows, form.n_rows)
        known_bound = self.bounds.lower
        if form.is_mip and self.root_bound is None:
            self.root_bound = known_bound
        raw = self.solver.solve(
            form, limits, start=start, basis=basis, on_progress=on_progress, stop=self.stop
        )
        self.nodes += raw.nodes or 0
        if raw.solved_again:
            self.bounds.lower = known_bound  # bounds that the first execution reported may be wrong
        if raw.status == SolverStatus.INTERRUPTED:
            self.done()  # sets `stopped` if Ctrl-C was the reason
        return raw
