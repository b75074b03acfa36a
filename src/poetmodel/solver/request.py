"""The request of a solve, its progress reports, and the history of these reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Final, TypedDict

from poetmodel.clock import now_s, wall_end_s
from poetmodel.errors import InputError
from poetmodel.problem import Quantity
from poetmodel.result import SolveResult, relative_gap
from poetmodel.solver.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.backends import OptionValue
    from poetmodel.result import HistoryEntry
    from poetmodel.schedule import Schedule

    OnProgress = Callable[["SolveProgress"], bool | None]

GRACE_S: Final = 1.0
"""Time after the limit in which a schedule under construction may still be completed [s]."""
PATIENCE_S: Final = 0.7
"""Time after the limit at which a solver is abandoned [s]. HiGHS checks no clock in some phases of
its root node, which take seconds from ten thousand columns on."""
MAX_HISTORY_ENTRIES: Final = 100
"""Maximum number of entries of a history. When it is exceeded, every second entry is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveProgress:
    """The progress of a solve at one time, in the unit of the minimized quantity."""

    seconds: float
    """Time since the solve was requested, building included [s]."""
    overhead: float | None
    """Smallest overhead of a schedule in this phase of the solve, in addition to `baseline`; None
    before its first schedule."""
    overhead_bound: float | None
    """Largest proven lower bound on the overhead in this phase of the solve; None without one."""
    baseline: float = 0.0
    """Baseline of the minimized quantity, such as the energy of a single pass."""
    schedule: Schedule | None = None
    """The verified schedule with `overhead`; None before the first one, and if the solver reports
    the overhead alone."""

    @property
    def value(self) -> float | None:
        """`baseline` plus `overhead`, as `SolveResult.value`; None if `overhead` is None."""
        return None if self.overhead is None else self.baseline + self.overhead

    @property
    def bound(self) -> float | None:
        """`baseline` plus `overhead_bound`; None if `overhead_bound` is None."""
        return None if self.overhead_bound is None else self.baseline + self.overhead_bound

    @property
    def gap(self) -> float | None:
        """Gap between overhead and bound, as a fraction of the overhead; None if either is None."""
        if self.overhead is None or self.overhead_bound is None:
            return None
        return relative_gap(self.overhead, self.overhead_bound)


