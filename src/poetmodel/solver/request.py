"""How to solve, within which limits, and what is reported on the way, kept for later."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypedDict

from poetmodel.clock import now_s, wall_end_s
from poetmodel.errors import InputError
from poetmodel.problem import Quantity
from poetmodel.result import SolveResult, relative_gap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.backends import OptionValue
    from poetmodel.result import Moment
    from poetmodel.schedule import Schedule

    OnProgress = Callable[["SolveProgress"], bool | None]

GRACE_S: Final = 1.0
"""Time beyond the limit in which a schedule that is being made may still be finished [s]."""
PATIENCE_S: Final = 0.7
"""How late a solver may be before it is left behind [s]: HiGHS looks at no clock in parts of its
root, which take seconds with ten thousand columns and more."""
MOST_MOMENTS: Final = 100
"""Moments that a history keeps; of more every second one goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveProgress:
    """The state of a solve at one moment, in the unit of what is minimized."""

    seconds: float
    """Since the solve was requested, building included [s]."""
    overhead: float | None
    """Least overhead of a schedule so far, the part above `baseline`; None before the first."""
    overhead_bound: float | None
    """Best proven lower bound on the overhead so far; None before the first."""
    baseline: float = 0.0
    """What every schedule pays: of energies and times those of a single pass."""
    schedule: Schedule | None = None
    """The verified schedule of that overhead; None where a solver reports the overhead alone."""

    @property
    def value(self) -> float | None:
        """Least value of a schedule so far, as `SolveResult.value`; None before the first."""
        return None if self.overhead is None else self.baseline + self.overhead

    @property
    def bound(self) -> float | None:
        """Best proven lower bound on the value so far; None before the first."""
        return None if self.overhead_bound is None else self.baseline + self.overhead_bound

    @property
    def gap(self) -> float | None:
        """Gap between both overheads, as a fraction of the first; None while one is missing."""
        if self.overhead is None or self.overhead_bound is None:
            return None
        return relative_gap(self.overhead, self.overhead_bound)


class SearchKeywords(TypedDict, total=False):
    """Keywords of `poetmodel.solve` that functions above pass on, without its time limit."""

    formulation: str | None
    backend: str
    gap: float
    threads: int
    seed: int
    start: Schedule | None
    on_progress: OnProgress | None
    solver_options: Mapping[str, OptionValue] | None


class SolveKeywords(SearchKeywords, total=False):
    """Keywords of `poetmodel.solve`."""

    time_limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request of a solve; begins to count time when made."""

    backend: str = "highs"
    time_limit_s: float = 60.0
    """Wall time for everything, building included [s]."""
    gap: float = 1e-4
    """Stop at this gap of what can be decided (the overhead, for energy)."""
    threads: int = 1
    seed: int = 0
    """Seed of everything random."""
    on_progress: OnProgress | None = None
    """Called with every better schedule and bound; returning False stops the solve."""
    solver_options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Options of the back end by its own names, for each of its solves."""
    presolve: bool = True
    """Whether the solver may reduce a model before it solves it."""
    started_s: float = field(default_factory=now_s)
    """When the solve was requested, on the clock that its limit counts [s]."""
    wall_end_s: float | None = field(default_factory=wall_end_s)
    """When it ends in any case, on the monotonic clock, if its limit is of processor time [s]."""

    def __post_init__(self) -> None:
        faults = []
        if not _is_real(self.time_limit_s) or self.time_limit_s <= 0:
            faults.append(f"time limit: expected seconds above 0, got {self.time_limit_s!r}")
        if not _is_real(self.gap) or self.gap < 0:
            faults.append(f"gap: expected a finite fraction of 0 or more, got {self.gap!r}")
        for name, least in (("threads", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                faults.append(f"{name}: expected a whole number from {least}, got {value!r}")
        if faults:
            raise InputError(faults)

    def report(
        self, overhead: float | None, bound: float | None, schedule: Schedule | None = None
    ) -> bool | None:
        """Report overhead and its bound so far; return what the watcher answers, False to stop."""
        if self.on_progress is None:
            return None
        return self.on_progress(
            SolveProgress(
                seconds=self.elapsed_s(),
                overhead=overhead,
                overhead_bound=bound,
                schedule=schedule,
            )
        )

    def elapsed_s(self) -> float:
        """Return the time since the solve was requested [s]."""
        return now_s(of_processor=self.wall_end_s is not None) - self.started_s

    def remaining_s(self) -> float:
        """Return the time that is left [s], 0 or more."""
        left_s = max(0.0, self.time_limit_s - self.elapsed_s())
        return left_s if self.wall_end_s is None else min(left_s, self.remaining_wall_s())

    def remaining_wall_s(self) -> float:
        """Return the wall time that is left [s], 0 or more."""
        if self.wall_end_s is None:
            return self.remaining_s()
        return max(0.0, self.wall_end_s - now_s(of_processor=False))


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(slots=True, kw_only=True)
class History:
    """Reports of a solve, as far as they changed something."""

    on_progress: OnProgress | None = None
    """Further observers."""
    baseline: float = 0.0
    """What is added to the overheads for these."""
    moments: list[Moment] = field(default_factory=list)
    best: SolveProgress | None = None
    """The report of the best schedule."""

    def watch(self, progress: SolveProgress) -> bool | None:
        """Take note of a report, pass it on, and return the answer."""
        values = (progress.overhead, progress.overhead_bound)
        figures = [figure for figure in values if figure is not None]
        if figures and all(map(math.isfinite, figures)):
            self._add((progress.seconds, *values))
        if progress.schedule is not None and progress.overhead is not None:
            known = None if self.best is None else self.best.overhead
            self.best = progress if known is None or progress.overhead < known else self.best
        if self.on_progress is None:
            return None
        return self.on_progress(replace(progress, baseline=self.baseline))

    def of(self, result: SolveResult) -> tuple[Moment, ...]:
        """Return the history of a solve that ended with a result, which is its last moment.

        No moment is ahead of the result: a solver may take back what it told on its way.
        """
        own, simulation = result.own_objective, result.simulation
        if own is not None or simulation is None:
            return () if own is not None else tuple(self.moments)
        objective = result.problem.objective
        value, bound = objective.overhead_of(simulation), result.proven_bound - objective.baseline
        if result.problem.minimize == Quantity.ENERGY:
            bound = result.overhead_bound_j
        before = [
            (
                seconds,
                None if incumbent is None else max(incumbent, value),
                None if lower is None else min(lower, bound),
            )
            for seconds, incumbent, lower in self.moments
            if seconds < result.wall_s
        ]
        return (*before, (result.wall_s, value, bound))

    def _add(self, moment: Moment) -> None:
        moments = self.moments
        if moments:
            _, incumbent, bound = moments[-1]
            moment = (moment[0], _least(moment[1], incumbent), _most(moment[2], bound))
            if moment[1:] == moments[-1][1:]:
                return
        moments.append(moment)
        if len(moments) > MOST_MOMENTS:
            del moments[1:-1:2]


def _least(first: float | None, other: float | None) -> float | None:
    return min((value for value in (first, other) if value is not None), default=None)


def _most(first: float | None, other: float | None) -> float | None:
    return max((value for value in (first, other) if value is not None), default=None)
