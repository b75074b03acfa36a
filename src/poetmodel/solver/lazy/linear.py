"""The linear phase: which rows matter, and a bound that cuts have tightened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.protocol import SolverStatus
from poetmodel.solver.lazy.cuts.interval import VIOLATED, separate
from poetmodel.solver.lazy.cuts.rounding import rounded_rows, separate_rounded
from poetmodel.solver.lazy.fractional import stage_loads
from poetmodel.solver.lazy.rows import SLACK, broken_stages, claimed_ram
from poetmodel.solver.outcome import safe_bound

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from poetmodel.model.grouping import Grouping
    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.lazy.session import Session

CUT_ROUNDS: Final = 30
"""Most rounds of cuts on one relaxation."""
WORTH_A_CUT: Final = 1e-3
"""Gain of a linear bound, relative, that is worth another round of cuts."""
WORTH_A_ROW: Final = 4e-3
"""Gain of a bound, relative, that is worth another round of rows."""
PATIENCE: Final = 3
"""Rounds without such a gain after which a loop stops."""
TIGHT: Final = 1e-6
"""Slack up to which a cut counts as tight, and is kept."""


@dataclass(frozen=True, slots=True)
class LinearAnswer:
    """How a linear relaxation ended."""

    x: NDArray[Any] | None
    """Its last point; None where there is none."""
    value: float
    """Its last value, in units of the objective."""
    infeasible: bool = False
    """Whether it is proved to have no point."""


def tighten(session: Session, relaxation: Relaxation) -> LinearAnswer:
    """Solve a linear relaxation and add cuts while that raises its value."""
    rounded = rounded_rows(relaxation, session.done)
    idle = 0
    answer = LinearAnswer(None, float("-inf"))
    for turn in range(CUT_ROUNDS):
        raw = session.solve(relaxation.cut_form().relaxed())
        if raw is None or raw.x is None or raw.bound is None:
            if raw is not None and raw.infeasible:
                return LinearAnswer(None, 0.0, infeasible=True)
            return answer
        session.raise_bound(safe_bound(session.problem, raw.bound) * relaxation.unit)
        gained = raw.bound > answer.value + WORTH_A_CUT * abs(raw.bound)
        idle = 0 if gained else idle + 1
        answer = LinearAnswer(raw.x, max(answer.value, raw.bound))
        last = turn == CUT_ROUNDS - 1 or idle >= PATIENCE
        if last or session.done() or raw.status != SolverStatus.OPTIMAL:
            break
        relaxation.cuts = _tight(relaxation, raw.x)
        found = [*separate_rounded(rounded, raw.x, VIOLATED), *separate(relaxation, raw.x)]
        if relaxation.rooms is not None:
            found += relaxation.rooms.separate(raw.x, VIOLATED)
        if not found:
            break
        relaxation.cuts += found
    return answer


def grow(
    session: Session,
    grouping: Grouping,
    on_answer: Callable[[Relaxation, NDArray[Any]], None] | None = None,
) -> tuple[Relaxation, LinearAnswer, Grouping]:
    """Enforce more rows, the worst of each broken run, while that raises the linear bound.

    Each answer is shown to `on_answer`.

    Returns
    -------
    Relaxation, LinearAnswer
        The one with the fewest rows that has the best bound: rows beyond that make the integer
        problem harder and prove nothing.
    Grouping
        All rows that an answer broke, for the search for schedules.
    """
    relaxation = session.build(grouping)
    answer = tighten(session, relaxation)
    every, latest = relaxation, answer
    idle = 0
    while latest.x is not None and not session.done() and idle < PATIENCE:
        if on_answer is not None:
            on_answer(every, latest.x)
            if session.done():
                break
        loads = stage_loads(every, latest.x)
        broken = broken_stages(loads.tolist(), claimed_ram(every, latest.x) * (1 + SLACK))
        rows = [t for t in broken if t not in every.grouping.stage_rows]
        if not rows:
            break
        every = session.build(every.grouping.add(rows), every)
        latest = tighten(session, every)
        if latest.infeasible:
            return every, latest, every.grouping
        if latest.value - answer.value > WORTH_A_ROW * abs(latest.value):
            relaxation, answer, idle = every, latest, 0
        else:
            idle += 1
    return relaxation, answer, every.grouping


def _tight(relaxation: Relaxation, x: NDArray[Any]) -> list[Any]:
    """Return the cuts that hold with equality at a point."""
    return [
        cut
        for cut in relaxation.cuts
        if sum(value * x[column] for column, value in cut.terms) - cut.right <= TIGHT
    ]
