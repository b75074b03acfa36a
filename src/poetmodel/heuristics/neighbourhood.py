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
from poetmodel.heuristics.restorations import RECOMPUTE, Restoration, list_restorations

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.graph import Graph
    from poetmodel.heuristics.partial_schedule import PartialSchedule
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


STYLES: Final = (
    RepairStyle(max_chain=6),
    RepairStyle(candidates_per_relief=60),
    RepairStyle(may_page=False),
)
"""Repair style of each trajectory. Only the first is used unless a problem permits both paging and
recomputation."""
MAX_DESTROYED: Final = 12
"""Maximum number of restorations destroyed in one iteration, plus those that serve only them."""
MAX_RISE_RATIO: Final = 2e-3
"""Maximum relative rise of a score's value, or of its excess while limits are exceeded, from one
partial schedule of a trajectory to the next."""
MAX_DISTANCE_RATIO: Final = 1e-2
"""Maximum relative distance of a score above the best score of the trajectory. A trajectory that
meets all limits is behind if its best score is farther above the overall best score."""
RESTART_ITERATIONS: Final = 100
"""Iterations without a better score after which a trajectory that is behind restarts from the
overall best. A failed repair adds half of these iterations."""
MAX_IDLE_ITERATIONS: Final = 10 * RESTART_ITERATIONS
"""Iterations without a better schedule after which `improve_schedule` ends."""
PENALTY_FACTOR: Final = 1.1
"""Factor by which the penalty rises while limits are exceeded, and falls while they are met."""


def stage_position(_graph: Graph, restoration: Restoration) -> int:
    """Return the stage of a restoration."""
    return restoration.stage


def node_position(graph: Graph, restoration: Restoration) -> int:
    """Return the node that a restoration recomputes, or that computes its tensor."""
    is_recomputation = restoration.kind == RECOMPUTE
    return restoration.item if is_recomputation else graph.node_of[restoration.item]


NEIGHBOURHOODS: Final = (stage_position, node_position)
"""Positions of restorations; an iteration destroys restorations whose positions are close. Each is
used with equal probability."""


@dataclass(slots=True)
class _Trajectory:
    """The latest of a sequence of partial schedules, each a modification of the one before."""

    partial: PartialSchedule
    style: RepairStyle
    obstacles: dict[Restoration, Obstacle] = field(default_factory=dict)
    """Obstacles of the trajectory's repairs."""
    current_score: Score = WORST
    """Score of `partial`, after its last accepted change."""
    best_score: Score = WORST
    n_idle: int = 0
    """Iterations since the trajectory's best score; failed repairs count more."""

    def accepts(self, score: Score) -> bool:
        """Return whether to continue from a partial schedule with `score`.

        It may exceed the current score by `MAX_RISE_RATIO` and the trajectory's best by
        `MAX_DISTANCE_RATIO`: in excess until the best has none, then in value.
        """
        if score <= self.current_score:
            return True
        value, current_value, best_value = (
            score.excess,
            self.current_score.excess,
            self.best_score.excess,
        )
        if best_value == 0:
            if value > 0:
                return False
            value, current_value, best_value = (
                score.value,
                self.current_score.value,
                self.best_score.value,
            )
        return value <= current_value * (1 + MAX_RISE_RATIO) and value <= best_value * (
            1 + MAX_DISTANCE_RATIO
        )

    def is_behind(self, overall_best: Score) -> bool:
        """Return whether the best score is worse in excess or, by a factor, in value."""
        if overall_best.excess > 0 or self.best_score.excess > 0:
            return self.best_score.excess > overall_best.excess
        return self.best_score.value > overall_best.value * (1 + MAX_DISTANCE_RATIO)


def improve_schedule(
    problem: Problem, schedule: Schedule, *, max_s: float, seed: int = 0
) -> Schedule | None:
    """Search from a schedule that was made for the same RAM or more; return the best schedule.

    None if no candidate meets all limits; per-stage constraints are not checked. Ends after `max_s`
    [s], or `MAX_IDLE_ITERATIONS` iterations without a better schedule.
    """
    search, n_idle = LargeNeighbourhoodSearch(problem, seed=seed), 0
    search.until_s = now_s() + max_s
    search.consider(list_restorations(problem.graph, schedule))
    while search.best_score != WORST and n_idle < MAX_IDLE_ITERATIONS and now_s() < search.until_s:
        n_idle = 0 if search.iterate() else n_idle + 1
    return search.schedule()


