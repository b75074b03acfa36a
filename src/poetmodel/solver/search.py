"""The state of a solve: best verified schedule, proven bound, clock, log, counts and reports.

A `Search` is for one problem. A solve of a related problem is a child of it (`Search.child`), which
shares the log and the stop. Values and bounds of a child with the same objective are those of its
parent, so that its schedules reach the parent at once; a bound never does by itself, because a
bound of another problem is none of this one: only `Search.prove` raises it.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.problem import Problem, Quantity
from poetmodel.result import SolveResult, Status, Termination, relative_gap
from poetmodel.solver.outcome import (
    BYTES_TOLERANCE,
    EQUALITY_TOLERANCE,
    TOTAL_TOLERANCE,
    Candidate,
    is_gap_closed,
    make_candidate,
    reported_bound,
)
from poetmodel.solver.request import Request, SolveProgress
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.result import HistoryEntry
    from poetmodel.schedule import Schedule

    Forward = Callable[[float | None, float | None, Schedule | None], bool]
    """Receives value, bound and schedule of a report; returns whether the search continues."""

REFUTED: Final = "a verified schedule refutes the proof of the solver, and no valid proof was found"
"""Reason of a result whose schedule contradicts the proof, which is dropped."""
CUT_SHORT: Final = frozenset({Termination.TIME_LIMIT, Termination.INTERRUPTED})
"""Terminations before the end of a proof."""
MAX_HISTORY_ENTRIES: Final = 100
"""Maximum number of entries of a history. When it is exceeded, every second entry is deleted."""


@dataclass(slots=True, kw_only=True, eq=False)
class Search:
    """The state of a solve: best schedule, bound, and whether to continue. Thread-safe.

    Values are those of the minimized quantity minus its baseline, in the unit of the quantity.
    """

    problem: Problem
    request: Request
    """Options and clock."""
    best: Candidate | None = None
    """Best schedule that the verifier accepted; ``paper`` may have one with violations."""
    bound: float = 0.0
    """Best proven bound, from the start at least the objective's `known_bound`."""
    ceiling: float = math.inf
    """Value from which schedules are useless. The search ends when the bound reaches it."""
    target: float = -math.inf
    """Value of a schedule with which the search ends."""
    give_up_s: float = math.inf
    """Time since the request at which a search without any schedule ends [s]."""
    states_bound: bool = True
    """Whether reports state the bound; False if the search minimizes another objective."""
    termination: Termination | None = None
    """Reason for the end of the search; None before."""
    is_infeasible: bool = False
    """Whether it is proved that no schedule exists."""
    reason: str = ""
    """Reason why no schedule was found, or `REFUTED`. With a schedule, other texts are ignored."""
    build_s: float = 0.0
    """Time to build and compile models, those of children included [s]."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the solver and its wrapper, by name."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """Size of the solved model, such as ``columns`` and ``rows``, and further metrics by name."""
    log: list[str] = field(default_factory=list)
    stop_reason: Termination | None = None
    """Termination if the search was stopped; None otherwise."""
    stop_event: threading.Event = field(default_factory=threading.Event)
    """Event that ends the running solver call, and then the search."""
    is_abandoned: bool = False
    """Whether the thread of the search exceeded the limit; what it still finds is ignored."""
    parent: Search | None = None
    """The search that receives each better schedule; None without one."""
    forward: Forward | None = None
    """Receives the reports; None for the user's callback."""
    history: list[HistoryEntry] = field(default_factory=list)
    """Time of each improving report [s], with the best value and bound until then."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Lock of best schedule and bound."""
    report_lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Lock held during a report, so that reports are sequential and in order."""

    def __post_init__(self) -> None:
        self.bound = max(self.bound, self.problem.objective.known_bound)

    def child(self, problem: Problem, **fields: Any) -> Search:
        """Return a related problem's search with this request, bound and log; `fields` override."""
        shared: dict[str, Any] = {
            "request": self.request,
            "bound": self.bound,
            "log": self.log,
            "stop_event": self.stop_event,
            "parent": self,
            "forward": self.report,
        }
        return Search(problem=problem, **{**shared, **fields})

    # -- schedules and bounds ------------------------------------------------------------------

    def offer(self, schedule: Schedule) -> bool:
        """Verify a schedule without its unneeded decisions; store and report it if it is the best.

        Return whether the schedule is valid. Rewarded decisions count as needed.
        """
        problem = self.problem
        needed_decisions = PartialSchedule.from_schedule(
            problem.graph, schedule, problem.rewards, working_graph=problem.working_graph
        )
        candidate = make_candidate(problem, needed_decisions.schedule())
        if candidate.violations:
            return False
        self.accept(candidate)
        return True

    def accept(self, candidate: Candidate) -> None:
        """Store a valid candidate if it is the best, and report it."""
        if self.store_if_best(candidate):
            self.report()

    def store_if_best(self, candidate: Candidate) -> bool:
        """Store a valid candidate here and in parents, if it is the best; return whether it is."""
        with self.lock:
            is_better = self.best is None or candidate.is_better(self.best)
            if self.is_abandoned or not is_better:
                return False
            self.best = candidate
        if self.parent is not None:
            self.parent.store_if_best(candidate)
        return True

    def settle(self, candidate: Candidate) -> None:
        """Replace the best schedule by the solution of a user's model, whose rows only it meets."""
        self.best = candidate
        if self.parent is not None:
            self.parent.store_if_best(candidate)

    def prove(self, bound: float) -> None:
        """Raise the proven bound to `bound` and report it, if that is higher."""
        with self.lock:
            is_higher = bound > self.bound and not self.is_abandoned
            if is_higher:
                self.bound = bound
        if is_higher:
            self.report()

    def replace_bound(self, bound: float) -> None:
        """Set and report the proven bound, also a lower one if a solver's bound was wrong."""
        with self.lock:
            is_changed = bound != self.bound and not self.is_abandoned
            if is_changed:
                self.bound = bound
        if is_changed:
            self.report()

    def best_known(self) -> tuple[float, Candidate | None]:
        """Return the proven bound and the best schedule so far."""
        return self.bound, self.best

    def upper_value(self) -> float | None:
        """Return the smaller of the best value and `ceiling`; None without either."""
        best = self.best
        upper = self.ceiling if best is None else min(best.value, self.ceiling)
        return None if math.isinf(upper) else upper

    def gap(self) -> float:
        """Return the gap between `bound` and `upper_value`; infinite without the latter."""
        upper = self.upper_value()
        return math.inf if upper is None else relative_gap(upper, self.bound)

    def is_closed(self) -> bool:
        """Return whether the gap is closed, or the bound reaches `ceiling`, or a value `target`."""
        with self.lock:
            best = self.best
            if self.bound >= self.ceiling or (best is not None and best.value <= self.target):
                return True
            return best is not None and is_gap_closed(
                self.problem, best.value, self.bound, self.request.gap
            )

    # -- end -----------------------------------------------------------------------------------

    def is_done(self) -> bool:
        """Return whether the search is closed or stopped, or its time is up; set `stop_reason`."""
        if self.stop_reason is None and self.stop_event.is_set():
            self.stop_reason = Termination.INTERRUPTED
        gives_up = self.best is None and self.request.elapsed_s() > self.give_up_s
        if self.stop_reason is None and (gives_up or self.request.remaining_s() <= 0):
            self.stop_reason = Termination.TIME_LIMIT
        return self.stop_reason is not None or self.is_closed()

    def stall(self) -> None:
        """Stop the search, unless it is done, because nothing would change its results."""
        if not self.is_done():
            self.stop_reason = Termination.STALLED

    def abandon(self) -> None:
        """End the search and its reports, because its thread exceeded the time limit."""
        with self.report_lock, self.lock:
            self.is_abandoned = True
        self.stop_reason = self.stop_reason or Termination.TIME_LIMIT

    def end(
        self, termination: Termination, reason: str = "", *, is_infeasible: bool = False
    ) -> None:
        """State why the search ended, and why no schedule was found if there is none."""
        self.termination, self.reason = termination, reason
        self.is_infeasible = is_infeasible

    def end_as(self, child: Search) -> None:
        """End as a child ended, with its statistics; its bound is not taken over."""
        self.end(child.termination or Termination.STALLED, child.reason)
        self.statistics, self.versions = child.statistics, child.versions

    def resume(self, **changes: Any) -> None:
        """Continue a search that has ended, with fields of its request replaced by `changes`."""
        self.stop_reason, self.give_up_s = None, math.inf
        self.termination, self.reason, self.is_infeasible = None, "", False
        self.request = replace(self.request, **changes)

    def add_build_time(self, seconds: float) -> None:
        """Add the time to build a model, to this search and to its parents."""
        with self.lock:
            self.build_s += seconds
        if self.parent is not None:
            self.parent.add_build_time(seconds)

    # -- reports -------------------------------------------------------------------------------

    def report(
        self,
        value: float | None = None,
        bound: float | None = None,
        schedule: Schedule | None = None,
    ) -> bool:
        """Report the best schedule and the bound; return whether the search continues.

        `value` and `bound` of a running solver or a child replace worse ones. The user's callback
        may stop the search: then `stop_reason` is INTERRUPTED.
        """
        with self.report_lock:
            if self.is_abandoned:
                return False
            best = self.best
            known_bound = self.bound if self.states_bound else None
            bound = max((b for b in (bound, known_bound) if b is not None), default=None)
            if best is not None and (value is None or best.value <= value):
                value, schedule = best.value, best.schedule
                if bound is not None:
                    bound = min(bound, max(value, self.bound))
            send = self.forward or self._notify_user
            if not send(value, bound, schedule):
                self.stop_reason = self.stop_reason or Termination.INTERRUPTED
            return self.stop_reason is None

    def _notify_user(
        self, value: float | None, bound: float | None, schedule: Schedule | None
    ) -> bool:
        """Add a report to the history; call the user's callback, return False if it stops."""
        progress = SolveProgress(
            seconds=self.request.elapsed_s(),
            overhead=value,
            overhead_bound=bound,
            baseline=self.problem.objective.baseline,
            schedule=schedule,
        )
        known_values = [known for known in (value, bound) if known is not None]
        if known_values and all(map(math.isfinite, known_values)):
            _add_entry(self.history, (progress.seconds, value, bound))
        on_progress = self.request.on_progress
        return on_progress is None or on_progress(progress) is not False

    # -- results -------------------------------------------------------------------------------

    def is_refuted(self) -> bool:
        """Return whether the valid best schedule contradicts the bound or infeasibility."""
        best, objective = self.best, self.problem.objective
        if best is None or best.violations or best.model_objective is not None:
            return False
        tolerance = BYTES_TOLERANCE
        if not objective.is_in_bytes:
            tolerance = EQUALITY_TOLERANCE * abs(best.value)
            tolerance += TOTAL_TOLERANCE * abs(objective.baseline)
        return self.is_infeasible or self.bound > best.value + tolerance

    def drop_proof(self) -> None:
        """Drop bound and infeasibility, with the reason `REFUTED`."""
        self.bound = self.problem.objective.known_bound
        is_proved = self.termination == Termination.PROVED
        self.end(Termination.STALLED if is_proved or not self.termination else self.termination)
        self.reason = REFUTED

    def result(self, *, formulation: str, reduction: str = "") -> SolveResult:
        """Return the result of a search that has ended; drops a proof that its schedule refutes."""
        problem, request, objective = self.problem, self.request, self.problem.objective
        base_result = SolveResult(
            problem=problem,
            status=Status.INFEASIBLE if self.is_infeasible else Status.UNKNOWN,
            termination=self.termination or Termination.STALLED,
            reason=self.reason,
            formulation=formulation,
            reduction=reduction,
            backend=request.backend,
            solver_options=dict(request.solver_options),
            time_limit_s=float(request.time_limit_s),
            requested_gap=float(request.gap),
            build_s=self.build_s,
            solve_s=max(0.0, request.elapsed_s() - self.build_s),
            versions={"poetmodel": __version__, **self.versions},
            statistics=self.statistics,
            log="".join(self.log),
        )
        if self.is_refuted():
            self.drop_proof()
        best = self.best
        if best is None:
            if not self.is_infeasible:
                base_result = replace(base_result, termination=self._unproved_termination())
            return replace(base_result, history=tuple(self.history))
        model_objective, bound = best.model_objective, 0.0
        if not best.violations and model_objective is None:
            bound = reported_bound(problem, best, self.bound)
        gap = relative_gap(best.value, bound) if model_objective is None else model_objective.gap
        is_proved = not best.violations and gap <= request.gap
        total_bound = min(objective.baseline + bound, objective.value_of(best.simulation))
        result = replace(
            base_result,
            status=Status.OPTIMAL if is_proved else Status.FEASIBLE,
            termination=Termination.PROVED if is_proved else self._unproved_termination(),
            schedule=best.schedule,
            simulation=best.simulation,
            violations=best.violations,
            objective_bound=total_bound if model_objective is None else None,
            model_objective=model_objective,
            verify_s=best.verify_s,
            overhead_bound_j=bound if problem.minimize == Quantity.ENERGY else 0.0,
            reason=REFUTED if self.reason == REFUTED else "",
        )
        return replace(result, history=_complete_history(self.history, result))

    def _unproved_termination(self) -> Termination:
        """Return the termination without a valid proof: STALLED in place of PROVED."""
        is_proved = self.termination in (None, Termination.PROVED)
        return Termination.STALLED if is_proved or not self.termination else self.termination


