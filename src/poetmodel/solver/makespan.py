"""Solve problems whose time is the makespan of a plan, through surrogates whose time is a sum.

No row over stages states a makespan exactly. Two sums bound it from below for every plan: the time
of the core and, if plans execute all transfers, that of the bus. The surrogate that limits these
sums is a relaxation and proves the bound. The surrogate ``compute + weight * transfer`` is the
core's time at weight 0, and the time of a plan without any overlap at weight 1, which is an upper
bound on the makespan. The schedule of each surrogate is planned, and the makespan of its plan is
checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from poetmodel.clock import limit_time
from poetmodel.errors import TimeLimitError
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.rows import is_within
from poetmodel.problem.totals import Total
from poetmodel.result import ModelObjective, Termination
from poetmodel.solver.outcome import (
    Candidate,
    is_gap_closed,
    make_candidate,
    make_valid_candidate,
)
from poetmodel.solver.request import GRACE_S
from poetmodel.solver.statement import restate
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.schedule import Schedule
    from poetmodel.solver.policy import Policy
    from poetmodel.solver.search import Forward, Search
    from poetmodel.solver.task import Task


@dataclass(slots=True)
class TransferWeightSearch:
    """The search for the transfer weight whose surrogate yields the best plan within all limits."""

    search: Search
    """The search for the task's problem, whose best schedule has a plan within all limits."""
    task: Task
    """The task whose problem is stated; solves its surrogates."""
    start: Schedule | None
    """The user's first schedule; None without one."""
    problem: Problem = field(init=False)
    """`Task.planned_problem` of the task."""
    model_bound: float | None = None
    """Bound of the relaxation on the user-defined objective of a model; None without one."""
    min_late_makespan_s: float | None = None
    """Smallest makespan of the schedules whose plan violates limits [s]; None without one."""
    surrogates: list[tuple[float, Search]] = field(default_factory=list)
    """The tried weights with the searches of their surrogates."""
    is_enough: Callable[[Candidate], bool] | None = None
    """Called with each schedule whose plan meets all limits; the search ends once it is True."""
    has_enough: bool = False
    """Whether `is_enough` ended the search."""

    def __post_init__(self) -> None:
        self.problem = self.task.planned_problem

    def find_schedule(self) -> None:
        """Try transfer weights; find the best schedule whose plan meets all limits, and a bound.

        Verifies `start` first. Weight 0, the relaxation, follows, then, if the makespan matters,
        `time_weights` of the policy or a bisection. If that finds no plan within all limits, the
        search for the least makespan follows, except for a user's model.
        """
        try:
            self.try_weights()
            if not self.search.is_infeasible:
                self._end_search()
        except TimeLimitError:  # raised while a schedule was planned
            self._end_search(Termination.TIME_LIMIT)
        except KeyboardInterrupt:  # raised between two solves, which handle it themselves
            self._end_search(Termination.INTERRUPTED)

    def try_weights(self) -> None:
        """Search as `find_schedule` describes; an infeasible relaxation ends the search."""
        search = self.search
        relaxation_ratio = self._policy.relaxation_time_ratio if self._is_timed else 1.0
        if self.start is not None:
            with limit_time(search.request.remaining_s() + GRACE_S):
                check = self.task.check_start(self.start)
            if check.is_solution:
                self._verify_plan(self.start, check.model_objective)
        relaxation, _ = self._try_weight(0.0, time_ratio=relaxation_ratio)
        if relaxation.is_infeasible:
            search.end_as(relaxation)
            search.is_infeasible, search.build_s = True, relaxation.build_s
            return
        if self._is_timed and self.problem.minimize == Quantity.TIME:
            self._minimize_time()
        elif self._is_timed:
            self._bisect_weight()
        is_restatable = self.task.can_restate and (
            self.problem.minimize != Quantity.TIME or self.problem.deadline_s is not None
        )
        if self._is_timed and search.best is None and is_restatable:
            self._search_least_makespan()

    @property
    def _policy(self) -> Policy:
        return self.search.request.policy

    @property
    def _is_timed(self) -> bool:
        """Whether the makespan matters: it is limited, minimized, or its idle energy is limited."""
        problem = self.problem
        limits_energy = problem.energy_budget_j is not None or any(
            Total.ENERGY in row.terms for row in problem.constraints
        )
        has_idle_energy = problem.idle_power_w > 0 and limits_energy
        return (
            problem.deadline_s is not None or problem.minimize == Quantity.TIME or has_idle_energy
        )

    def _minimize_time(self) -> None:
        """Solve surrogates with each of `time_weights`, without the deadline, until done.

        A plan may meet a deadline that the surrogate's sum misses.
        """
        problem = self.problem
        if self.task.can_restate:
            problem = problem.without_limits(Quantity.TIME)
        for weight in self._policy.time_weights:
            if self._is_done():
                return
            self._try_weight(weight, problem=problem)

    def _search_least_makespan(self) -> None:
        """Search for the least makespan without the deadline, until a plan meets all limits."""
        if self._is_done():
            return
        problem = self.problem.without_limits(
            Quantity.TIME, minimize=Quantity.TIME, user_objective=()
        )
        TransferWeightSearch(
            self.search.child(problem, bound=0.0, parent=None, forward=self._forward(1.0)),
            replace(self.task, problem=problem),
            self.start,
            surrogates=self.surrogates,
            is_enough=self._meets_limits,
        ).try_weights()

    def _meets_limits(self, candidate: Candidate) -> bool:
        """Return whether the plan of a candidate without the deadline meets all limits."""
        makespan_s = candidate.simulation.planned_s
        if makespan_s is not None and not is_within(makespan_s, self.problem.deadline_s):
            self._note_late_plan(makespan_s)
            return False
        return self._verify_plan(candidate.schedule)

    def _bisect_weight(self) -> None:
        """Bisect for the smallest transfer weight whose plan meets all limits, starting with 1.

        After a surrogate without a schedule, whose limit is too strict, the weight decreases.
        Without a plan within all limits, leaves `least_makespan_time_ratio` of the time.
        """
        small_weight, sufficient_weight = 0.0, None
        policy = self._policy
        reserved_s = policy.least_makespan_time_ratio * self.search.request.remaining_s()
        while not self._is_done() and (
            sufficient_weight is None or sufficient_weight - small_weight > policy.min_weight_step
        ):
            if self.search.best is None and self.search.request.remaining_s() <= reserved_s:
                return
            weight = 1.0 if sufficient_weight is None else (small_weight + sufficient_weight) / 2
            surrogate, meets_limits = self._try_weight(weight)
            if meets_limits or surrogate.best is None or sufficient_weight is None:
                sufficient_weight = weight
            else:
                small_weight = weight

    def _try_weight(
        self, weight: float, *, time_ratio: float | None = None, problem: Problem | None = None
    ) -> tuple[Search, bool]:
        """Solve a surrogate; return its search, and whether its plan meets all limits.

        `problem` replaces the stated problem; `time_ratio` is a fraction of the remaining time.
        """
        request, best = self.search.request, self.search.best
        time_ratio = self._policy.surrogate_time_ratio if time_ratio is None else time_ratio
        limit_s = request.elapsed_s() + time_ratio * request.remaining_s()
        surrogate = self.search.child(
            restate(problem or self.problem, transfer_weight=weight),
            request=replace(request, time_limit_s=max(limit_s, 1e-3)),
            bound=0.0,
            parent=None,
            forward=self._forward(weight),
        )
        self.surrogates.append((weight, surrogate))
        self.task.solve(surrogate, self.start if best is None else best.schedule)
        self._raise_bound(weight, surrogate.bound)
        found = surrogate.best
        meets_limits = found is not None and self._verify_plan(
            found.schedule, found.model_objective, weight=weight
        )
        return surrogate, meets_limits

    def _raise_bound(self, weight: float, bound: float) -> None:
        """Raise the bound on all plans to the one that the bound of a surrogate implies.

        If time is minimized and plans execute all transfers, no makespan is below the mean of
        compute and transfer time with weights 1 and `weight`. Weight 0 is a relaxation.
        """
        if weight == 0:
            self._raise_to(bound)
        elif self.problem.minimize == Quantity.TIME and self.problem.plans_all_transfers:
            min_time_s = restate(self.problem, transfer_weight=weight).objective.baseline + bound
            self._raise_to(min_time_s / (1 + weight) - self.problem.pass_time_s)

    def _raise_to(self, bound: float) -> None:
        """Raise the bound of the search without a report: the next solve reports."""
        self.search.bound = max(self.search.bound, bound)

    def _verify_plan(
        self,
        schedule: Schedule,
        model_objective: ModelObjective | None = None,
        *,
        weight: float = 0.0,
    ) -> bool:
        """Verify a schedule with its plan; store it if it is the best; return whether it is valid.

        The bound of `model_objective` holds for every plan only at weight 0.
        """
        if model_objective is not None:
            self.model_bound = model_objective.bound if weight == 0 else self.model_bound
            model_objective = replace(model_objective, bound=self.model_bound)
            best = self.search.best
            if best is not None and best.model_objective is not None:
                known_objective = replace(best.model_objective, bound=self.model_bound)
                self.search.best = replace(best, model_objective=known_objective)
        candidate = replace(self._make_candidate(schedule), model_objective=model_objective)
        makespan_s = candidate.simulation.planned_s
        if candidate.violations:
            if makespan_s is not None and candidate.simulation.valid:
                self._note_late_plan(makespan_s)
            return False
        if self.is_enough is not None:
            self.has_enough = self.is_enough(candidate)
        # A start has no value of the user-defined objective, so any solution replaces it.
        search, best = self.search, self.search.best
        if (
            best is None
            or (model_objective and not best.model_objective)
            or candidate.is_better(best)
        ):
            search.best = candidate
            if self._is_timed:  # the result may be ignored: the next solve reports again
                search.report()
        return True

    def _note_late_plan(self, makespan_s: float) -> None:
        if self.min_late_makespan_s is None or makespan_s < self.min_late_makespan_s:
            self.min_late_makespan_s = makespan_s

    def _make_candidate(self, schedule: Schedule) -> Candidate:
        """Verify a schedule with its plan, without overlap if no time remains to plan."""
        planning_s = self.search.request.remaining_s() + GRACE_S
        return make_candidate(self.problem, schedule, planning_s=planning_s)

    def _is_done(self) -> bool:
        """Return whether the gap of `best` is closed, `is_enough`, or the solve must end."""
        search, best = self.search, self.search.best
        is_interrupted = any(
            surrogate.termination == Termination.INTERRUPTED for _, surrogate in self.surrogates
        )
        if self.has_enough or is_interrupted or search.request.remaining_s() <= 0:
            return True
        if best is None:
            return False
        if best.model_objective is not None:
            return best.model_objective.gap <= search.request.gap
        return is_gap_closed(self.problem, best.value, search.bound, search.request.gap)

    def _forward(self, weight: float) -> Forward:
        """Return a function that forwards a surrogate's reports; its bound only at weight 0."""

        def report(value: float | None, bound: float | None, schedule: Schedule | None) -> bool:
            if self._is_timed:
                value, schedule = None, None
            return self.search.report(value, bound if weight == 0 else None, schedule)

        return report

    def _end_search(self, termination: Termination | None = None) -> None:
        """End the search after all solves so far, by default as these ended."""
        search, surrogates = self.search, [surrogate for _, surrogate in self.surrogates]
        terminations = {surrogate.termination for surrogate in surrogates}
        if termination is not None:
            self._take_unplanned(surrogates[-1:])
        elif Termination.INTERRUPTED in terminations:
            termination = Termination.INTERRUPTED
        elif surrogates and search.request.remaining_s() <= 0:
            termination = Termination.TIME_LIMIT
        elif surrogates and search.best is not None and self._is_done():
            termination = Termination.PROVED
        elif Termination.TIME_LIMIT in terminations:
            termination = Termination.TIME_LIMIT
        else:
            termination = Termination.STALLED
        reason = self._no_schedule_reason(surrogates[-1]) if surrogates else ""
        search.end(termination, reason)
        if surrogates:
            weights = [weight for weight, _ in self.surrogates]
            search.versions = surrogates[0].versions
            search.build_s = sum(surrogate.build_s for surrogate in surrogates)
            search.statistics = {**surrogates[0].statistics, "transfer_weights": weights}

    def _take_unplanned(self, surrogates: Sequence[Search]) -> None:
        """Store the best schedule of the first of `surrogates`, which ended before planning it."""
        counts = not self._is_timed and self.task.can_restate and self.task.is_exact
        if counts and surrogates and surrogates[0].best is not None:
            schedule = surrogates[0].best.schedule
            candidate = make_valid_candidate(self.search.problem, schedule)
            if candidate is not None:
                self.search.store_if_best(candidate)

    def _no_schedule_reason(self, last: Search) -> str:
        """Return the reason why no schedule was found, such as a missed deadline."""
        if self.min_late_makespan_s is None or self.problem.deadline_s is None:
            return last.reason
        return (
            "no schedule was found whose plan meets the deadline of "
            f"{format_seconds(self.problem.deadline_s)} and the other limits; the best makespan "
            f"found is {format_seconds(self.min_late_makespan_s)}"
        )
