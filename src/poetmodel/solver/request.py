"""The request of a solve and its progress reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypedDict

from poetmodel.clock import now_s, wall_end_s
from poetmodel.errors import InputError, quote
from poetmodel.solver.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from poetmodel.backends import OptionValue
    from poetmodel.backends.protocol import Limits
    from poetmodel.schedule import Schedule

    OnProgress = Callable[["SolveProgress"], bool | None]

GRACE_S: Final = 1.0
"""Time after the limit in which a schedule under construction may still be completed [s]."""
PATIENCE_S: Final = 0.7
"""Time after the limit at which a solver is abandoned [s]. HiGHS checks no clock in some parts of
its root node, which take seconds from ten thousand columns on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveProgress:
    """The progress of a solve at one time, in the unit of the minimized quantity."""

    seconds: float
    """Time since the solve was requested, building included [s]."""
    overhead: float | None
    """Smallest overhead of a schedule in this search, in addition to `baseline`; None
    before its first schedule."""
    overhead_bound: float | None
    """Largest proven lower bound on the overhead in this search; None without one."""
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
        from poetmodel.result import relative_gap  # The command line starts without results.

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
    """Options of the search for a schedule, with the defaults of commands; see `solve`."""

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
        """Raise `InputError` if the time limit, gap, threads or seed are invalid, None included."""
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

    @classmethod
    def of_keywords(
        cls,
        *,
        time_limit: float = 60.0,
        solver_options: Mapping[str, OptionValue] | None = None,
        start: Schedule | None = None,  # noqa: ARG003 - no option of a search
        **options: Any,
    ) -> Self:
        """Return the options that keywords of `poetmodel.solve` state."""
        try:
            named_options = dict(solver_options or {})
        except (TypeError, ValueError):
            raise InputError(
                f"solver_options: expected a dictionary, got {quote(solver_options)}"
            ) from None
        return cls(time_limit_s=time_limit, solver_options=named_options, **options)

    def start(self, on_progress: OnProgress | None = None) -> Request:
        """Return the request of these options, whose clock starts now."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(SearchOptions)}
        return Request(**own, on_progress=on_progress)


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

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid options, and for a callback that cannot be called."""
        SearchOptions.__post_init__(self)
        if self.on_progress is not None and not callable(self.on_progress):
            raise InputError(f"on_progress: expected a function, got {quote(self.on_progress)}")

    def restart(self, time_limit_s: float, on_progress: OnProgress | None = None) -> Request:
        """Return the same options with another limit and callback; the clock starts now."""
        return replace(
            self,
            time_limit_s=time_limit_s,
            on_progress=on_progress,
            started_s=now_s(),
            wall_end_s=wall_end_s(),
        )

    def solver_limits(self, time_s: float, *, rel_gap: float) -> Limits:
        """Return the limits of one call of the solver, with one thread."""
        from poetmodel.backends.protocol import Limits

        return Limits(
            time_s=time_s,
            rel_gap=rel_gap,
            seed=self.seed,
            presolve=self.presolve,
            options=self.solver_options,
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
