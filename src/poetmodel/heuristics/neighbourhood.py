"""Large neighbourhood search: destroy a part of a partial schedule, repair it, keep the better."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from poetmodel.clock import now_s
from poetmodel.heuristics.partial_schedule import START
from poetmodel.heuristics.penalties import WORST, PenalizedObjective, Score
from poetmodel.heuristics.repair import Obstacle, Repair, RepairStyle
from poetmodel.heuristics.restorations import RECOMPUTE, Restoration, restorations_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.heuristics.partial_schedule import PartialSchedule
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


STYLES: Final = (
    RepairStyle(longest_chain=6),
    RepairStyle(choices_per_relief=60),
    RepairStyle(pages=False),
)
"""How each trajectory repairs; only the first is followed where a problem lets tensors only be
paged, or only be recomputed."""
MOST_DESTROYED: Final = 12
"""Most restorations destroyed at once."""
ACCEPTED_RISE: Final = 2e-3
"""By how much the next partial schedule of a trajectory may be worse than the one before,
relatively."""
ACCEPTED_DISTANCE: Final = 1e-2
"""By how much it may be worse than the best of the trajectory, relatively; a trajectory that is
farther from the best of all is behind."""
IDLE_ITERATIONS: Final = 100
"""Iterations without gain after which a trajectory that is behind goes on from the best of all. A
repair that does not fit counts as half of them."""
MOST_IDLE: Final = 10 * IDLE_ITERATIONS
"""Iterations without gain after which a search on its own ends."""
PENALTY_FACTOR: Final = 1.1
"""By how much the penalty rises while limits are exceeded and falls while they are kept."""


@dataclass(slots=True)
class _Trajectory:
    """Partial schedules, each made of the one before."""

    partial: PartialSchedule
    style: RepairStyle
    obstacles: dict[Restoration, Obstacle] = field(default_factory=dict)
    """Of its repairs."""
    current: Score = WORST
    best: Score = WORST
    idle: int = 0
    """Iterations since the best, failed repairs weighted."""

    def accepts(self, score: Score) -> bool:
        """Whether to go on from a partial schedule that is not the best of all."""
        if score <= self.current:
            return True
        value, current, best = score.excess, self.current.excess, self.best.excess
        if best == 0:
            if value > 0:
                return False
            value, current, best = score.value, self.current.value, self.best.value
        return value <= current * (1 + ACCEPTED_RISE) and value <= best * (1 + ACCEPTED_DISTANCE)

    def is_behind(self, best: Score) -> bool:
        """Whether it has found nothing near the best of all."""
        if best.excess > 0 or self.best.excess > 0:
            return self.best.excess > best.excess
        return self.best.value > best.value * (1 + ACCEPTED_DISTANCE)


def improved(
    problem: Problem, schedule: Schedule, *, most_s: float, seed: int = 0
) -> Schedule | None:
    """Return the best schedule that a search finds from one for as much RAM or more, or None.

    It ends after `most_s`, or once many iterations have brought nothing [s].
    """
    search, idle = LargeNeighbourhoodSearch(problem, seed=seed), 0
    search.until_s = now_s() + most_s
    search.consider(restorations_of(problem.graph, schedule))
    while search.best != WORST and idle < MOST_IDLE and now_s() < search.until_s:
        idle = 0 if search.iterate() else idle + 1
    return search.schedule()


class LargeNeighbourhoodSearch:
    """A search for schedules; with a seed and no time limit, the course is determined.

    Notes
    -----
    An iteration destroys up to a dozen restorations that lie close to each other, in stages or in
    nodes, brings back greedily, at noisy prices, what then does not fit, and drops what there is
    room to do without (Shaw, 1998; Schrimpf et al., 2000). A result that is a little worse is
    accepted too. The penalty for the use of limits rises while they are exceeded and falls while
    they are kept.

    Where tensors may be both paged and recomputed there are three trajectories, which take turns:
    one prefers pages to long chains of recomputations, one takes what costs less, one does not
    page. One that stays behind goes on from the best partial schedule, in its own way.

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
        self.best = WORST
        """Score of the best partial schedule so far."""
        self.until_s = math.inf
        """When to give up, on the clock of `now_s` [s]."""
        both = problem.can_page and any(map(problem.may_recompute, range(len(problem.graph.nodes))))
        self._trajectories = [
            _Trajectory(self.objective.partial(), style)
            for style in (STYLES if both else STYLES[:1])
        ]
        self._iterations = 0
        self._penalty = 1.0
        self._best_restorations: list[Restoration] = []
        self._exceeded = False
        self._limit_bytes = problem.usable_ram_bytes

    def schedule(self) -> Schedule | None:
        """Return the best schedule that keeps all limits, if there is one."""
        if self.best.excess > 0:
            return None
        return self.objective.partial(self._best_restorations).schedule()

    def consider(self, restorations: Iterable[Restoration]) -> bool:
        """Repair the partial schedule of some restorations; if it is the best, go on from it.

        Returns whether it is.
        """
        first, *others = self._trajectories
        partial, current = first.partial, first.current
        given = list(restorations)
        better = False
        for penalty in (self._penalty, math.inf) if self.objective.is_limited else (0.0,):
            first.partial, first.current = self.objective.partial(given), WORST
            better = self._accept(first, self._repair(first, penalty))
            if better or first.current.excess == 0:
                break
        if current == WORST:  # the first of all: where the other trajectories begin
            if self.objective.is_limited:
                self._penalty = self.objective.balance(first.partial)
            for other in others:
                better = self._accept(other, self._repair(other, self._penalty)) or better
        elif not better:
            first.partial, first.current = partial, current
        return better

    def iterate(self) -> bool:
        """Destroy, repair, accept; return whether that led to the best partial schedule so far."""
        trajectory = self._next_trajectory()
        destroyed = self._destroy(trajectory.partial)
        better = self._accept(trajectory, self._repair(trajectory, self._penalty, self.rng))
        if destroyed and self.objective.is_limited:
            self._penalty *= PENALTY_FACTOR if self._exceeded else 1 / PENALTY_FACTOR
        return better

    def _next_trajectory(self) -> _Trajectory:
        """Return the trajectory whose turn it is, from the best of all on if it stays behind."""
        trajectory = self._trajectories[self._iterations % len(self._trajectories)]
        self._iterations += 1
        patient = trajectory.idle <= IDLE_ITERATIONS
        if not patient and trajectory.is_behind(self.best):
            trajectory.partial = self.objective.partial(self._best_restorations)
            trajectory.current = trajectory.best = self.best
            trajectory.idle = 0
        return trajectory

    def _destroy(self, partial: PartialSchedule) -> bool:
        """Remove some restorations close to each other; return whether there were any."""
        restorations = partial.restorations()
        if not restorations:
            return False
        rng, node_of = self.rng, self.problem.graph.node_of
        centre = rng.choice(restorations)
        if rng.random() < 0.5:  # noqa: PLR2004 - one way as often as the other
            restorations.sort(key=lambda r: abs(r.stage - centre.stage))
        else:
            node = {r: r.item if r.kind == RECOMPUTE else node_of[r.item] for r in restorations}
            restorations.sort(key=lambda r: abs(node[r] - node[centre]))
        size = rng.randint(1, MOST_DESTROYED)
        near = restorations[: 2 * size]
        for restoration in rng.sample(near, min(size, len(near))):
            if restoration in partial:
                partial.remove(restoration)
        return True

    def _repair(self, trajectory: _Trajectory, penalty: float, rng: Random | None = None) -> Score:
        """Repair the partial schedule of a trajectory; return its score, `WORST` if none fits."""
        partial = trajectory.partial
        repair = Repair(
            self.problem,
            partial,
            self.objective.prices(penalty),
            self._limit_bytes,
            rng=rng,
            until_s=self.until_s,
            style=trajectory.style,
            obstacles=trajectory.obstacles,
        )
        fits = repair.fit()
        if not fits and self.objective.rows is not None and trajectory.current.excess > 0:
            # Nothing is known yet that keeps all limits: go on from what exceeds them.
            repair.within_rows = False
            fits = repair.fit()
        if not fits:
            trajectory.idle += IDLE_ITERATIONS // 2
            return WORST
        repair.satisfy()
        repair.drop_needless()
        score = self.objective.score(partial)
        self._exceeded = score.excess > 0
        return score

    def _accept(self, trajectory: _Trajectory, score: Score) -> bool:
        """Go on from a repaired partial schedule, or take it back if it is not worth it.

        Returns whether it is the best so far.
        """
        partial, better = trajectory.partial, score < self.best
        trajectory.idle += 1
        if score == WORST or not (better or trajectory.accepts(score)):
            partial.undo(START)
            return False
        partial.commit()
        trajectory.current = score
        if score < trajectory.best:
            trajectory.best, trajectory.idle = score, 0
        if better:
            self.best = score
            self._best_restorations = partial.restorations()
            if score.excess == 0 and not self.problem.objective.is_sum:
                self._limit_bytes = min(self._limit_bytes, int(score.value) - 1)
        return better
