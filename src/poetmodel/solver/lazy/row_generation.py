"""``lazy``: enforce few memory rows, solve, disaggregate, verify; add the broken rows; repeat.

Every round is a relaxation of the problem, so its proven bound is a lower bound; every placed
schedule that the verifier accepts is an upper bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.protocol import SolverStatus
from poetmodel.backends.worker import run_interruptibly
from poetmodel.errors import TimeLimitError, TooLargeError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.model.grouping import Grouping
from poetmodel.problem.infeasibility import limits_in_words
from poetmodel.result import Termination, relative_gap
from poetmodel.solver.covers import limit_rows, with_covers
from poetmodel.solver.lazy.fastest import find_fastest, has_fastest
from poetmodel.solver.lazy.linear import grow, tighten
from poetmodel.solver.lazy.primal import Answer, ScheduleSearch, examine, start_point
from poetmodel.solver.lazy.primal_worker import Beside, Task
from poetmodel.solver.lazy.session import WIDE, Session
from poetmodel.solver.lazy.symmetry import counted_limits, solve_counted
from poetmodel.solver.outcome import Candidate, Outcome
from poetmodel.solver.request import GRACE_S
from poetmodel.time_limit import time_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from poetmodel.backends.protocol import BackendProgress, RawSolution
    from poetmodel.problem import Problem
    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.request import Request

PATIENCE: Final = 1 / 6
"""Part of the time without a schedule after which a deadline is looked at by itself."""
FIRST_SLICE_S: Final = 5.0
"""Least time of an integer solve; each that ends by time doubles it [s]."""
SHARE: Final = 0.75
"""Most of the time that is left for one integer solve while the gap is wide; the search for
schedules has the rest. Later a solve may take all of it: one that is cut short begins anew."""
WORTH_A_ROUND: Final = 0.02
"""Rise of the bound, relative, that is worth another round with a single new row."""
WORTH_FEW_ROWS: Final = 0.01
"""Rise that is worth another with few of them, near the end. After less, answers only dodge what is
enforced, and all rows come at once."""
NEAR: Final = 0.5
"""Largest gap at which a relaxation is solved without the solver's own heuristics."""
MOST_ROWS: Final = 3
"""Most rows that a round adds while the gap is wide. Rooms are looked for then, rather than rows of
steps."""
FEW_ROWS: Final = 2
"""Rows that it adds later, while that helps: relaxations are solved to their end then."""
BROKEN: Final = 1e-6
"""Least violation of a room cut by an integer answer."""
COARSE: Final = 0.003
"""Gap, at most, at which a relaxation is left whose best answer breaks rows."""
PART: Final = 0.1
"""Share of the whole gap that it may leave open then."""
ROOMY: Final = 0.1
"""Gap above which room cuts are stated from the first integer relaxation on."""
STEP: Final = 1 / 8
"""Share of the gap that one integer solve is to prove away, at first."""
LEAST_STEP: Final = 1 / 32
"""Least such share."""
STEP_SHARE: Final = 0.4
"""Most of the time that is left for a solve that is to prove a part of the gap away."""
PROVING: Final = MappingProxyType(
    {
        "highs": MappingProxyType(
            {
                "mip_heuristic_effort": 0.0,
                "mip_heuristic_run_feasibility_jump": False,
                "mip_heuristic_run_rins": False,
                "mip_heuristic_run_rens": False,
                "mip_heuristic_run_root_reduced_cost": False,
                "mip_detect_symmetry": False,
            }
        )
    }
)
"""Options with which a solver spends its time on the bound; a schedule is known by then."""


def solve_lazily(
    problem: Problem,
    request: Request,
    *,
    start: Candidate | None,
    first: Grouping | None = None,
    bound: float = 0.0,
) -> Outcome:
    """Solve a problem by row generation over groups of stages.

    Parameters
    ----------
    problem : Problem
        Any problem of the contract.
    request : Request
        Solver and limits; with two threads or more, a process searches for schedules beside the
        proof.
    start : Candidate or None
        A valid schedule to begin from.
    first : Grouping, optional
        Rows to enforce from the beginning; by default the stage row that checkpoint-all loads most.
    bound : float
        What is proved already, in the unit of the minimized quantity.

    Returns
    -------
    Outcome
        The best verified schedule and the best bound of all rounds; after Ctrl-C those so far.

    Notes
    -----
    ``docs/lazy.md`` holds the argument why each reduction is exact. With one thread the course
    is determined by problem and seed as long as no limit or slice of time has ended a part of it.
    """
    patience_s = math.inf
    if start is None and has_fastest(problem):
        patience_s = request.elapsed_s() + PATIENCE * request.remaining_s()
    outcome = _attempt(Session(problem, request, start, patience_s=patience_s, bound=bound), first)
    if outcome.termination != Termination.TIME_LIMIT or request.remaining_s() <= 0:
        return outcome
    if outcome.candidate is None:
        return _keep_deadline(problem, request, outcome, first)
    # A schedule came just as patience was at its end.
    after = _attempt(Session(problem, request, outcome.candidate, bound=outcome.bound), first)
    return _together(after, [outcome, after])


