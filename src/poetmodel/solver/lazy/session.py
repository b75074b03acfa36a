"""The relaxations of a lazy solve, in the units of its problem, and the calls of the solver."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.protocol import (
    BackendProgress,
    Basis,
    RawSolution,
    SolverStatus,
)
from poetmodel.backends.registry import backend
from poetmodel.clock import limit_time
from poetmodel.heuristics.penalties import PenalizedObjective
from poetmodel.model.events import recomputable_nodes
from poetmodel.solver.lazy.relaxation import Relaxation
from poetmodel.solver.outcome import SOLVER_ERROR, safe_bound
from poetmodel.solver.policy import CUT_FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from poetmodel.backends.solver import Solver
    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.model.grouping import Grouping
    from poetmodel.solver.policy import Policy
    from poetmodel.solver.search import Search

CUTOFF_MARGIN: Final = 2 * SOLVER_ERROR
"""Distance of a cutoff above a value: in units of the objective, plus the same fraction of the
value. If a solver finds no point below the cutoff, no point is below the value, in spite of the
solver's tolerances."""


@dataclass(slots=True)
class Session:
    """The relaxations of a search, and the calls that solve them. Thread-safe."""

    search: Search
    max_columns: int = 0
    """Maximum number of columns of a solved model, linear or integer."""
    max_rows: int = 0
    """Maximum number of rows of a solved model, cuts included."""
    n_nodes: int = 0
    """Number of branch-and-bound nodes of all integer models."""
    root_bound: float | None = None
    """Bound before the first integer model, without the baseline, in the unit of the minimized
    quantity; None before that model."""
    solver: Solver = field(init=False)
    is_recomputable: tuple[bool, ...] = field(init=False)
    """Whether models have decisions to recompute a node, by node: `recomputable_nodes`."""
    penalized_objective: PenalizedObjective | None = field(init=False, default=None)
    """Penalized objective if user-defined constraints or the objective reward decisions; None
    otherwise."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Lock of `max_columns` and `max_rows`."""

    def __post_init__(self) -> None:
        problem = self.search.problem
        self.solver = backend(self.search.request.backend)
        self.is_recomputable = recomputable_nodes(problem)
        if any(any(column) for column in problem.rewards):
            self.penalized_objective = PenalizedObjective(problem)

    @property
    def policy(self) -> Policy:
        """The parameters of the search."""
        return self.search.request.policy

    # -- models and solver ---------------------------------------------------------------------

    def build_relaxation(
        self, grouping: Grouping, coarser_relaxation: Relaxation | None = None
    ) -> Relaxation:
        """Build the relaxation of a grouping with its separators, and the cuts of a coarser one.

        Raises `TimeLimitError` if the remaining time of the search passes.
        """
        search = self.search
        with limit_time(search.request.remaining_s()):
            relaxation = Relaxation.build(
                search.problem,
                grouping,
                self.is_recomputable,
                drops_dominated_keeps=self.policy.drops_dominated_keeps,
            )
            for family in CUT_FAMILIES:
                if family in self.policy.cuts:
                    module = import_module(f"poetmodel.solver.lazy.cuts.{family}")
                    separator = module.make_separator(relaxation, self.policy, search.is_done)
                    relaxation.separators[family] = separator
            if coarser_relaxation is not None:
                relaxation.restate_cuts(coarser_relaxation)
        search.add_build_time(relaxation.build_s)
        return relaxation

    def cutoff_limits(self, relaxation: Relaxation) -> dict[str, float]:
        """Return the limit of a search for better schedules only; {} without a known value."""
        upper = self.search.upper_value()
        if upper is None:
            return {}
        value = upper / relaxation.unit
        return {"objective_cutoff": value + CUTOFF_MARGIN * (1.0 + abs(value))}

    def to_problem_bound(self, relaxation: Relaxation, bound: float) -> float:
        """Convert an integer solve's bound to the problem's unit, limited to `upper_value`.

        Without a point below the cutoff, `CUTOFF_MARGIN` above `upper_value`, the proof holds up to
        `upper_value` only. A much larger bound contradicts the best schedule, and is not limited.
        """
        value = safe_bound(self.search.problem, bound) * relaxation.unit
        upper = self.search.upper_value()
        if upper is None or value > upper + 2 * CUTOFF_MARGIN * (relaxation.unit + abs(upper)):
            return value
        return min(value, upper)

    def start_point(self, relaxation: Relaxation) -> NDArray[Any] | None:
        """Return the incumbent as a point of a relaxation; None if that cannot represent it."""
        incumbent = self.search.best
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
        """Solve a relaxation's form with one thread, within the remaining time and `max_s`.

        `progress_callback` may raise the bound; if it returns False, only this call ends. The
        caller raises the bound to that of the result. None if no time remains or the search was
        stopped.
        """
        search, request = self.search, self.search.request
        wall_s, remaining_s = request.remaining_wall_s(), request.remaining_s()
        if min(wall_s, remaining_s) <= 0 or search.stop_reason is not None:
            search.is_done()
            return None
        max_s = remaining_s if max_s is None else min(max_s, remaining_s)
        counts_processor, end_s = request.wall_end_s is not None, request.elapsed_s() + max_s
        is_late = False
        limits = replace(
            request.solver_limits(wall_s if counts_processor else max_s, rel_gap=request.gap / 2),
            log=search.log.append,
            **(extra_limits or {}),
        )

        def on_progress(progress: BackendProgress) -> bool:
            nonlocal is_late
            is_late = counts_processor and request.elapsed_s() > end_s
            if progress.is_restart:
                search.replace_bound(known_bound)
            if progress_callback is not None and not progress_callback(progress):
                return False
            search.report()
            return search.stop_reason is None and not is_late

        with self.lock:
            self.max_columns = max(self.max_columns, form.n_columns)
            self.max_rows = max(self.max_rows, form.n_rows)
        known_bound = search.bound
        if form.is_mip and self.root_bound is None:
            self.root_bound = known_bound
        raw = self.solver.solve(
            form, limits, start=start, basis=basis, on_progress=on_progress, stop=search.stop_event
        )
        self.n_nodes += raw.nodes or 0
        if raw.status == SolverStatus.INTERRUPTED:
            if is_late:
                raw = replace(raw, status=SolverStatus.TIME_LIMIT)
            search.is_done()  # sets `stop_reason` after Ctrl-C
        return raw
