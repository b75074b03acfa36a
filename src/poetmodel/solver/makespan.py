"""Solve problems whose time is the makespan of a plan, through surrogates whose time is a sum.

No row over stages states a makespan exactly. Two sums bound it from below for every plan: the time
of the core and that of the bus. The surrogate that limits both sums is a relaxation and proves the
bound. The surrogate ``compute + share * transfer`` is the core's time at share 0, and the time of a
plan without any overlap at share 1, which is always sufficient. The schedule of each surrogate is
planned, and the makespan of its plan is checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from poetmodel.errors import TimeLimitError
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.totals import Total
from poetmodel.result import ModelObjective, Termination
from poetmodel.solver.outcome import Candidate, Outcome, as_candidate, is_closed
from poetmodel.solver.request import GRACE_S, Request, SolveProgress
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.schedule import Schedule
    from poetmodel.solver.task import Task


RELAXATION_RATIO: Final = 0.5
"""Fraction of the time limit for the relaxation, if its schedule may miss the deadline."""
SURROGATE_RATIO: Final = 0.5
"""Fraction of the remaining time for each further surrogate."""
MIN_SHARE_STEP: Final = 1 / 64
"""Smallest difference between two transfer shares that the bisection distinguishes."""
TIME_SHARES: Final = (1 / 1024, 1 / 256, 1 / 64, 1 / 8, 1.0)
"""Transfer shares in the order in which they are tried if the makespan is minimized. Small ones are
first because most transfers can be hidden behind computations."""


@dataclass(slots=True)
class ShareSearch:
    """The search for the transfer share whose surrogate yields the best plan within all limits.

    `run` returns the best schedule whose plan meets all limits, verified with the plan, and a bound
    for all plans. The outcome is infeasible only if the relaxation is.
    """

    task: Task
    """Solves surrogates of the problem."""
    request: Request
    start: Schedule | None
    problem: Problem = field(init=False)
    best: Candidate | None = None
    bound: float = 0.0
    own_bound: float | None = None
    """Bound of the relaxation on the user-defined objective of a model."""
    nearest_s: float | None = None
    """Smallest makespan of a schedule that violates only the deadline [s]; None without one."""
    solved: list[tuple[float, Outcome]] = field(default_factory=list)
    """The tried shares with their outcomes."""

    def __post_init__(self) -> None:
        self.problem = self.task.planned_problem

    def run(self) -> Outcome:
        """Try transfer shares until the best plan is proved optimal or the time limit passes."""
        time_ratio = RELAXATION_RATIO if self._is_timed else 1.0
        try:
            if self.start is not None:
                self._verify_plan(self.start)
            relaxation_outcome, _ = self._try_share(0.0, ratio=time_ratio)
            if relaxation_outcome.infeasible:
                return relaxation_outcome
            if self._is_timed and self.problem.minimize == Quantity.TIME:
                self._minimize_times()
            elif self._is_timed:
                self._bisect_share()
                if self.best is None and self.task.can_restate:
                    self._minimize_times()
        except TimeLimitError:  # raised while a schedule was planned
            return replace(self._make_outcome(), termination=Termination.TIME_LIMIT)
        except KeyboardInterrupt:  # raised between two solves, which handle it themselves
            return replace(self._make_outcome(), termination=Termination.INTERRUPTED)
        return self._make_outcome()

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

    def _minimize_times(self) -> None:
        """Solve surrogates that minimize time, with growing shares, without the deadline.

        A plan may meet a deadline that the surrogate's sum misses. If another quantity is
        minimized, the first schedule whose plan meets all limits ends the loop.
        """
        problem, minimizes_time = self.problem, self.problem.minimize == Quantity.TIME
        if self.task.can_restate:
            problem = problem.without_limits(
                Quantity.TIME, minimize=Quantity.TIME, user_objective=()
            )
        for share in TIME_SHARES:
            if self._is_done() or not (minimizes_time or self.best is None):
                return
            self._try_share(share, problem=problem)

    def _bisect_share(self) -> None:
        """Bisect for the smallest transfer share whose plan meets all limits."""
        too_small, large_enough = 0.0, None
        while not self._is_done() and (
            large_enough is None or large_enough - too_small > MIN_SHARE_STEP
        ):
            share = 1.0 if large_enough is None else (too_small + large_enough) / 2
            outcome, meets_limits = self._try_share(share)
            if meets_limits or outcome.candidate is None or large_enough is None:
                large_enough = share
            else:
                too_small = share

    def _try_share(
        self, share: float, *, ratio: float | None = None, problem: Problem | None = None
    ) -> tuple[Outcome, bool]:
        """Solve the surrogate of one transfer share, for the problem or for one with other limits.

        Return the outcome, and whether the plan of its schedule meets all limits. The bound is
        raised.
        """
        request = self.request
        ratio = SURROGATE_RATIO if ratio is None else ratio
        limit_s = request.elapsed_s() + ratio * request.remaining_s()
        limited_request = replace(
            request, time_limit_s=max(limit_s, 1e-3), on_progress=self._progress_callback(share)
        )
        start_schedule = self.start if self.best is None else self.best.schedule
        base_problem = problem or self.problem
        outcome = self.task.solve_stated(
            base_problem.surrogate(transfer_fraction=share), limited_request, start_schedule
        )
        self.solved.append((share, outcome))
        self._raise_bound(share, outcome.bound)
        candidate = outcome.candidate
        meets_limits = candidate is not None and self._verify_plan(
            candidate.schedule, candidate.own, share=share
        )
        return outcome, meets_limits

    def _raise_bound(self, share: float, bound: float) -> None:
        """Raise the bound on all plans by that of a surrogate.

        The bound of the relaxation holds directly. Bounds of other surrogates hold only if time is
        minimized: no makespan is below the mean of compute and transfer time with weights 1 and
        `share`.
        """
        if share == 0:
            self.bound = max(self.bound, bound)
        elif self.problem.minimize == Quantity.TIME and self.problem.plans_all_transfers:
            whole_s = self.problem.surrogate(transfer_fraction=share).objective.baseline + bound
            self.bound = max(self.bound, whole_s / (1 + share) - self.problem.pass_time_s)

    def _verify_plan(
        self, schedule: Schedule, own: ModelObjective | None = None, *, share: float = 0.0
    ) -> bool:
        """Verify a schedule with its plan, and store it if it is the best.

        Return whether the schedule is valid. `own` is the user-defined objective of a model; the
        bound of the relaxation on it holds for every plan.
        """
        if own is not None:
            self.own_bound = own.bound if share == 0 else self.own_bound
            own = replace(own, bound=self.own_bound)
        candidate = replace(self._make_candidate(schedule), own=own)
        makespan_s = candidate.simulation.planned_s
        if candidate.violations:
            if makespan_s is not None and candidate.simulation.valid:
                nearest_s = self.nearest_s
                self.nearest_s = makespan_s if nearest_s is None else min(nearest_s, makespan_s)
            return False
        # A start has no value of the user-defined objective, so any solution replaces it.
        if self.best is None or (own and not self.best.own) or candidate.is_better(self.best):
            self.best = candidate
            if self._is_timed:  # the result may be ignored: the next solve reports again
                self.request.report(candidate.value, self.bound, schedule)
        return True

    def _make_candidate(self, schedule: Schedule) -> Candidate:
        """Verify a schedule with its plan.

        The plan has no overlapping transfers if no time is left to plan.
        """
        planning_s = self.request.remaining_s() + GRACE_S
        return as_candidate(self.problem, schedule, planning_s=planning_s)

    def _is_done(self) -> bool:
        """Return whether the gap is closed, a solve was interrupted or no time remains."""
        is_interrupted = any(
            outcome.termination == Termination.INTERRUPTED for _, outcome in self.solved
        )
        if is_interrupted or self.request.remaining_s() <= 0:
            return True
        if self.best is None:
            return False
        if self.best.own is not None:
            return self.best.own.gap <= self.request.gap
        return is_closed(self.problem, self.best.value, self.bound, self.request.gap)

    def _progress_callback(self, share: float) -> Callable[[SolveProgress], bool | None]:
        """Return the progress callback of a surrogate's solve.

        The callback forwards values of the stated problem. It forwards the surrogate's bound only
        for share 0, where the surrogate is a relaxation.
        """

        def report(progress: SolveProgress) -> bool | None:
            """Report the best schedule and the bound of the stated problem."""
            bound = self.bound
            if share == 0 and progress.overhead_bound is not None:
                bound = max(bound, progress.overhead_bound)
            if not self._is_timed:
                return self.request.report(progress.overhead, bound, progress.schedule)
            best = self.best
            if best is None:
                return self.request.report(None, bound)
            return self.request.report(best.value, bound, best.schedule)

        return report

    def _make_outcome(self) -> Outcome:
        """Return the outcome of all solves so far, with their shares in the statistics."""
        if not self.solved:
            return Outcome(termination=Termination.STALLED, candidate=self.best)
        outcomes = [outcome for _, outcome in self.solved]
        terminations = {outcome.termination for outcome in outcomes}
        if Termination.INTERRUPTED in terminations:
            termination = Termination.INTERRUPTED
        elif self.request.remaining_s() <= 0:
            termination = Termination.TIME_LIMIT
        elif self.best is not None and self._is_done():
            termination = Termination.PROVED
        elif Termination.TIME_LIMIT in terminations:
            termination = Termination.TIME_LIMIT
        else:
            termination = Termination.STALLED
        shares = [share for share, _ in self.solved]
        return Outcome(
            termination=termination,
            candidate=self.best,
            bound=self.bound,
            reason=self._no_schedule_reason(outcomes[-1]),
            versions=outcomes[0].versions,
            statistics={**outcomes[0].statistics, "shares": shares},
        ).with_solves(outcomes)

    def _no_schedule_reason(self, last: Outcome) -> str:
        """Return why no schedule was found, with the smallest makespan if there is a deadline."""
        if self.nearest_s is None or self.problem.deadline_s is None:
            return last.reason
        return (
            "no schedule was found whose plan meets the deadline of "
            f"{format_seconds(self.problem.deadline_s)} and the other limits; the best makespan "
            f"found is {format_seconds(self.nearest_s)}"
        )
