"""Large neighbourhood search: destroy some decisions of a partial schedule and repair it."""

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
    RepairStyle(max_chain=6),
    RepairStyle(choices_per_relief=60),
    RepairStyle(pages=False),
)
"""Repair style of each trajectory. Only the first is used if a problem permits only paging or only
recomputation."""
MAX_DESTROYED: Final = 12
"""Maximum number of restorations destroyed in one iteration."""
MAX_RISE_RATIO: Final = 2e-3
"""Maximum relative rise of the score from one partial schedule of a trajectory to the next."""
MAX_DISTANCE_RATIO: Final = 1e-2
"""Maximum relative distance above the best score of the trajectory. A trajectory whose best score
is farther above the overall best is behind."""
IDLE_ITERATIONS: Final = 100
"""Iterations without gain after which a trajectory that is behind restarts from the overall best. A
failed repair counts as half of these iterations."""
MAX_IDLE: Final = 10 * IDLE_ITERATIONS
"""Iterations without gain after which `improve_schedule` ends."""
PENALTY_FACTOR: Final = 1.1
"""Factor by which the penalty rises while limits are exceeded, and falls while they are met."""


@dataclass(slots=True)
class _Trajectory:
    """A sequence of partial schedules, each a modification of the one before."""

    partial: PartialSchedule
    style: RepairStyle
    obstacles: dict[Restoration, Obstacle] = field(default_factory=dict)
    """Obstacles of the trajectory's repairs."""
    current: Score = WORST
    best: Score = WORST
    idle: int = 0
    """Iterations since the trajectory's best score; failed repairs count more."""

    def accepts(self, score: Score) -> bool:
        """Return whether to continue from a partial schedule that is not the overall best."""
        if score <= self.current:
            return True
        value, current, best = score.excess, self.current.excess, self.best.excess
        if best == 0:
            if value > 0:
                return False
            value, current, best = score.value, self.current.value, self.best.value
        return value <= current * (1 + MAX_RISE_RATIO) and value <= best * (1 + MAX_DISTANCE_RATIO)

    def is_behind(self, best: Score) -> bool:
        """Return whether the trajectory's best score is far above the overall best."""
        if best.excess > 0 or self.best.excess > 0:
            return self.best.excess > best.excess
        return self.best.value > best.value * (1 + MAX_DISTANCE_RATIO)


def improve_schedule(
    problem: Problem, schedule: Schedule, *, max_s: float, seed: int = 0
) -> Schedule | None:
    """Search from a schedule that was made for the same RAM or more; return the best schedule.

    Return None if no schedule was found that meets all limits. The search ends after `max_s` [s],
    or after `MAX_IDLE` iterations without gain.
    """
    search, idle = LargeNeighbourhoodSearch(problem, seed=seed), 0
    search.until_s = now_s() + max_s
    search.consider(restorations_of(problem.graph, schedule))
    while search.best != WORST and idle < MAX_IDLE and now_s() < search.until_s:
        idle = 0 if search.iterate() else idle + 1
    return search.schedule()


