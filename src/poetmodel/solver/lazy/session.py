"""What all parts of a lazy solve share: bounds, the best schedule, the solver, the clock."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from poetmodel.backends.protocol import Limits, SolverStatus
from poetmodel.backends.registry import backend
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.events import recomputable_nodes
from poetmodel.result import Termination, relative_gap
from poetmodel.solver.lazy.cuts.interval import restate
from poetmodel.solver.lazy.cuts.recompute_memory import Rooms
from poetmodel.solver.lazy.relaxation import Relaxation, RoomOrigin
from poetmodel.solver.outcome import (
    SOLVER_ERROR,
    Candidate,
    is_tight,
    safe_bound,
    verify_schedule,
)
from poetmodel.solver.request import SolveProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from poetmodel.backends.protocol import BackendProgress, OptionValue, RawSolution
    from poetmodel.backends.solver import Solver
    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.lazy.relaxation import Cut
    from poetmodel.solver.request import Request

FAR: Final = 0.01
"""Gap above which a solve is not near its end: it searches for schedules and counts decisions."""
WIDE: Final = 0.03
"""Gap above which it is far from it: relaxations take long, and are kept small."""
ALLOWANCE: Final = 2 * SOLVER_ERROR
"""How far a cutoff lies above a value, in units of the objective and relatively: that nothing is
below the cutoff then proves, whatever the solver's tolerances, that nothing is below the value."""