def _attempt(session: Session, first: Grouping | None = None) -> Outcome:
    """Run the rounds of one session."""
    if first is None:
        loads = checkpoint_all_profile(session.problem.graph)
        worst = max(range(len(loads)), key=loads.__getitem__)
        first = Grouping(len(loads)).add([worst])
    rounds = _Rounds(session, first)
    infeasible = run_interruptibly(rounds.run, session.stop)
    return _outcome(session, rounds, infeasible=infeasible)


def _keep_deadline(
    problem: Problem, request: Request, before: Outcome, first: Grouping | None
) -> Outcome:
    """Look whether any schedule keeps the deadline; go on from one that does.

    `before` is how far the rounds came without a schedule.
    """

    def attempt(
        fastest: Problem, within: Request, start: Candidate | None, ceiling: float
    ) -> Outcome:
        return _attempt(Session(fastest, within, start, ceiling=ceiling))

    verdict = find_fastest(problem, request, before.bound, attempt)
    parts = [before, verdict.outcome]
    if verdict.infeasible:
        reason = _proved_infeasible(problem)
        after = replace(before, termination=Termination.PROVED, infeasible=True, reason=reason)
    elif verdict.interrupted:
        after = replace(before, termination=Termination.INTERRUPTED, candidate=verdict.start)
    else:
        after = _attempt(Session(problem, request, verdict.start, bound=before.bound), first)
        parts.append(after)
    return _together(after, parts)


def _together(last: Outcome, parts: Sequence[Outcome]) -> Outcome:
    """Return the last of several sessions with the figures of all."""
    figures = dict(last.statistics)
    for name, combine in (("rounds", sum), ("columns", max), ("rows", max)):
        found = [part.statistics[name] for part in parts if name in part.statistics]
        if found:
            figures[name] = combine(found)
    return replace(
        last,
        build_s=sum(part.build_s for part in parts),
        solve_s=sum(part.solve_s for part in parts),
        statistics=figures,
        log="".join(part.log for part in parts),
    )


