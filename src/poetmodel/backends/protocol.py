"""Input and output types of back ends: limits, progress, capabilities, statuses, solutions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

OnProgress: TypeAlias = "Callable[[BackendProgress], bool | None]"
"""Progress callback; the solve stops if it returns False."""
OptionValue: TypeAlias = bool | int | float | str
"""Types of the values of solver-specific options."""

_MAX_SEED: Final = 2_000_000_000
_MAX_THREADS: Final = 1024
_MIN_TOLERANCE: Final = 1e-9
_MAX_TOLERANCE: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Stopping criteria and settings of one solve.

    Examples
    --------
    >>> Limits(time_s=10.0, rel_gap=0.01).threads
    1
    """

    time_s: float | None = None
    """Wall-clock limit of a call, including the time to build the solver's model [s]; None for no
    limit."""
    rel_gap: float = 1e-4
    """Stop when ``|objective - bound| <= rel_gap * |objective|``; for SCIP, relative to the smaller
    of ``|objective|`` and ``|bound|``."""
    abs_gap: float = 1e-9
    """Stop when ``|objective - bound| <= abs_gap``."""
    threads: int = 1
    """Maximum number of threads; SCIP uses one."""
    seed: int = 0
    """Seed of the solver's random number generator."""
    objective_stop: float | None = None
    """Stop at the first solution whose objective is at least as good as this value."""
    objective_cutoff: float | None = None
    """Search only for solutions whose objective is at least as good as this value; see
    `SolverStatus.CUTOFF`."""
    presolve: bool = True
    """Whether the solver may presolve. Most solver bugs that we have found are in presolve."""
    tolerance: float = 1e-7
    """Absolute feasibility and integrality tolerance of rows, bounds and integer columns."""
    log: Callable[[str], None] | None = None
    """Receives the solver's log in pieces during the solve; None turns the log off."""
    options: Mapping[str, OptionValue] = field(default_factory=lambda: MappingProxyType({}))
    """Solver-specific options by the solver's names. They are set last and override the fields
    above."""

    def __post_init__(self) -> None:
        """Check all numbers but those in `options`; raise `InputError` with all errors."""
        is_time_valid = self.time_s is None or 0 < self.time_s < math.inf
        is_tolerance_valid = _MIN_TOLERANCE <= self.tolerance <= _MAX_TOLERANCE
        checks = (
            ("time_s", "a finite number of seconds above 0", is_time_valid),
            ("rel_gap", "a finite number of 0 or more", 0 <= self.rel_gap < math.inf),
            ("abs_gap", "a finite number of 0 or more", 0 <= self.abs_gap < math.inf),
            (
                "threads",
                f"a whole number from 1 to {_MAX_THREADS}",
                _is_integer_in_range(self.threads, 1, _MAX_THREADS),
            ),
            (
                "seed",
                f"a whole number from 0 to {_MAX_SEED}",
                _is_integer_in_range(self.seed, 0, _MAX_SEED),
            ),
            ("objective_stop", "a finite number", math.isfinite(self.objective_stop or 0)),
            ("objective_cutoff", "a finite number", math.isfinite(self.objective_cutoff or 0)),
            (
                "tolerance",
                f"a number from {_MIN_TOLERANCE} to {_MAX_TOLERANCE}",
                is_tolerance_valid,
            ),
        )
        errors = [
            f"{name}: expected {expected}, got {getattr(self, name)!r}"
            for name, expected, is_valid in checks
            if not is_valid
        ]
        if errors:
            raise InputError(errors)


Limits = CallLimits
"""Public name of `CallLimits`; the limits of a problem are `poetmodel.problem.Limits`."""


def _is_integer_in_range(value: object, min_value: int, max_value: int) -> bool:
    """Return whether a value is an integer, but no bool, in a range that includes its ends."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return min_value <= int(value) <= max_value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackendProgress:
    """Progress of a running solve; incumbent and bound are in the model's sense."""

    incumbent: float | None
    """Objective of the best solution so far; None without one."""
    bound: float | None
    """Best proven bound so far; None without one."""
    x: NDArray[np.float64] | None
    """The new incumbent with integers rounded; None unless this report announces a new
    incumbent."""
    nodes: int | None = None
    """Branch-and-bound nodes so far, at most 1 at the root; None until the solver reports them."""
    is_restart: bool = False
    """Whether the model is now solved again, because an earlier solve of the call went wrong; all
    earlier reports of the call are then invalid, above all their bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Optional features of a back end."""

    integers: bool = True
    """Solves models with integer columns. Every back end solves models without them."""
    starts: bool = True
    """Uses a start (MIP start)."""
    callbacks: bool = True
    """Reports solutions and bounds during the solve, and stops on request."""
    cutoffs: bool = True
    """Honours `Limits.objective_stop` and `Limits.objective_cutoff`."""
    absolute_gap: bool = True
    """Honours `Limits.abs_gap`."""
    log: bool = True
    """Passes the solver's log to `Limits.log`."""
    threads: bool = True
    """Uses more than one thread if `Limits.threads` allows it."""
    licence_free_size: int | None = None
    """Maximum number of columns, and of rows, under the licence in the solver's package; None for
    no limit."""