class LargeNeighbourhoodSearch:
    """A large neighbourhood search for schedules, deterministic for a seed without time limit.

    Notes
    -----
    An iteration destroys up to a dozen restorations that are close to each other, in stages or in
    nodes. It restores tensors greedily, at noisy prices, until every step fits, and drops unneeded
    restorations (Shaw, 1998; Schrimpf et al., 2000). A slightly worse result is accepted, too. The
    penalty for the use of limits rises while a limit is exceeded and falls while all are met.

    If tensors may be both paged and recomputed, three trajectories take turns: one prefers page-ins
    to long chains of recomputations, one takes the cheaper of both, one does not page. A trajectory
    that is behind restarts from the best partial schedule, in its own style.

    References
    ----------
    P. Shaw, Using constraint programming and local search methods to solve vehicle routing
    problems, CP 1998. G. Schrimpf et al., Record breaking optimization results using the ruin and
    recreate principle, Journal of Computational Physics 159, 2000.
    """

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        self.problem = problem
        self.objective = PenalizedObjective(problem)
        self.rng = Random(seed)  # noqa: S311 - no secret depends on it
        self.best_score = WORST
        """Score of the best partial schedule so far."""
        self.until_s = math.inf
        """Time at which the search ends, on the clock of `now_s` [s]."""
        can_page_and_recompute = problem.can_page and any(
            map(problem.may_recompute, range(len(problem.graph.nodes)))
        )
        self._trajectories = [
            _Trajectory(self.objective.make_partial(), style)
            for style in (STYLES if can_page_and_recompute else STYLES[:1])
        ]
        self._n_iterations = 0
        self._penalty = 1.0
        """Factor on the use of limits in the prices, see `PenalizedObjective.prices`."""
        self._best_restorations: list[Restoration] = []
        """Restorations of the best partial schedule so far."""
        self._exceeds_limits = False
        """Whether the last repaired partial schedule that fits in RAM exceeds other limits."""
        self._limit_bytes = problem.usable_ram_bytes
        """RAM limit of repairs [B]; if RAM is minimized, below the best peak that meets limits."""

    def schedule(self) -> Schedule | None:
        """Return the best schedule so far; None if it misses limits, per-stage ones aside."""
        if self.best_score.excess > 0:
            return None
        return self.objective.make_partial(self._best_restorations).schedule()

    def consider(self, restorations: Iterable[Restoration]) -> bool:
        """Repair a partial schedule of `restorations`; return whether any result is a new best.

        If limits with a price are not met, repairs again at an infinite penalty. The first call
        sets the penalty, and starts the further trajectories from keep-all.
        """
        first_trajectory, *other_trajectories = self._trajectories
        partial_before, score_before = first_trajectory.partial, first_trajectory.current_score
        restoration_list = list(restorations)
        is_best = False
        for penalty in (self._penalty, math.inf) if self.objective.is_limited else (0.0,):
            first_trajectory.partial, first_trajectory.current_score = (
                self.objective.make_partial(restoration_list),
                WORST,
            )
            is_best = self._accept_or_undo(
                first_trajectory, self._repair_trajectory(first_trajectory, penalty)
            )
            if is_best or first_trajectory.current_score.excess == 0:
                break
        if score_before == WORST:  # no earlier result was accepted
            if self.objective.is_limited:
                self._penalty = self.objective.balance(first_trajectory.partial)
            for trajectory in other_trajectories:
                is_best = (
                    self._accept_or_undo(
                        trajectory, self._repair_trajectory(trajectory, self._penalty)
                    )
                    or is_best
                )
        elif not is_best:
            first_trajectory.partial, first_trajectory.current_score = partial_before, score_before
        return is_best

    def iterate(self) -> bool:
        """Destroy and repair a part of a trajectory; accept or undo it; return if it is best."""
        trajectory = self._select_trajectory()
        has_destroyed = self._destroy_restorations(trajectory.partial)
        is_best = self._accept_or_undo(
            trajectory, self._repair_trajectory(trajectory, self._penalty, self.rng)
        )
        if has_destroyed and self.objective.is_limited:
            self._penalty *= PENALTY_FACTOR if self._exceeds_limits else 1 / PENALTY_FACTOR
        return is_best

    def _select_trajectory(self) -> _Trajectory:
        """Return the next trajectory, restarted if behind and idle; count the iteration."""
        trajectory = self._trajectories[self._n_iterations % len(self._trajectories)]
        self._n_iterations += 1
        may_continue = trajectory.n_idle <= RESTART_ITERATIONS
        if not may_continue and trajectory.is_behind(self.best_score):
            trajectory.partial = self.objective.make_partial(self._best_restorations)
            trajectory.current_score = trajectory.best_score = self.best_score
            trajectory.n_idle = 0
        return trajectory

    def _destroy_restorations(self, partial: PartialSchedule) -> bool:
        """Remove random close restorations, and those that serve only them; False without any."""
        restorations = partial.restorations()
        if not restorations:
            return False
        rng, graph = self.rng, self.problem.graph
        centre = rng.choice(restorations)
        position = NEIGHBOURHOODS[int(rng.random() * len(NEIGHBOURHOODS))]
        centre_position = position(graph, centre)
        restorations.sort(
            key=lambda restoration: abs(position(graph, restoration) - centre_position)
        )
        count = rng.randint(1, MAX_DESTROYED)
        nearest_restorations = restorations[: 2 * count]
        for restoration in rng.sample(nearest_restorations, min(count, len(nearest_restorations))):
            if restoration in partial:
                partial.remove(restoration)
        return True

    def _repair_trajectory(
        self, trajectory: _Trajectory, penalty: float, rng: Random | None = None
    ) -> Score:
        """Repair a trajectory's partial schedule; return its score, `WORST` after a failure."""
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
        if not is_fit and self.objective.rows is not None and trajectory.current_score.excess > 0:
            # The last accepted schedule, if any, exceeds limits, so rows may be exceeded.
            repair.respects_rows = False
            is_fit = repair.fit()
        if not is_fit:
            trajectory.n_idle += RESTART_ITERATIONS // 2
            return WORST
        repair.satisfy_constraints()
        repair.drop_unneeded()
        score = self.objective.score(partial)
        self._exceeds_limits = score.excess > 0
        return score

    def _accept_or_undo(self, trajectory: _Trajectory, score: Score) -> bool:
        """Accept a repair, or undo all changes since the last accepted one; return if it is best.

        If RAM is minimized, a new best peak lowers the RAM limit of further repairs.
        """
        partial, is_best = trajectory.partial, score < self.best_score
        trajectory.n_idle += 1
        if score == WORST or not (is_best or trajectory.accepts(score)):
            partial.undo(START)
            return False
        partial.commit()
        trajectory.current_score = score
        if score < trajectory.best_score:
            trajectory.best_score, trajectory.n_idle = score, 0
        if is_best:
            self.best_score = score
            self._best_restorations = partial.restorations()
            if score.excess == 0 and not self.problem.objective.is_sum:
                self._limit_bytes = min(self._limit_bytes, int(score.value) - 1)
        return is_best