@dataclass(slots=True)
class _Rounds:
    """The integer phase, and the linear one before it."""

    session: Session
    grouping: Grouping
    count: int = 0
    """Integer rounds so far."""
    linear: int = 0
    """Linear answers so far."""
    slice_s: float = FIRST_SLICE_S
    known: float = float("-inf")
    """The bound when rows were last added."""
    step: float = STEP
    """Share of the gap that the next solve is to prove away; 1 for all of it."""
    broken: bool = False
    """Whether the best answer of the solve that runs breaks rows that are not enforced."""
    search: ScheduleSearch = field(init=False)
    beside: Beside | None = None
    """Where schedules are searched for while there is a core for it."""

    def run(self) -> bool:
        """Run all phases; return whether the problem is proved infeasible."""
        session = self.session
        self.search = ScheduleSearch(session, self.grouping)
        try:
            with time_limit(session.request.remaining_s() + GRACE_S):
                if session.request.threads == 1:
                    return self._phases()
                with Beside(session) as self.beside:
                    self.search.hurry = self.beside.runs.is_set
                    infeasible = self._phases()
        except TimeLimitError:
            session.stopped = session.stopped or Termination.TIME_LIMIT
            infeasible = False
        except TooLargeError:
            session.stopped = session.stopped or Termination.STALLED
            infeasible = False
        if self.beside is not None:
            self.beside.check()
        return infeasible

    def _phases(self) -> bool:
        session = self.session
        relaxation, answer, self.search.grouping = grow(session, self.grouping, self._glance)
        if answer.infeasible:
            return True
        if answer.x is not None and not session.done():
            self._search(relaxation, answer.x)
            relaxation = self._with_rooms(relaxation)
        while not session.done():
            self.count += 1
            following = self._round(relaxation)
            if following is None:
                nothing = session.best is None and session.stopped is None
                return nothing and math.isinf(session.ceiling)
            relaxation = following
        return False

    def _round(self, relaxation: Relaxation) -> Relaxation | None:
        """Solve one integer relaxation; return the next, or None where nothing better exists."""
        session = self.session
        before = (session.bound, session.best)
        goal = self._goal()
        raw = self._solve(relaxation, goal)
        if raw is None:
            return relaxation
        if raw.bound is not None:
            session.raise_bound(session.within_cutoff(relaxation, raw.bound))
        if raw.infeasible or raw.status == SolverStatus.CUTOFF:
            return relaxation if self._rule_out(goal, raw, before[0]) else None
        if raw.x is None:
            self.slice_s *= 2
            self.step = max(LEAST_STEP, self.step / 2)
            return relaxation
        proved = raw.status == SolverStatus.OPTIMAL
        return self._follow(relaxation, raw.x, proved=proved, before=before)

    def _rule_out(self, goal: float | None, raw: RawSolution, before: float) -> bool:
        """Set the next step after a goal that nothing is below; return whether there is one."""
        if goal is None:
            return False
        if self.session.bound <= before:
            self.step = 1.0  # the goal is below the solver's tolerance
        elif raw.nodes is not None and raw.nodes <= 1:
            self.step *= 2
        return True

    def _follow(
        self,
        relaxation: Relaxation,
        x: NDArray[Any],
        *,
        proved: bool,
        before: tuple[float, Candidate | None],
    ) -> Relaxation:
        """Make a schedule of an answer, or enforce what it breaks; return what to solve next.

        `proved` says whether it is the best one, `before` what was known before the solve.
        """
        session = self.session
        rows, steps = examine(session, relaxation, x)
        stuck = not rows and not steps and proved
        if not session.done():
            self._search(relaxation, x, force=stuck)
        rooms = self._find_room(relaxation, x)
        if rows or steps:
            return self._refine(relaxation, rows, [] if rooms else steps)
        tighter = with_covers(relaxation.form, x, limit_rows(relaxation.form))
        if tighter is not None:  # only the solver's tolerance let the answer through
            relaxation.form = tighter
            return relaxation
        self.slice_s *= 2
        if stuck and (session.bound, session.best) == before and not session.done():
            # Solved to its end and nothing moved: the rest is below the solver's tolerances.
            session.stopped = Termination.STALLED
        return relaxation

    def _find_room(self, relaxation: Relaxation, x: NDArray[Any]) -> bool:
        """Add the room cuts that an answer breaks; return whether there are any."""
        if relaxation.rooms is None:
            return False
        found = relaxation.rooms.separate(x, BROKEN)
        relaxation.lasting += found
        return bool(found)

    def _refine(
        self, relaxation: Relaxation, rows: list[int], steps: list[tuple[int, int]]
    ) -> Relaxation:
        """Enforce the worst row or the first step, or more where that gained little; tighten."""
        session = self.session
        if not (rows or steps) or session.done():
            return relaxation  # with new cuts where there are no rows
        wide = session.gap() > WIDE
        if wide and steps and not session.restoring and session.problem.objective.is_sum:
            session.restoring = True
            steps = []
        most = self._most_rows(wide=wide)
        self.known = session.bound
        relaxation.keep_rooms()
        grouping = relaxation.grouping.add(rows[:most], steps[:most])
        following = session.build(grouping, relaxation)
        self.step = STEP
        if not session.done():
            tighten(session, following)
        return following

    def _most_rows(self, *, wide: bool) -> int | None:
        """Return how many rows to add after what the last ones gained; None for all."""
        bound = self.session.bound
        rise = bound - self.known
        if rise > WORTH_A_ROUND * bound:
            return 1
        if wide:
            return MOST_ROWS
        return FEW_ROWS if rise > WORTH_FEW_ROWS * bound else None

    def _with_rooms(self, relaxation: Relaxation) -> Relaxation:
        """Go over to room cuts at once where the gap is very wide and RAM is the only limit."""
        session = self.session
        alone = session.problem.objective.is_sum and not counted_limits(relaxation.form)
        if session.done() or session.gap() <= ROOMY or not alone:
            return relaxation
        session.restoring = True
        following = session.build(relaxation.grouping, relaxation)
        tighten(session, following)
        return following

    def _goal(self) -> float | None:
        """Return the value below which the next solve looks for answers; None for the best one.

        It is a part of the gap above the bound only: nearer limits let a solver fix more columns,
        and what it proves is kept when the next solve goes on from there.
        """
        session = self.session
        aim = session.aim()
        if session.problem.objective.in_bytes or aim is None:
            return None  # few whole values lie between bound and best schedule
        if session.gap() <= WIDE or self.step >= 1.0:
            return None
        return session.bound + self.step * (aim - session.bound)

    def _solve(self, relaxation: Relaxation, goal: float | None) -> RawSolution | None:
        session = self.session
        targets = session.cutoff(relaxation)
        share = SHARE if session.gap() > WIDE else 1.0
        if goal is not None:
            targets["objective_cutoff"] = goal / relaxation.unit
            share = STEP_SHARE
        gap = session.request.gap / 2
        if session.bound > 0 and gap < 1:
            targets["objective_stop"] = session.bound / (1 - gap) / relaxation.unit
        self.broken = False
        return solve_counted(
            session,
            relaxation.cut_form(),
            most_s=max(self.slice_s, session.request.remaining_s() * share),
            targets=targets,
            start=start_point(session, relaxation) if goal is None else None,
            options=PROVING.get(session.solver.name) if self._is_near() else None,
            watch=lambda progress: self._watch(relaxation, progress),
        )

    def _is_near(self) -> bool:
        """Return whether what is still open is too little for a solver's own heuristics."""
        return self.session.gap() < NEAR

    def _watch(self, relaxation: Relaxation, progress: BackendProgress) -> bool:
        """Follow a running solve; return whether it should go on.

        It should not once its bound closes the gap, or once its best answer, which breaks rows, is
        near to its bound when compared with what is open.
        """
        session = self.session
        if progress.bound is not None:
            session.raise_bound(session.within_cutoff(relaxation, progress.bound))
        if session.done():
            return False
        if progress.incumbent is None:
            return True
        if progress.x is not None:
            value = progress.incumbent * relaxation.unit
            if session.best is None or value < session.best.value:
                self.broken = any(examine(session, relaxation, progress.x))
        if not self.broken or progress.bound is None:
            return True
        left_open = relative_gap(progress.incumbent, progress.bound)
        return left_open > min(COARSE, PART * session.gap())

    def _search(self, relaxation: Relaxation, x: NDArray[Any], *, force: bool = False) -> None:
        """Search for schedules: now, or beside the proof where there is a process for it."""
        answer = Answer.of(relaxation, x)
        if self.beside is not None:
            self.search.enforce(relaxation.grouping)
            self.beside.put(Task(answer=answer, rows=self.search.grouping))
            if self.beside.runs.is_set() and not force:
                return
        self.search.run(answer, force=force)

    def _glance(self, relaxation: Relaxation, x: NDArray[Any]) -> None:
        """Make a schedule of a linear answer: of the first, the second, the fourth, ..."""
        self.linear += 1
        if self.linear & (self.linear - 1):
            return
        answer = Answer.of(relaxation, x)
        if self.beside is not None:
            self.beside.put(Task(answer=answer, rows=relaxation.grouping, glance=True))
            if self.beside.runs.is_set():
                return
        self.search.glance(answer)


def _outcome(session: Session, rounds: _Rounds, *, infeasible: bool) -> Outcome:
    proved = infeasible or session.proved()
    if infeasible:
        reason = _proved_infeasible(session.problem)
    else:
        reason = f"no schedule was found within {session.request.elapsed_s():.3g} s"
    stopped = session.stopped or Termination.STALLED
    grouping = rounds.search.grouping
    return Outcome(
        termination=Termination.PROVED if proved else stopped,
        candidate=session.best,
        bound=session.bound,
        infeasible=infeasible,
        reason=reason,
        build_s=session.build_s,
        solve_s=session.solve_s,
        versions=session.solver.versions(),
        statistics={
            "rounds": rounds.count,
            "enforced_rows": len(grouping.stage_rows) + len(grouping.step_rows),
            "columns": session.columns,
            "rows": session.rows,
        },
        log="".join(session.log),
    )


def _proved_infeasible(problem: Problem) -> str:
    return f"proved: no schedule keeps {limits_in_words(problem)} together"