class LargeNeighbourhoodSearch:
    """A large neighbourhood search for schedules, deterministic for a seed without time limit.

    Notes
    -----
    An iteration destroys up to a dozen restorations that are close to each other, in stages or in
    nodes. It restores tensors greedily, at noisy prices, until every step fits, and drops unneeded
    restorations (Shaw, 1998; Schrimpf et al., 2000). A slightly worse result is accepted too. The
    penalty for the use of limits rises while they are exceeded and falls while they are met.

    If tensors may be both paged and recomputed, there are three trajectories in turn: one prefers
    page-ins to long chains of recomputations, one takes the cheaper of both, one does not page. A
    trajectory that is behind restarts from the best partial schedule, in its own style.

    References
    ----------
    P. Shaw, Using constraint programming and local search methods to solve vehicle routing
    problems, CP 1998. G. Schrimpf et al., Record breaking optimization results using the ruin and
    recreate principle, Journal of Computational Physics 159, 2000.
    """

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        """Start from keep-all: three trajectories if both paging and recomputing are possible.

        Otherwise there is one trajectory.
        """
        self.problem = problem
        self.objective = PenalizedObjective(problem)
        self.rng = Random(seed)  # noqa: S311 - no secret depends on it
        self.best = WORST
        """Score of the best partial schedule so far."""
        self.until_s = math.inf
        """Time at which the search ends, on the clock of `now_s` [s]."""
        uses_both = problem.can_page and any(
            map(problem.may_recompute, range(len(problem.graph.nodes)))
        )
        self._trajectories = [
            _Trajectory(self.objective.partial(), style)
            for style in (STYLES if uses_both else STYLES[:1])
        ]
        self._iterations = 0
        self._penalty = 1.0
        self._best_restorations: list[Restoration] = []
        self._exceeded = False
        self._limit_bytes = problem.usable_ram_bytes

    def schedule(self) -> Schedule | None:
        """Return the best schedule that meets all limits; None without one."""
        if self.best.excess > 0:
            return None
        return self.objective.partial(self._best_restorations).schedule()

    def consider(self, restorations: Iterable[Restoration]) -> bool:
        """Repair a partial schedule of `restorations`; continue from the result if it is the best.

        Return whether the result is the best so far. The first call initializes all trajectories.
        """
        first, *other_trajectories = self._trajectories
        partial_before, score_before = first.partial, first.current
        restoration_list = list(restorations)
        is_best = False
        for penalty in (self._penalty, math.inf) if self.objective.is_limited else (0.0,):
            first.partial, first.current = self.objective.partial(restoration_list), WORST
            is_best = self._accept_or_undo(first, self._repair(first, penalty))
            if is_best or first.current.excess == 0:
                break
        if score_before == WORST:  # the first call: the other trajectories start here, too
            if self.objective.is_limited:
                self._penalty = self.objective.balance(first.partial)
            for other in other_trajectories:
                is_best = self._accept_or_undo(other, self._repair(other, self._penalty)) or is_best
        elif not is_best:
            first.partial, first.current = partial_before, score_before
        return is_best

    def iterate(self) -> bool:
        """Destroy some restorations, repair, and accept or undo the result.

        Return whether the result is the best partial schedule so far.
        """
        trajectory = self._select_trajectory()
        destroyed = self._destroy(trajectory.partial)
        is_best = self._accept_or_undo(
            trajectory, self._repair(trajectory, self._penalty, self.rng)
        )
        if destroyed and self.objective.is_limited:
            self._penalty *= PENALTY_FACTOR if self._exceeded else 1 / PENALTY_FACTOR
        return is_best

    def _select_trajectory(self) -> _Trajectory:
        """Return the trajectory of this iteration.

        A trajectory that is behind restarts from the overall best.
        """
        trajectory = self._trajectories[self._iterations % len(self._trajectories)]
        self._iterations += 1
        may_continue = trajectory.idle <= IDLE_ITERATIONS
        if not may_continue and trajectory.is_behind(self.best):
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
        if rng.random() < 0.5:  # noqa: PLR2004 - both orders with equal probability
            restorations.sort(key=lambda r: abs(r.stage - centre.stage))
        else:
            node = {r: r.item if r.kind == RECOMPUTE else node_of[r.item] for r in restorations}
            restorations.sort(key=lambda r: abs(node[r] - node[centre]))
        size = rng.randint(1, MAX_DESTROYED)
        nearest = restorations[: 2 * size]
        for restoration in rng.sample(nearest, min(size, len(nearest))):
            if restoration in partial:
                partial.remove(restoration)
        return True

    def _repair(self, trajectory: _Trajectory, penalty: float, rng: Random | None = None) -> Score:
        """Repair the partial schedule of a trajectory and return its score.

        The score is `WORST` if the schedule does not fit.
        """
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
        is_fit = repair.fit()
        if not is_fit and self.objective.rows is not None and trajectory.current.excess > 0:
            # No schedule of this trajectory meets all limits yet, so rows may be exceeded.
            repair.respects_rows = False
            is_fit = repair.fit()
        if not is_fit:
            trajectory.idle += IDLE_ITERATIONS // 2
            return WORST
        repair.satisfy()
        repair.drop_unneeded()
        score = self.objective.score(partial)
        self._exceeded = score.excess > 0
        return score

    def _accept_or_undo(self, trajectory: _Trajectory, score: Score) -> bool:
        """Accept a repaired partial schedule, or undo all changes since the last accepted one.

        Returns whether its score is the best so far. A new best peak lowers the RAM limit of
        further repairs.
        """
        partial, is_best = trajectory.partial, score < self.best
        trajectory.idle += 1
        if score == WORST or not (is_best or trajectory.accepts(score)):
            partial.undo(START)
            return False
        partial.commit()
        trajectory.current = score
        if score < trajectory.best:
            trajectory.best, trajectory.idle = score, 0
        if is_best:
            self.best = score
            self._best_restorations = partial.restorations()
            if score.excess == 0 and not self.problem.objective.is_sum:
                self._limit_bytes = min(self._limit_bytes, int(score.value) - 1)
        return is_best
