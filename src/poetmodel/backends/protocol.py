"""Input and output of a back end: limits, progress on the way, separate facts."""

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
"""Gets progress; returning False stops the solve."""
OptionValue: TypeAlias = bool | int | float | str
"""Types of a solver's own options."""

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
    """Threads that a solver may use; SCIP searches with one."""
    seed: int = 0
    """Seed of the solver's random choices."""
    objective_stop: float | None = None
    """Stop at the first solution at least as good as this."""
    objective_cutoff: float | None = None
    """Look only for solutions at least as good as this; see `SolverStatus.CUTOFF`."""
    presolve: bool = True
    """Whether the solver may reduce a model before it solves it; faults of that are its most
    common ones."""
    tolerance: float = 1e-7
    """How far a row, a bound or an integer may be off, absolutely, in the solver's eyes."""
    log: Callable[[str], None] | None = None
    """Receives the solver's log as it comes, in pieces; None keeps the solver quiet."""
    options: Mapping[str, OptionValue] = field(default_factory=lambda: MappingProxyType({}))
    """The solver's own options by its own names, set last, so that they win."""

    def __post_init__(self) -> None:
        time_s = self.time_s is None or 0 < self.time_s < math.inf
        tolerance = _MIN_TOLERANCE <= self.tolerance <= _MAX_TOLERANCE
        checks = (
            ("time_s", "a finite number of seconds above 0", time_s),
            ("rel_gap", "a finite number of 0 or more", 0 <= self.rel_gap < math.inf),
            ("abs_gap", "a finite number of 0 or more", 0 <= self.abs_gap < math.inf),
            ("threads", "a whole number of 1 or more", _whole(self.threads, 1, _MAX_THREADS)),
            ("seed", f"a whole number from 0 to {_MAX_SEED}", _whole(self.seed, 0, _MAX_SEED)),
            ("objective_stop", "a finite number", math.isfinite(self.objective_stop or 0)),
            ("objective_cutoff", "a finite number", math.isfinite(self.objective_cutoff or 0)),
            ("tolerance", f"a number from {_MIN_TOLERANCE} to {_MAX_TOLERANCE}", tolerance),
        )
        faults = [
            f"{name}: expected {wanted}, got {getattr(self, name)!r}"
            for name, wanted, fine in checks
            if not fine
        ]
        if faults:
            raise InputError(faults)


def _whole(value: object, least: int, most: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least <= int(value) <= most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackendProgress:
    """How far a running solve has come, in the model's sense."""

    incumbent: float | None
    """Objective of the best solution so far; None without one."""
    bound: float | None
    """Best proven bound so far; None without one."""
    x: NDArray[np.float64] | None
    """The new best solution, integers rounded; None where this call does not bring a new one."""
    nodes: int | None = None
    """Nodes of the search tree so far, at most 1 at the root; None if the solver has not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a back end can do, beside solving a model to its end."""

    integers: bool = True
    """Solves models with integers; all solve linear ones."""
    starts: bool = True
    """Begins from values that it is given, and tells whether it could use them."""
    callbacks: bool = True
    """Reports solutions and bounds on the way, and stops when it is told to."""
    cutoffs: bool = True
    """Honours `Limits.objective_stop` and `Limits.objective_cutoff`."""
    absolute_gap: bool = True
    """Honours `Limits.abs_gap`."""
    log: bool = True
    """Passes its log on."""
    threads: bool = True
    """Uses more than one thread."""
    licence_free_size: int | None = None
    """Columns and rows that the licence in its package allows each; None if there is no limit."""


class SolverStatus(StrEnum):
    """Why a solver stopped; every back end has a closed table from its own statuses to these."""

    OPTIMAL = "optimal"
    """Gap at most the tolerance."""
    INFEASIBLE = "infeasible"
    """Proved: no solution at all."""
    UNBOUNDED = "unbounded"
    """Proved: there are solutions, and none is best."""
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
    INFEASIBLE_OR_UNBOUNDED = "infeasible_or_unbounded"
    """The solver left open which; never in what `Solver.solve` returns."""
    FAILED = "failed"
    """Not a result; `Solver.solve` raises instead."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Basis:
    """Where the optimum of a linear model lies, in values of the solver that has found it."""

    columns: Sequence[Any]
    """Whether each column is basic, or at which bound it is."""
    rows: Sequence[Any]
    """The same of each row."""
    basic: Any
    """Value that stands for "basic"; a row that the optimum did not know is so at first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawSolution:
    """Output of a solver; nothing in it has been verified yet.

    `Solver.run` gives status, solution, bound and nodes as the solver says them; `Solver.solve`
    makes them keep the common promises and adds the rest.
    """

    status: SolverStatus
    """Why it stopped."""
    x: NDArray[np.float64] | None = None
    """Best solution found, integers rounded, one value per column; None without one."""
    objective: float | None = None
    """Objective of `x`, computed from it, in the model's sense."""
    bound: float | None = None
    """Proven bound in the model's sense, never beyond `objective`; None without one."""
    nodes: int | None = None
    """Branch-and-bound nodes; None for a model without integers."""
    root_bound: float | None = None
    """Bound before the first branching; None without integers, or where there was none."""
    basis: Basis | None = None
    """Basis of the optimum of a model without integers, if the solver tells it."""
    build_s: float = 0.0
    """Time to hand the model over [s]."""
    solve_s: float = 0.0
    """Time in the solver [s]."""
    start_accepted: bool | None = None
    """True: the start is complete and feasible, so `x` is at least as good; False: it is complete
    and breaks the model; None: no start, or a partial one, which the solver may use as it can."""
    solved_again: bool = False
    """Whether a run went wrong, so that the model was solved again, in a safer way: what
    was reported before, bounds above all, is void."""

    @property
    def infeasible(self) -> bool:
        """Whether the solver proved that there is no solution at all."""
        return self.status is SolverStatus.INFEASIBLE
