"""Problems whose time is the makespan of a plan: solved through surrogates, sums that bound it.

No row over stages states a makespan exactly. Two sums bound it from below, whatever the plan: core
and bus are each busy for the whole of their work. The surrogate of both is a relaxation and gives
the bound. ``compute + share * transfer`` moves from there (share 0) to the time of a plan without
any overlap (share 1), which is enough. The schedule of each is planned, and the plan is timed.
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
"""Share of the time limit for the relaxation, where its schedule may miss the deadline."""
SURROGATE_RATIO: Final = 0.5
"""Share of the time that is left for each further surrogate."""
LEAST_STEP: Final = 1 / 64
"""Transfer shares closer than this are not told apart."""
TIME_SHARES: Final = (1 / 1024, 1 / 256, 1 / 64, 1 / 8, 1.0)
"""Transfer shares that are tried in turn where the makespan is minimized: first those in which
transfers hardly count, since most of them can be hidden."""


@dataclass(slots=True)
class ShareSearch:
    """The search for a transfer share whose plan keeps every limit, best of all.

    The outcome of `run` has the best schedule whose plan does, verified with its plan, and a bound
    on all of them. It is infeasible only where the relaxation is.
    """

    task: Task
    """Answers surrogates of the problem."""
    request: Request
    start: Schedule | None
    problem: Problem = field(init=False)
    best: Candidate | None = None
    bound: float = 0.0
    own_bound: float | None = None
    """Bound of the relaxation on the model's own objective."""
    nearest_s: float | None = None
    """Least makespan seen of a schedule that breaks no other limit [s]."""
    solved: list[tuple[float, Outcome]] = field(default_factory=list)
    """The shares tried, with how each ended."""

    def __post_init__(self) -> None:
        self.problem = self.task.planned

    def run(self) -> Outcome:
        """Try shares until one is proved to be the best, or no time is left."""
        first = RELAXATION_RATIO if self._timed else 1.0
        try:
            if self.start is not None:
                self._take(self.start)
            relaxed, _ = self._try_share(0.0, ratio=first)
            if relaxed.infeasible:
                return relaxed
            if self._timed and self.problem.minimize == Quantity.TIME:
                self._makespan_shares()
            elif self._timed:
                self._bisect()
                if self.best is None and self.task.restates:
                    self._makespan_shares()
        except TimeLimitError:  # while a schedule is planned, which may take long, too
            return replace(self._outcome(), termination=Termination.TIME_LIMIT)
        except KeyboardInterrupt:  # between two solves, which take care of it themselves
            return replace(self._outcome(), termination=Termination.INTERRUPTED)
        return self._outcome()

    @property
    def _timed(self) -> bool:
        """Whether the makespan decides on anything."""
        problem = self.problem
        of_energy = problem.energy_budget_j is not None or any(
            Total.ENERGY in row.terms for row in problem.constraints
        )
        idles = problem.idle_power_w > 0 and of_energy
        return problem.deadline_s is not None or problem.minimize == Quantity.TIME or idles

    def _makespan_shares(self) -> None:
        """Minimize sums of times, without the deadline: a plan may keep one that the sum misses.

        Where something else is minimized, any schedule whose plan keeps the limits will do.
        """
        problem, timed = self.problem, self.problem.minimize == Quantity.TIME
        if self.task.restates:
            problem = problem.without(Quantity.TIME, minimize=Quantity.TIME, own_objective=())
        for share in TIME_SHARES:
            if self._done() or not (timed or self.best is None):
                return
            self._try_share(share, problem=problem)

    def _bisect(self) -> None:
        """Look for the least share whose plan keeps the limits."""
        missed, kept = 0.0, None
        while not self._done() and (kept is None or kept - missed > LEAST_STEP):
            share = 1.0 if kept is None else (missed + kept) / 2
            outcome, keeps = self._try_share(share)
            if keeps or outcome.candidate is None or kept is None:
                kept = share
            else:
                missed = share

    def _try_share(
        self, share: float, *, ratio: float | None = None, problem: Problem | None = None
    ) -> tuple[Outcome, bool]:
        """Have one surrogate solved, of the stated problem or of one with other limits.

        Return how it ended, and whether its plan keeps every limit.
        """
        request = self.request
        ratio = SURROGATE_RATIO if ratio is None else ratio
        limit_s = request.elapsed_s() + ratio * request.remaining_s()
        within = replace(request, time_limit_s=max(limit_s, 1e-3), on_progress=self._report(share))
        begin = self.start if self.best is None else self.best.schedule
        stated = problem or self.problem
        outcome = self.task.answer(stated.surrogate(transfer_share=share), within, begin)
        self.solved.append((share, outcome))
        self._raise_bound(share, outcome.bound)
        candidate = outcome.candidate
        keeps = candidate is not None and self._take(candidate.schedule, candidate.own, share=share)
        return outcome, keeps

    def _raise_bound(self, share: float, bound: float) -> None:
        """Take over what a surrogate proves of every plan.

        The relaxation's bound holds as it is. Of the others only that of a time does: no makespan
        is below the mean of compute and transfer time with weights 1 and `share`.
        """
        if share == 0:
            self.bound = max(self.bound, bound)
        elif self.problem.minimize == Quantity.TIME and self.problem.plans_all_transfers:
            whole_s = self.problem.surrogate(transfer_share=share).objective.baseline + bound
            self.bound = max(self.bound, whole_s / (1 + share) - self.problem.pass_time_s)

    def _take(
        self, schedule: Schedule, own: ModelObjective | None = None, *, share: float = 0.0
    ) -> bool:
        """Verify a schedule with its plan; return whether it keeps every limit.

        What the relaxation proves of the model's own objective holds for every plan.
        """
        if own is not None:
            self.own_bound = own.bound if share == 0 else self.own_bound
            own = replace(own, bound=self.own_bound)
        candidate = replace(self._verified(schedule), own=own)
        makespan_s = candidate.simulation.planned_s
        if candidate.violations:
            if makespan_s is not None and candidate.simulation.valid:
                nearest_s = self.nearest_s
                self.nearest_s = makespan_s if nearest_s is None else min(nearest_s, makespan_s)
            return False
        # A start without the model's own objective says nothing of it.
        if self.best is None or (own and not self.best.own) or candidate.is_better(self.best):
            self.best = candidate
            if self._timed:  # one who wants it to stop says so again, during the next solve
                self.request.report(candidate.value, self.bound, schedule)
        return True

    def _verified(self, schedule: Schedule) -> Candidate:
        """Verify a schedule with its plan; where no time is left for that, without any overlap."""
        planning_s = self.request.remaining_s() + GRACE_S
        return as_candidate(self.problem, schedule, planning_s=planning_s)

    def _done(self) -> bool:
        interrupted = any(
            outcome.termination == Termination.INTERRUPTED for _, outcome in self.solved
        )
        if interrupted or self.request.remaining_s() <= 0:
            return True
        if self.best is None:
            return False
        if self.best.own is not None:
            return self.best.own.gap <= self.request.gap
        return is_closed(self.problem, self.best.value, self.bound, self.request.gap)

    def _report(self, share: float) -> Callable[[SolveProgress], bool | None]:
        """Return the observer of a surrogate's solve; it reports facts about the problem."""

        def report(progress: SolveProgress) -> bool | None:
            bound = self.bound
            if share == 0 and progress.overhead_bound is not None:
                bound = max(bound, progress.overhead_bound)
            if not self._timed:
                return self.request.report(progress.overhead, bound, progress.schedule)
            best = self.best
            if best is None:
                return self.request.report(None, bound)
            return self.request.report(best.value, bound, best.schedule)

        return report

    def _outcome(self) -> Outcome:
        if not self.solved:
            return Outcome(termination=Termination.STALLED, candidate=self.best)
        outcomes = [outcome for _, outcome in self.solved]
        ended = {outcome.termination for outcome in outcomes}
        if Termination.INTERRUPTED in ended:
            termination = Termination.INTERRUPTED
        elif self.request.remaining_s() <= 0:
            termination = Termination.TIME_LIMIT
        elif self.best is not None and self._done():
            termination = Termination.PROVED
        elif Termination.TIME_LIMIT in ended:
            termination = Termination.TIME_LIMIT
        else:
            termination = Termination.STALLED
        shares = [share for share, _ in self.solved]
        return Outcome(
            termination=termination,
            candidate=self.best,
            bound=self.bound,
            reason=self._reason(outcomes[-1]),
            versions=outcomes[0].versions,
            statistics={**outcomes[0].statistics, "shares": shares},
        ).with_parts(outcomes)

    def _reason(self, last: Outcome) -> str:
        if self.nearest_s is None or self.problem.deadline_s is None:
            return last.reason
        return (
            "no schedule was found whose plan keeps the deadline of "
            f"{format_seconds(self.problem.deadline_s)} and the other limits; the best makespan "
            f"found is {format_seconds(self.nearest_s)}"
        )