class SolverStatus(StrEnum):
    """Reason why a solver stopped; each back end maps all of its solver's statuses to these."""

    OPTIMAL = "optimal"
    """Proved: the gap is at most `Limits.rel_gap` or `Limits.abs_gap`."""
    INFEASIBLE = "infeasible"
    """Proved: the model has no solution."""
    UNBOUNDED = "unbounded"
    """Proved: there are solutions with arbitrarily good objectives."""
    CUTOFF = "cutoff"
    """Proved: no solution has an objective better than `Limits.objective_cutoff`."""
    OBJECTIVE_STOP = "objective_stop"
    """A solution's objective reached `Limits.objective_stop`."""
    TIME_LIMIT = "time_limit"
    """Wall-clock limit reached; there may or may not be a solution."""
    INTERRUPTED = "interrupted"
    """Stopped by the stop event, by `on_progress`, or by Ctrl-C."""
    OTHER_LIMIT = "other_limit"
    """A limit in `Limits.options` (nodes, memory, solutions) was reached, the solver stopped early
    for numerical or internal reasons, or a proof was refuted or not confirmed."""
    INFEASIBLE_OR_UNBOUNDED = "infeasible_or_unbounded"
    """The solver did not distinguish these statuses; `Solver.solve` never returns this one."""
    FAILED = "failed"
    """The solver failed. `Solver.solve` never returns this status: it raises `BackendError`, or
    returns `INTERRUPTED` after a requested stop."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Basis:
    """Optimal simplex basis of a model without integers, in the solver's own status values."""

    columns: Sequence[Any]
    """Basis status of each column: basic, or nonbasic at a bound."""
    rows: Sequence[Any]
    """Basis status of each row."""
    basic: Any
    """Solver's value for "basic"; rows that are added later start with it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawSolution:
    """Result of a solver, not yet verified by the simulator.

    `Solver.run` fills in status, solution, bound, nodes and basis as the solver reports them, and
    `solved_again`. `Solver.solve` corrects inconsistent values and fills in the remaining fields.
    """

    status: SolverStatus
    """Reason why the solver stopped."""
    x: NDArray[np.float64] | None = None
    """Best solution found, shape (n_columns,), integers rounded; None without a solution."""
    objective: float | None = None
    """Objective of `x` in the model's sense, computed from `x`; None without a solution."""
    bound: float | None = None
    """Proven bound in the model's sense: at most `objective` for minimization, at least `objective`
    for maximization; None without a bound."""
    nodes: int | None = None
    """Branch-and-bound nodes; None for a model without integers, or if the call stopped before the
    solver started; 0 for a MIP that is infeasible by inspection."""
    root_bound: float | None = None
    """Bound before the first branching; None for a model without integers, or without such a
    bound."""
    basis: Basis | None = None
    """Optimal basis of a model without integers; None if the solver returns none."""
    build_s: float = 0.0
    """Time until the solver's model was built [s], 0 if none was built; with `solved_again`, the
    model of the last solve, so earlier solves are included."""
    solve_s: float = 0.0
    """Time of the call after `build_s` [s]."""
    start_accepted: bool | None = None
    """True: the start is complete and feasible, so `x`, unless None, is at least as good. False:
    the start is complete, and it or the model is infeasible. None: there is no start, or a partial
    start, which the solver may use."""
    solved_again: bool = False
    """Whether an earlier solve failed or was wrong, and the model was solved again without presolve
    or start. `BackendProgress.is_restart` reports this when it happens."""

    @property
    def is_infeasible(self) -> bool:
        """Whether the solver proved that the model has no solution."""
        return self.status is SolverStatus.INFEASIBLE
