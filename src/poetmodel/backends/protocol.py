"""What every back end promises: limits in, progress on the way, separate facts out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from poetmodel.errors import InputError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from poetmodel.backends.standard_form import StandardForm

    OnProgress: TypeAlias = Callable[["Progress"], bool | None]

OptionValue: TypeAlias = bool | int | float | str
"""What a solver's own option may be set to."""

_MAX_SEED: Final = 2_000_000_000
_MAX_THREADS: Final = 1024
_MIN_TOLERANCE: Final = 1e-9
_MAX_TOLERANCE: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a solver has to stop, and how it works until then.

    Examples
    --------
    >>> Limits(time_s=10.0, rel_gap=0.01).threads
    1
    """

    time_s: float | None = None
    """Wall time of a whole call, building the solver's model included [s]; None for no limit."""
    rel_gap: float = 1e-4
    """Stop when ``|objective - bound| <= rel_gap * |objective|``."""
    abs_gap: float = 1e-9
    """Stop when ``|objective - bound| <= abs_gap``."""
    threads: int = 1
    """Threads that a solver may use; a back end without `Feature.THREADS` uses one."""
    seed: int = 0
    """Seed of the solver's random choices."""
    objective_stop: float | None = None
    """Stop at the first solution at least as good as this."""
    objective_cutoff: float | None = None
    """Look only for solutions at least as good as this; see `Termination.CUTOFF`."""
    tolerance: float = 1e-7
    """How far a row, a bound or an integer may be off, absolutely, in the solver's eyes."""
    log: Callable[[str], None] | None = None
    """Receives the solver's log as it comes, in pieces; None keeps the solver quiet."""
    options: Mapping[str, OptionValue] = field(default_factory=lambda: MappingProxyType({}))
    """The solver's own options by its own names, set last, so that they win."""

    def __post_init__(self) -> None:
        checks = (
            ("time_s", "a finite number of seconds above 0", _positive(self.time_s)),
            ("rel_gap", "a finite number of 0 or more", _not_negative(self.rel_gap)),
            ("abs_gap", "a finite number of 0 or more", _not_negative(self.abs_gap)),
            ("threads", "a whole number of 1 or more", _whole(self.threads, 1, _MAX_THREADS)),
            ("seed", f"a whole number from 0 to {_MAX_SEED}", _whole(self.seed, 0, _MAX_SEED)),
            ("objective_stop", "a finite number", _finite(self.objective_stop)),
            ("objective_cutoff", "a finite number", _finite(self.objective_cutoff)),
            (
                "tolerance",
                f"a number from {_MIN_TOLERANCE} to {_MAX_TOLERANCE}",
                _MIN_TOLERANCE <= self.tolerance <= _MAX_TOLERANCE,
            ),
        )
        faults = [
            f"{name}: expected {wanted}, got {getattr(self, name)!r}"
            for name, wanted, fine in checks
            if not fine
        ]
        if faults:
            raise InputError(faults)


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _not_negative(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _positive(value: float | None) -> bool:
    return value is None or (math.isfinite(value) and value > 0)


def _whole(value: object, least: int, most: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least <= int(value) <= most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Progress:
    """How far a running solve has come."""

    elapsed_s: float
    """Since the call began [s]."""
    incumbent: float | None
    """Objective of the best solution so far, in the model's sense; None without one."""
    bound: float | None
    """Best proven bound so far, in the model's sense; None without one."""
    x: NDArray[np.float64] | None
    """The new best solution, integers rounded; None where this call does not bring a new one."""


class Termination(StrEnum):
    """Why the solver stopped. Says nothing about what it found."""

    PROVED = "proved"
    """Gap at most the tolerance, or infeasibility proved."""
    CUTOFF = "cutoff"
    """Proved: no solution is better than `Limits.objective_cutoff`."""
    OBJECTIVE_STOP = "objective_stop"
    """A solution reached `Limits.objective_stop`."""
    TIME_LIMIT = "time_limit"
    """Wall-clock limit reached; there may or may not be a solution."""
    INTERRUPTED = "interrupted"
    """Stopped by the stop event, by `on_progress`, or by Ctrl-C."""
    OTHER_LIMIT = "other_limit"
    """A limit among `Limits.options` (nodes, memory, solutions), or numerical trouble."""
    UNBOUNDED = "unbounded"
    """Proved: there are solutions, and none is best."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawSolution:
    """What a solver returned; nothing in it has been verified yet."""

    termination: Termination
    """Why it stopped."""
    infeasible: bool
    """Whether it proved that there is no solution at all."""
    x: NDArray[np.float64] | None
    """Best solution found, integers rounded, one value per column; None without one."""
    objective: float | None
    """Objective of `x`, computed from it, in the model's sense."""
    bound: float | None
    """Proven bound in the model's sense, never beyond `objective`; None without one."""
    violation: float | None
    """Largest violation of a row or bound by the rounded `x`, absolute."""
    nodes: int | None
    """Branch-and-bound nodes; None for a model without integers."""
    build_s: float
    """Time to hand the model over [s]."""
    solve_s: float
    """Time in the solver [s]."""
    start_accepted: bool | None
    """True: the start is complete and feasible, so `x` is at least as good; False: it is complete
    and breaks the model; None: no start, or a partial one, which the solver may use as it can."""
    log: str | None
    """The solver's log where `Limits.log` asked for it."""
    solved_again: bool = False
    """Whether a run went wrong, so that the model was solved a second time, in a safer way: what
    the first run reported on its way, bounds above all, is void."""


class Feature(StrEnum):
    """What not every back end does."""

    THREADS = "threads"
    """Uses more than one thread when asked to."""


class Backend(Protocol):
    """One solver behind one door."""

    @property
    def name(self) -> str:
        """Name by which users choose it."""

    @property
    def features(self) -> frozenset[Feature]:
        """What it does beyond the common ground."""

    def available(self) -> bool:
        """Return whether its package is installed; imports nothing."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the solver and of its wrapper.

        Raises
        ------
        BackendUnavailableError
            If the package is missing.
        """

    def solve(
        self,
        form: StandardForm,
        limits: Limits,
        *,
        start: NDArray[np.float64] | None = None,
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