@dataclass(slots=True)
class Session:
    """One lazy solve; several threads may use it at once."""

    problem: Problem
    request: Request
    best: Candidate | None
    """Best schedule that the verifier accepts."""
    ceiling: float = math.inf
    """Schedules above this value are of no use: that none is below it ends the solve."""
    patience_s: float = math.inf
    """How long to go on without any schedule, since the solve was requested [s]."""
    bound: float = 0.0
    """Best lower bound, in the unit of the minimized quantity."""
    restoring: bool = False
    """Whether relaxations let tensors come back to groups that they enter, and have room cuts."""
    stopped: Termination | None = None
    """Why to stop, once there is a reason."""
    build_s: float = 0.0
    solve_s: float = 0.0
    columns: int = 0
    """Most columns of a model that was solved, linear or integer."""
    rows: int = 0
    """Most rows of one, cuts included."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end every solve that runs."""
    log: list[str] = field(default_factory=list)
    solver: Solver = field(init=False)
    recomputable: tuple[bool, ...] = field(init=False)
    lock: threading.RLock = field(default_factory=threading.RLock)
    telling: threading.RLock = field(default_factory=threading.RLock)
    """Held while the watcher is told, so that it hears one thing at a time, and nothing stale."""

    def __post_init__(self) -> None:
        self.solver = backend(self.request.backend)
        self.recomputable = recomputable_nodes(self.problem)
        self.bound = max(self.bound, self.problem.objective.least)

    # -- what is known -------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether there is nothing left to do, or no time for it."""
        if self.stopped is None and self.stop.is_set():
            self.stopped = Termination.INTERRUPTED
        late = self.best is None and self.request.elapsed_s() > self.patience_s
        if self.stopped is None and (late or self.request.remaining_s() <= 0):
            self.stopped = Termination.TIME_LIMIT
        return self.stopped is not None or self.proved()

    def proved(self) -> bool:
        """Return whether the best schedule is within the gap tolerance."""
        with self.lock:
            if self.bound >= self.ceiling:
                return True
            if self.best is None:
                return False
            if is_tight(self.problem, self.best.value, self.bound):
                return True
            return relative_gap(self.best.value, self.bound) <= self.request.gap

    def gap(self) -> float:
        """Return the gap between bound and `aim`; infinite where there is none."""
        aim = self.aim()
        return math.inf if aim is None else relative_gap(aim, self.bound)

    def aim(self) -> float | None:
        """Return the value that schedules should be below: that of the best one, or the ceiling.

        None where every schedule would do.
        """
        best = self.best
        aim = self.ceiling if best is None else min(best.value, self.ceiling)
        return None if math.isinf(aim) else aim

    def raise_bound(self, bound: float) -> None:
        """Take note of a proven lower bound."""
        with self.lock:
            better = bound > self.bound
            self.bound = max(bound, self.bound)
        if better:
            self.tell()

    def within_cutoff(self, relaxation: Relaxation, bound: float) -> float:
        """Return what the bound of an integer solve says in the unit of the minimized quantity.

        The solve's cutoff is a little above `aim`; that nothing is below it is proved up to `aim`.
        A bound beyond the cutoff is left as it is: it contradicts a schedule.
        """
        value = safe_bound(self.problem, bound) * relaxation.unit
        aim = self.aim()
        if aim is None or value > aim + 2 * ALLOWANCE * (relaxation.unit + abs(aim)):
            return value
        return min(value, aim)

    def offer(self, schedule: Schedule) -> bool:
        """Give a schedule to the verifier and keep it if it is the best; return whether valid."""
        needed = PartialSchedule.of(self.problem.graph, schedule)
        tidy = verify_schedule(self.problem, needed.schedule())
        if tidy.violations:
            return False
        with self.lock:
            better = self.best is None or tidy.value < self.best.value
            if better:
                self.best = tidy
        if better:
            self.tell()
        return True

    def tell(self) -> None:
        """Report where the solve stands to whoever watches; stop if told to."""
        watcher = self.request.on_progress
        if watcher is None:
            return
        with self.telling:
            state = SolveProgress(
                seconds=self.request.elapsed_s(),
                incumbent=None if self.best is None else self.best.value,
                bound=self.bound,
            )
            if watcher(state) is False:
                self.stopped = self.stopped or Termination.INTERRUPTED

    # -- models and solver ---------------------------------------------------------------------

    def build(self, grouping: Grouping, previous: Relaxation | None = None) -> Relaxation:
        """State the relaxation of a grouping, with the cuts of a coarser one."""
        relaxation = Relaxation.build(
            self.problem, grouping, self.recomputable, restoring=self.restoring
        )
        if self.restoring:
            relaxation.rooms = Rooms(relaxation)
        if previous is not None:
            relaxation.cuts = _restated(relaxation, previous.cuts)
            relaxation.lasting = _restated(relaxation, previous.lasting)
        with self.lock:
            self.build_s += relaxation.build_s
        return relaxation

    def cutoff(self, relaxation: Relaxation) -> dict[str, float]:
        """Return the limit by which a solve looks only for schedules below `aim`."""
        aim = self.aim()
        if aim is None:
            return {}
        value = aim / relaxation.unit
        return {"objective_cutoff": value + ALLOWANCE * (1.0 + abs(value))}

    def solve(
        self,
        form: StandardForm,
        *,
        most_s: float | None = None,
        targets: dict[str, float] | None = None,
        start: NDArray | None = None,  # type: ignore[type-arg]
        options: Mapping[str, OptionValue] | None = None,
        watch: Callable[[BackendProgress], bool] | None = None,
    ) -> RawSolution | None:
        """Solve within the time that is left; None if there is none.

        Parameters
        ----------
        form : StandardForm
            The model.
        most_s : float, optional
            Time for this solve [s].
        targets : dict, optional
            Further `Limits`.
        start : ndarray, optional
            A point to begin from.
        options : mapping, optional
            Options of the solver by its own names.
        watch : callable, optional
            Told of progress; returning False ends this solve only.
        """
        remaining = self.request.remaining_s()
        if remaining <= 0 or self.stopped is not None:
            self.done()
            return None
        targets = targets or {}
        limits = Limits(
            time_s=remaining if most_s is None else min(most_s, remaining),
            rel_gap=self.request.gap / 2,
            seed=self.request.seed,
            log=self.log.append,
            objective_stop=targets.get("objective_stop"),
            objective_cutoff=targets.get("objective_cutoff"),
            options=options or {},
        )

        def on_progress(progress: BackendProgress) -> bool:
            if watch is not None and not watch(progress):
                return False
            self.tell()
            return self.stopped is None

        with self.lock:
            self.columns = max(self.columns, form.n_columns)
            self.rows = max(self.rows, form.n_rows)
        begun = time.monotonic()
        known = self.bound
        raw = self.solver.solve(form, limits, start=start, on_progress=on_progress, stop=self.stop)
        with self.lock:
            self.solve_s += time.monotonic() - begun
            if raw.solved_again:
                self.bound = known  # what the first run told on its way may be wrong
        if raw.status == SolverStatus.INTERRUPTED:
            self.done()  # takes note of the signal, if that is what it was
        return raw


def _restated(relaxation: Relaxation, cuts: Sequence[Cut]) -> list[Cut]:
    """Return cuts of a coarser relaxation in the columns of this one, each once."""
    found: dict[tuple[tuple[int, float], ...], Cut] = {}
    for cut in cuts:
        if isinstance(cut.origin, RoomOrigin):
            for again in relaxation.rooms.restate(cut.origin) if relaxation.rooms else ():
                found.setdefault(again.terms, again)
        elif cut.origin is not None:
            one = restate(relaxation, cut.origin)
            if one is not None:
                found.setdefault(one.terms, one)
    return list(found.values())
