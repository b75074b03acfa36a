"""The search for schedules beside the proof: a restriction whose bounds are never used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.solve.lazy.placement import place
from poetmodel.solve.lazy.relaxation import Allowed
from poetmodel.solve.lazy.rows import broken_stages, broken_steps, claimed_ram

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poetmodel.model.grouping import Grouping
    from poetmodel.solve.lazy.relaxation import Relaxation
    from poetmodel.solve.lazy.session import Session

LONGEST_S: Final = 10.0
"""Longest search after one answer [s]."""
USED: Final = 0.01
"""Least value at which a fractional answer counts as using a decision."""
WIDER: Final = 2
"""How many stages earlier and later everything is allowed when nothing was found."""


@dataclass(slots=True)
class ScheduleSearch:
    """Looks for schedules among the recomputations and page-ins that answers so far used.

    The same relaxation, restricted to them, is small. Rows that its placed answers break are added
    to it alone, until one is valid.
    """

    session: Session
    grouping: Grouping
    """Rows enforced here: those of the proof and its own."""
    allowed: Allowed = field(default_factory=Allowed)

    def __post_init__(self) -> None:
        if self.session.best is not None:
            self.allowed.add_schedule(self.session.best.schedule)

    def run(self, source: Relaxation, x: NDArray[Any], *, force: bool = False) -> None:
        """Search with what one more answer used; does nothing where that is not new."""
        session = self.session
        new = self.allowed.add_point(source, x, USED)
        if not (new or force):
            return
        self.grouping = self.grouping.add(
            tuple(source.grouping.stage_rows), tuple(source.grouping.step_rows)
        )
        relaxation = session.build(self.grouping, source)
        until = session.request.elapsed_s() + min(LONGEST_S, session.request.remaining_s() / 4)
        widened = False
        while not session.done() and session.request.elapsed_s() < until:
            form = relaxation.restricted(self.allowed)
            start = start_point(session, relaxation)
            if start is not None and (start > form.upper).any():
                start = None  # the best schedule does what is not allowed here
            raw = session.solve(
                form,
                most_s=max(1.0, (until - session.request.elapsed_s()) / 2),
                targets=session.cutoff(relaxation),
                start=start,
            )
            if raw is None or raw.x is None:
                if widened or raw is None or session.best is not None:
                    return
                widened = True
                self.allowed.widen(WIDER)
                continue
            rows, steps = examine(session, relaxation, raw.x)
            if not rows and not steps:
                return
            self.grouping = self.grouping.add(rows, steps)
            relaxation = session.build(self.grouping, relaxation)


def start_point(session: Session, relaxation: Relaxation) -> NDArray[Any] | None:
    """Return the best schedule as a point of a relaxation, if there is one and it has room."""
    best = session.best
    return None if best is None else relaxation.start(best.schedule)


def examine(
    session: Session, relaxation: Relaxation, x: NDArray[Any]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Place an answer; offer it to the judge where it keeps all rows, else return those it breaks.

    With the peak minimized, an answer that is above the peak it claims may still be a good one.
    """
    placement = place(
        session.problem.graph, relaxation.grouping, relaxation.events, relaxation.decisions(x)
    )
    limit = claimed_ram(relaxation, x)
    rows = broken_stages(placement.stage_loads(), limit)
    steps = [] if rows else broken_steps(placement, limit)
    if not (rows or steps) or session.problem.minimize == "ram":
        session.offer(placement.schedule())
    grouping = relaxation.grouping
    return (
        [t for t in rows if t not in grouping.stage_rows],
        [step for step in steps if step not in grouping.step_rows],
    )
