"""How incumbent and bound of a solve met, for whoever looks at it later."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Final

from poetmodel.problem import Quantity

if TYPE_CHECKING:
    from poetmodel.result import Moment, SolveResult
    from poetmodel.solver.request import OnProgress, SolveProgress

MOST_MOMENTS: Final = 100
"""Moments that a history keeps; of more every second one goes."""


@dataclass(slots=True, kw_only=True)
class History:
    """What was reported of a solve, as far as it changed something."""

    on_progress: OnProgress | None = None
    """Who else watches."""
    moments: list[Moment] = field(default_factory=list)
    best: SolveProgress | None = None
    """The report of the best schedule."""

    def watch(self, progress: SolveProgress) -> bool | None:
        """Take note of a report, pass it on, and return the answer."""
        values = (progress.incumbent, progress.bound)
        if values != (None, None) and all(figure is None or isfinite(figure) for figure in values):
            self._add((progress.seconds, *values))
        if progress.schedule is not None and progress.incumbent is not None:
            known = None if self.best is None else self.best.incumbent
            self.best = progress if known is None or progress.incumbent < known else self.best
        return None if self.on_progress is None else self.on_progress(progress)

    def of(self, result: SolveResult) -> tuple[Moment, ...]:
        """Return the history of a solve that ended with a result, which is its last moment.

        No moment is ahead of the result: a solver may take back what it told on its way.
        """
        own, simulation = result.own_objective, result.simulation
        if own is not None or simulation is None:
            return () if own is not None else tuple(self.moments)
        objective = result.problem.objective
        value, bound = objective.overhead(simulation), result.proven_bound - objective.baseline
        if result.problem.minimize == Quantity.ENERGY:
            bound = result.overhead_bound_j
        before = [
            (
                seconds,
                None if incumbent is None else max(incumbent, value),
                None if lower is None else min(lower, bound),
            )
            for seconds, incumbent, lower in self.moments
            if seconds < result.wall_s
        ]
        return (*before, (result.wall_s, value, bound))

    def _add(self, moment: Moment) -> None:
        moments = self.moments
        if moments:
            _, incumbent, bound = moments[-1]
            moment = (moment[0], _least(moment[1], incumbent), _most(moment[2], bound))
            if moment[1:] == moments[-1][1:]:
                return
        moments.append(moment)
        if len(moments) > MOST_MOMENTS:
            del moments[1:-1:2]


def _least(first: float | None, other: float | None) -> float | None:
    return min((value for value in (first, other) if value is not None), default=None)


def _most(first: float | None, other: float | None) -> float | None:
    return max((value for value in (first, other) if value is not None), default=None)