# -- history ---------------------------------------------------------------------------------------


def _add_entry(entries: list[HistoryEntry], entry: HistoryEntry) -> None:
    """Append an entry with the best values so far; beyond `MAX_HISTORY_ENTRIES`, thin them."""
    if entries:
        _, value, bound = entries[-1]
        values = [known for known in (entry[1], value) if known is not None]
        bounds = [known for known in (entry[2], bound) if known is not None]
        entry = (entry[0], min(values, default=None), max(bounds, default=None))
        if entry[1:] == entries[-1][1:]:
            return
    entries.append(entry)
    if len(entries) > MAX_HISTORY_ENTRIES:
        del entries[1:-1:2]


def _complete_history(entries: list[HistoryEntry], result: SolveResult) -> tuple[HistoryEntry, ...]:
    """Return the entries before the end of a solve, and its result as the last entry.

    Entries better than the result are corrected, because a solver may revise its reports.
    """
    simulation, objective = result.simulation, result.problem.objective
    if result.model_objective is not None or simulation is None:
        return ()
    value, bound = objective.overhead_of(simulation), result.proven_bound - objective.baseline
    if result.problem.minimize == Quantity.ENERGY:
        bound = result.overhead_bound_j
    earlier_entries = [
        (
            seconds,
            None if earlier_value is None else max(earlier_value, value),
            None if earlier_bound is None else min(earlier_bound, bound),
        )
        for seconds, earlier_value, earlier_bound in entries
        if seconds < result.wall_s
    ]
    return (*earlier_entries, (result.wall_s, value, bound))