class SearchKeywords(TypedDict, total=False):
    """Keywords of `poetmodel.solve` except its time limit, for functions that pass them on."""

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
class SearchOptions:
    """Options of the search for a schedule, each declared once; `solve` documents them."""

    method: str = "optimal"
    """Name of the method, or ``FILE.py:FUNCTION``."""
    formulation: str | None = None
    """Formulation of a problem; None for the default one, and for methods without one."""
    backend: str = "highs"
    time_limit_s: float = 60.0
    """Time for the whole search, building included [s]: processor time if `Request.wall_end_s` is
    set, else wall time."""
    gap: float = 1e-4
    """Gap tolerance of the overhead or of a model's user-defined objective, at which the solve
    stops."""
    threads: int = 1
    seed: int = 0
    """Seed of every random choice."""
    solver_options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Options of the back end by its own names, for each of its solves."""

    def __post_init__(self) -> None:
        """Raise `InputError` if the time limit, gap, threads or seed are invalid.

        The time limit must be finite and above 0, the gap finite and at least 0. Threads are a
        whole number from 1, the seed a whole number from 0. None is invalid for all of them.
        """
        errors = []
        if not _is_real(self.time_limit_s) or self.time_limit_s <= 0:
            errors.append(f"time limit: expected seconds above 0, got {self.time_limit_s!r}")
        if not _is_real(self.gap) or self.gap < 0:
            errors.append(f"gap: expected a finite fraction of 0 or more, got {self.gap!r}")
        for name, minimum in (("threads", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                errors.append(f"{name}: expected a whole number from {minimum}, got {value!r}")
        if errors:
            raise InputError(errors)

    def start(self, on_progress: OnProgress | None = None) -> Request:
        """Return the request of these options, whose clock starts now."""
        stated = {entry.name: getattr(self, entry.name) for entry in fields(SearchOptions)}
        return Request(**stated, on_progress=on_progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(SearchOptions):
    """A search that has started: options, clock and callback. The limit counts from `started_s`."""

    on_progress: OnProgress | None = None
    """Called with reports of progress; returning False stops the solve."""
    presolve: bool = True
    """Whether the solver may reduce a model before it solves it."""
    policy: Policy = field(default_factory=Policy)
    """Parameters of the search; no claim depends on them."""
    started_s: float = field(default_factory=now_s)
    """Time of the request, on the clock that counts against the limit [s]; by default the creation
    of this object."""
    wall_end_s: float | None = field(default_factory=wall_end_s)
    """Latest end on the monotonic clock if the limit is processor time [s]; None otherwise."""

    def report(
        self, overhead: float | None, bound: float | None, schedule: Schedule | None = None
    ) -> bool | None:
        """Call `on_progress` with the overhead and bound so far; return the callback's result.

        `schedule` is the verified schedule with `overhead`; None if the solver reports the overhead
        alone. False requests the end of the solve. Returns None without a callback.
        """
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
        """Return the time since the solve was requested, on the clock of the limit [s]."""
        return now_s(use_processor_time=self.wall_end_s is not None) - self.started_s

    def remaining_s(self) -> float:
        """Return the time until the limit or, if earlier, until `wall_end_s` [s], 0 or more."""
        remaining_s = max(0.0, self.time_limit_s - self.elapsed_s())
        return remaining_s if self.wall_end_s is None else min(remaining_s, self.remaining_wall_s())

    def remaining_wall_s(self) -> float:
        """Return the wall time until the limit, or until `wall_end_s` if set [s], 0 or more."""
        if self.wall_end_s is None:
            return self.remaining_s()
        return max(0.0, self.wall_end_s - now_s(use_processor_time=False))


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(slots=True, kw_only=True)
class History:
    """Progress reports of a solve that improved the overhead or the bound."""

    on_progress: OnProgress | None = None
    """The user's callback, to which each report is forwarded."""
    baseline: float = 0.0
    """Baseline for the forwarded reports."""
    entries: list[HistoryEntry] = field(default_factory=list)
    """Time of each improving report [s], with the best overhead and bound until then; at most
    `MAX_HISTORY_ENTRIES`."""
    best: SolveProgress | None = None
    """The report whose schedule has the smallest overhead; None before a report with a schedule."""

    def record(self, progress: SolveProgress) -> bool | None:
        """Add an entry if a report improves the overhead or bound, and call `on_progress`.

        A report with an infinite value, or with neither overhead nor bound, has no entry. A report
        whose schedule has the smallest overhead so far becomes `best`. The callback receives a copy
        of every report with `baseline` set. Return the callback's result; None without a callback.
        """
        overheads = (progress.overhead, progress.overhead_bound)
        known_values = [value for value in overheads if value is not None]
        if known_values and all(map(math.isfinite, known_values)):
            self._add_entry((progress.seconds, *overheads))
        if progress.schedule is not None and progress.overhead is not None:
            best = None if self.best is None else self.best.overhead
            self.best = progress if best is None or progress.overhead < best else self.best
        if self.on_progress is None:
            return None
        return self.on_progress(replace(progress, baseline=self.baseline))

    def complete_history(self, result: SolveResult) -> tuple[HistoryEntry, ...]:
        """Return the entries before the end of a solve, and its result as the last entry.

        Earlier overheads below the result's are raised to it, and earlier bounds above the result's
        are lowered to it, because a solver may revise its reports. Return () if a model's objective
        replaced the problem's, and all entries as they are if there is no schedule.
        """
        model_objective, simulation = result.model_objective, result.simulation
        if model_objective is not None or simulation is None:
            return () if model_objective is not None else tuple(self.entries)
        objective = result.problem.objective
        value, bound = objective.overhead_of(simulation), result.proven_bound - objective.baseline
        if result.problem.minimize == Quantity.ENERGY:
            bound = result.overhead_bound_j
        earlier_entries = [
            (
                seconds,
                None if incumbent is None else max(incumbent, value),
                None if lower is None else min(lower, bound),
            )
            for seconds, incumbent, lower in self.entries
            if seconds < result.wall_s
        ]
        return (*earlier_entries, (result.wall_s, value, bound))

    def _add_entry(self, entry: HistoryEntry) -> None:
        """Append an entry with the best values so far, unless neither value has improved.

        If there are more than `MAX_HISTORY_ENTRIES`, delete every second entry, but neither the
        first nor the last.
        """
        entries = self.entries
        if entries:
            _, incumbent, bound = entries[-1]
            entry = (entry[0], _min_known(entry[1], incumbent), _max_known(entry[2], bound))
            if entry[1:] == entries[-1][1:]:
                return
        entries.append(entry)
        if len(entries) > MAX_HISTORY_ENTRIES:
            del entries[1:-1:2]


def _min_known(first: float | None, second: float | None) -> float | None:
    return min((value for value in (first, second) if value is not None), default=None)


def _max_known(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)
