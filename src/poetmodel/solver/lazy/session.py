"""Shared state of a lazy solve: parameters, bounds, the solver, the clock, the figures."""

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
    as_candidate,
    is_closed,
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

ALLOWANCE: Final = 2 * SOLVER_ERROR
"""How far a cutoff lies above a value, in units of the objective and relatively: that nothing is
below the cutoff then proves, whatever the solver's tolerances, that nothing is below the value."""


@dataclass(slots=True)
class BoundTracker:
    """Bound, incumbent and gap of one solve; several threads may use it at once.

    All values are of the minimized quantity beyond what every schedule pays, in its unit.
    """

    problem: Problem
    tolerance: float
    """Gap at which the solve is over."""
    incumbent: Candidate | None = None
    """Best schedule that the verifier accepts."""
    ceiling: float = math.inf
    """Schedules above this value are of no use: that none is below it ends the solve."""
    lower: float = 0.0
    """Best proven bound."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.lower = max(self.lower, self.problem.objective.known_bound)

    def raise_to(self, bound: float) -> bool:
        """Take note of a proven bound; return whether it is the best."""
        with self.lock:
            better = bound > self.lower
            self.lower = max(bound, self.lower)
        return better

    def replace_incumbent(self, candidate: Candidate) -> bool:
        """Take note of a valid schedule; return whether it is the best."""
        with self.lock:
            better = self.incumbent is None or candidate.value < self.incumbent.value
            if better:
                self.incumbent = candidate
        return better

    def upper(self) -> float | None:
        """Return the value that schedules should be below: that of the incumbent, or the ceiling.

        None where every schedule would do.
        """
        best = self.incumbent
        upper = self.ceiling if best is None else min(best.value, self.ceiling)
        return None if math.isinf(upper) else upper

    def gap(self) -> float:
        """Return the gap between `lower` and `upper`; infinite where there is no `upper`."""
        upper = self.upper()
        return math.inf if upper is None else relative_gap(upper, self.lower)

    def closed(self) -> bool:
        """Return whether the incumbent is within the tolerance, or nothing below the ceiling."""
        with self.lock:
            if self.lower >= self.ceiling:
                return True
            if self.incumbent is None:
                return False
            value = self.incumbent.value
            return is_closed(self.problem, value, self.lower, self.tolerance)


@dataclass(slots=True)
class Session:
    """One lazy solve; several threads may use it at once."""

    problem: Problem
    request: Request
    best: InitVar[Candidate | None] = None
    """A valid schedule to begin from."""
    ceiling: InitVar[float] = math.inf
    """Schedules above this value are of no use."""
    bound: InitVar[float] = 0.0
    """Proved bound so far, in the unit of the minimized quantity."""
    params: LazyParams = field(default_factory=LazyParams)
    give_up_s: float = math.inf
    """How long to go on without any schedule, since the solve was requested [s]."""
    stopped: Termination | None = None
    """Why to stop, once there is a reason."""
    build_s: float = 0.0
    columns: int = 0
    """Most columns of a model that was solved, linear or integer."""
    rows: int = 0
    """Most rows of one, cuts included."""
    nodes: int = 0
    """Branch-and-bound nodes of all integer models together."""
    root_bound: float | None = None
    """Bound proved before the first integer model, in the unit of the minimized quantity."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end every solve that runs."""
    is_late: bool = False
    """Whether its thread was left behind: what it still finds is not told."""
    log: list[str] = field(default_factory=list)
    bounds: BoundTracker = field(init=False)
    solver: Solver = field(init=False)
    recomputable: tuple[bool, ...] = field(init=False)
    own: PenalizedObjective | None = field(init=False, default=None)
    """Value that own constraints or the objective have for its own sake; None without such."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    telling: threading.RLock = field(default_factory=threading.RLock)
    """Held during a report to the watcher, so that it gets one at a time, and nothing stale."""

    def __post_init__(self, best: Candidate | None, ceiling: float, bound: float) -> None:
        gap = self.request.gap
        self.bounds = BoundTracker(self.problem, gap, best, ceiling=ceiling, lower=bound)
        self.solver = backend(self.request.backend)
        self.recomputable = recomputable_nodes(self.problem)
        if any(any(column) for column in self.problem.rewards):
            self.own = PenalizedObjective(self.problem)

    # -- what is known -------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether there is nothing left to do, or no time for it."""
        if self.stopped is None and self.stop.is_set():
            self.stopped = Termination.INTERRUPTED
        late = self.bounds.incumbent is None and self.request.elapsed_s() > self.give_up_s
        if self.stopped is None and (late or self.request.remaining_s() <= 0):
            self.stopped = Termination.TIME_LIMIT
        return self.stopped is not None or self.bounds.closed()

    def known(self) -> tuple[float, Candidate | None]:
        """Return the best bound and schedule so far."""
        return self.bounds.lower, self.bounds.incumbent

    def raise_bound(self, bound: float) -> None:
        """Take note of a proven lower bound."""
        if self.bounds.raise_to(bound):
            self.tell()

    def offer(self, schedule: Schedule) -> bool:
        """Give a schedule to the verifier and keep it if it is the best; return whether valid."""
        problem, wanted = self.problem, None if self.own is None else self.problem.rewards
        needed = PartialSchedule.of(problem.graph, schedule, wanted, working=problem.working_graph)
        tidy = as_candidate(problem, needed.schedule())
        if tidy.violations:
            return False
        if self.bounds.replace_incumbent(tidy):
            self.tell()
        return True

    def leave_behind(self) -> None:
        """End without waiting for the solver, which has not stopped in time."""
        with self.telling:
            self.is_late = True
        self.stopped = self.stopped or Termination.TIME_LIMIT

    def tell(self) -> None:
        """Report where the solve stands to whoever watches; stop if told to."""
        with self.telling:
            if self.is_late:
                return
            best = self.bounds.incumbent
            value, schedule = (None, None) if best is None else (best.value, best.schedule)
            if self.request.report(value, self.bounds.lower, schedule) is False:
                self.stopped = self.stopped or Termination.INTERRUPTED

    # -- models and solver ---------------------------------------------------------------------

    def build(self, grouping: Grouping, coarser: Relaxation | None = None) -> Relaxation:
        """State the relaxation of a grouping, with the cuts of a coarser one.

        Raises `TimeLimitError` once the time is over: one that nobody solves is of no use.
        """
        with time_limit(self.request.remaining_s()):
            relaxation = Relaxation.build(self.problem, grouping, self.recomputable)
            for family in CUT_FAMILIES:
                if family in self.params.cuts:
                    module = import_module(f"poetmodel.solver.lazy.cuts.{family}")
                    separator = module.separator(relaxation, self.params, self.done)
                    relaxation.separators[family] = separator
            if coarser is not None:
                relaxation.take_over(coarser)
        with self.lock:
            self.build_s += relaxation.build_s
        return relaxation

    def cutoff(self, relaxation: Relaxation) -> dict[str, float]:
        """Return the limit by which a solve looks only for schedules that are better."""
        upper = self.bounds.upper()
        if upper is None:
            return {}
        value = upper / relaxation.unit
        return {"objective_cutoff": value + ALLOWANCE * (1.0 + abs(value))}

    def within_cutoff(self, relaxation: Relaxation, bound: float) -> float:
        """Return the bound of an integer solve in the unit of the minimized quantity.

        The solve's cutoff is a little above `upper`; that nothing is below it is proved up to
        `upper`. A bound beyond the cutoff is left as it is: it contradicts a schedule.
        """
        value = safe_bound(self.problem, bound) * relaxation.unit
        upper = self.bounds.upper()
        if upper is None or value > upper + 2 * ALLOWANCE * (relaxation.unit + abs(upper)):
            return value
        return min(value, upper)

    def start_point(self, relaxation: Relaxation) -> NDArray[Any] | None:
        """Return the incumbent as a point of a relaxation, if there is one and it has room."""
        best = self.bounds.incumbent
        return None if best is None else relaxation.start(best.schedule)

    def relax(
        self,
        form: StandardForm,
        *,
        most_s: float | None = None,
        targets: Mapping[str, Any] | None = None,
        start: NDArray[Any] | None = None,
        basis: Basis | None = None,
        watch: Callable[[BackendProgress], bool] | None = None,
    ) -> RawSolution | None:
        """Solve a relaxation within the time left, or `most_s` of it; None if there is none.

        `targets` are further `Limits`. `watch` gets the progress; False ends this solve only.
        """
        remaining = self.request.remaining_s()
        if remaining <= 0 or self.stopped is not None:
            self.done()
            return None
        wall_s = self.request.remaining_wall_s()
        limits = Limits(
            time_s=wall_s if most_s is None else min(most_s, wall_s),
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
            self.tell()
            return self.stopped is None

        with self.lock:
            self.columns = max(self.columns, form.n_columns)
            self.rows = max(self.rows, form.n_rows)
        known = self.bounds.lower
        if form.is_mip and self.root_bound is None:
            self.root_bound = known
        raw = self.solver.solve(
            form, limits, start=start, basis=basis, on_progress=on_progress, stop=self.stop
        )
        self.nodes += raw.nodes or 0
        if raw.solved_again:
            self.bounds.lower = known  # what the first run told on its way may be wrong
        if raw.status == SolverStatus.INTERRUPTED:
            self.done()  # takes note of the signal, if that is what it was
        return raw
