"""Large neighbourhood search: destroy a part of a partial schedule, repair it, keep the better.

Several lines of partial schedules are followed in turn, each repaired in a way of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from poetmodel.heuristics.partial_schedule import PartialSchedule, Restoration
from poetmodel.heuristics.penalties import PenalizedObjective
from poetmodel.heuristics.repair import LONG, SHORT, Repair

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

LARGEST_DESTROYED: Final = 12
"""Most restorations removed at once."""
NOISE: Final = 1.0
"""Noise of the prices while a partial schedule is repaired."""
TIGHTEN_NOISE: Final = 0.5
"""The same while what is not needed is taken away."""
WORSE: Final = 2e-3
"""How much worse than the current one another may be to follow it, relatively."""
FAR: Final = 1e-2
"""How much worse than the best."""
PENALTY_STEP: Final = 1.1
"""Factor by which the weight of the limits follows how well they are kept."""
HOPELESS: Final = 100
"""Turns without gain after which a line that is far behind goes on from the best one."""
WAYS: Final = ((SHORT, True), (LONG, True), (LONG, False))
"""How the lines repair: the longest chain of recomputations, and whether they page."""
NOTHING: Final = (float("inf"), float("inf"))
"""Excess and value where there is none yet."""


def restorations_of(schedule: Schedule) -> list[Restoration]:
    """Return what a schedule brings back."""
    return [
        *(Restoration(t, k, recompute=True) for t, k in schedule.R if k < t),
        *(Restoration(t, i, recompute=False) for t, i in schedule.M_in),
    ]


@dataclass(slots=True)
class _Line:
    """A course of partial schedules, each made of the one before."""

    partial: PartialSchedule
    depth: int
    paging: bool
    current: tuple[float, float] = NOTHING
    """Excess and value of the partial schedule."""
    best: tuple[float, float] = NOTHING
    """The least of them so far."""
    idle: int = 0
    """Turns since then."""


class LargeNeighbourhoodSearch:
    """A local search for schedules.

    Parameters
    ----------
    problem : Problem
        What to schedule.
    seed : int
        Seed of everything random: with it and no time limit, the course is determined.

    Attributes
    ----------
    best : tuple of (float, float)
        Excess over limits and value of the best one so far; infinite before the first.
    until_s : float
        When to give up, on the monotonic clock [s].

    Notes
    -----
    An iteration removes up to a dozen restorations that lie close in stages or in nodes,
    brings back greedily, at noisy prices, what then does not fit, and takes away what there is room
    to do without (Shaw, 1998; Schrimpf et al., 2000). A result that is a little worse is followed
    too. The weight of the limits rises while they are exceeded and falls while they are kept.

    Where both kinds of restorations are allowed there are three lines of partial schedules
    (`WAYS`): one prefers pages to long chains of recomputations, one takes what costs less, one
    does not page. They take turns; one that stays far behind goes on from the best, in its
    own way.

    References
    ----------
    P. Shaw, Using constraint programming and local search methods to solve vehicle routing
    problems, CP 1998. G. Schrimpf et al., Record breaking optimization results using the ruin and
    recreate principle, Journal of Computational Physics 159, 2000.
    """

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        self.problem = problem
        self.objective = PenalizedObjective(problem)
        self.rng = Random(seed)  # noqa: S311 - nothing secret about it
        self.best = NOTHING
        self.until_s = float("inf")
        both = problem.can_page and any(map(problem.may_recompute, range(len(problem.graph.nodes))))
        self._lines = [
            _Line(PartialSchedule(problem.graph), depth, paging)
            for depth, paging in (WAYS if both else WAYS[:1])
        ]
        self._turns = 0
        self._penalty = 1.0
        self._best_restorations: list[Restoration] = []
        self._exceeded = False
        self._limit_bytes = problem.usable_ram_bytes

    def schedule(self) -> Schedule | None:
        """Return the best schedule that keeps all limits, if there is one."""
        if self.best[0] > 0:
            return None
        return PartialSchedule(self.problem.graph, self._best_restorations).schedule()

    def consider(self, restorations: Iterable[Restoration]) -> bool:
        """Repair a partial schedule with these restorations; go on from it if it is the best.

        Returns
        -------
        bool
            Whether it is.
        """
        line = self._lines[0]
        partial, current = line.partial, line.current
        given = list(restorations)
        better = False
        for penalty in (self._penalty, float("inf")) if self.objective.limits else (0.0,):
            line.partial, line.current = PartialSchedule(self.problem.graph, given), NOTHING
            better = self._repair(line, 0.0, penalty)
            if better or line.current[0] == 0:
                break
        if not better and current < NOTHING:
            line.partial, line.current = partial, current
        if current == NOTHING:
            if self.objective.limits:
                self._penalty = self.objective.balance(line.partial)
            for other in self._lines[1:]:
                better = self._repair(other, 0.0, self._penalty) or better
        return better

    def iterate(self) -> bool:
        """Destroy and repair once; return whether that led to the best one so far."""
        line = self._next_line()
        restorations = line.partial.restorations()
        if not restorations:
            return self._repair(line, NOISE, self._penalty)
        rng, node_of = self.rng, self.problem.graph.node_of
        centre = rng.choice(restorations)
        if rng.random() < 0.5:  # noqa: PLR2004 - one way as often as the other
            restorations.sort(key=lambda s: abs(s.stage - centre.stage))
        else:
            maker = [s.item if s.recompute else node_of[s.item] for s in restorations]
            node = maker[restorations.index(centre)]
            order = sorted(range(len(restorations)), key=lambda place: abs(maker[place] - node))
            restorations = [restorations[place] for place in order]
        size = rng.randint(1, LARGEST_DESTROYED)
        near = restorations[: 2 * size]
        for restoration in rng.sample(near, min(size, len(near))):
            if restoration in line.partial:
                line.partial.remove(restoration)
        better = self._repair(line, NOISE, self._penalty)
        if self.objective.limits:
            self._penalty *= PENALTY_STEP if self._exceeded else 1 / PENALTY_STEP
        return better

    def _next_line(self) -> _Line:
        """Return the line whose turn it is; one that is far behind begins from the best one."""
        line = self._lines[self._turns % len(self._lines)]
        self._turns += 1
        which = 0 if self.best[0] > 0 else 1
        behind = line.best[0] > self.best[0] or line.best[which] > self.best[which] * (1 + FAR)
        if line.idle > HOPELESS and behind:
            line.partial = PartialSchedule(self.problem.graph, self._best_restorations)
            line.current, line.best, line.idle = self.best, self.best, 0
        return line

    def _repair(self, line: _Line, noise: float, penalty: float) -> bool:
        """Mend the partial schedule of a line, and take it back if it is not worth following.

        Returns
        -------
        bool
            Whether it is the best so far.
        """
        partial = line.partial
        line.idle += 1
        repair = Repair(
            self.problem,
            partial,
            self.objective.prices(penalty),
            self._limit_bytes,
            rng=self.rng,
            until_s=self.until_s,
            depth=line.depth,
            paging=line.paging,
        )
        if not repair.fit(noise):
            partial.undo(0)
            line.idle += HOPELESS // 2
            return False
        repair.tighten(noise and TIGHTEN_NOISE)
        found = (self.objective.excess(partial), self.objective.value(partial))
        self._exceeded = found[0] > 0
        better = found < self.best
        if not (better or self._may_follow(line, found)):
            partial.undo(0)
            return False
        partial.commit()
        line.current = found
        if found < line.best:
            line.best, line.idle = found, 0
        if better:
            self.best = found
            self._best_restorations = partial.restorations()
            if found[0] == 0 and not self.problem.objective.is_sum:
                self._limit_bytes = min(self._limit_bytes, int(found[1]) - 1)
        return better

    def _may_follow(self, line: _Line, found: tuple[float, float]) -> bool:
        """Return whether a line goes on from a partial schedule that is not the best."""
        if found <= line.current:
            return True
        which = 0 if line.best[0] > 0 else 1
        if found[0] > 0 and which == 1:
            return False
        near = found[which] <= line.current[which] * (1 + WORSE)
        return near and found[which] <= line.best[which] * (1 + FAR)
