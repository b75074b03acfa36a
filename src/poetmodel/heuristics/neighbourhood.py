"""Local search over drafts: tear a part out, mend it in another way, keep what is better.

Several lines of drafts are followed in turn, each mended in a way of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from poetmodel.heuristics.partial_schedule import Draft, Supply
from poetmodel.heuristics.penalties import Aim
from poetmodel.heuristics.repair import LONG, SHORT, Repair
from poetmodel.problem import Quantity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

LARGEST_TEAR: Final = 12
"""Most supplies torn out at once."""
NOISE: Final = 1.0
"""Noise of the prices while a draft is mended."""
TIGHTEN_NOISE: Final = 0.5
"""The same while what is not needed is taken away."""
WORSE: Final = 2e-3
"""How much worse than the current draft another may be to follow it, relatively."""
FAR: Final = 1e-2
"""How much worse than the best."""
STRESS_STEP: Final = 1.1
"""Factor by which the weight of the limits follows how well they are kept."""
HOPELESS: Final = 100
"""Turns without gain after which a line that is far behind goes on from the best draft."""
WAYS: Final = ((SHORT, True), (LONG, True), (LONG, False))
"""How the lines mend: the longest chain of recomputations, and whether they page."""
NOTHING: Final = (float("inf"), float("inf"))
"""Excess and value where there is no draft yet."""


def supplies_of(schedule: Schedule) -> list[Supply]:
    """Return what a schedule brings back."""
    return [
        *(Supply(t, k, again=True) for t, k in schedule.R if k < t),
        *(Supply(t, i, again=False) for t, i in schedule.M_in),
    ]


@dataclass(slots=True)
class _Line:
    """A course of drafts, each made of the one before."""

    draft: Draft
    depth: int
    paging: bool
    current: tuple[float, float] = NOTHING
    """Excess and value of the draft."""
    best: tuple[float, float] = NOTHING
    """The least of them so far."""
    idle: int = 0
    """Turns since then."""


class Improvement:
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
        Excess over limits and value of the best draft so far; infinite before the first.
    until_s : float
        When to give up, on the monotonic clock [s].

    Notes
    -----
    A turn tears out up to a dozen supplies that lie close to each other, in stages or in nodes,
    brings back greedily, at noisy prices, what then does not fit, and takes away what there is room
    to do without (Shaw, 1998; Schrimpf et al., 2000). A result that is a little worse is followed
    too. The weight of the limits rises while they are exceeded and falls while they are kept.

    Where both kinds of supplies are allowed there are three lines of drafts (`WAYS`): one prefers
    pages to long chains of recomputations, one takes what costs less, one does not page. They take
    turns; one that stays far behind goes on from the best draft, in its own way.

    References
    ----------
    P. Shaw, Using constraint programming and local search methods to solve vehicle routing
    problems, CP 1998. G. Schrimpf et al., Record breaking optimization results using the ruin and
    recreate principle, Journal of Computational Physics 159, 2000.
    """

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        self.problem = problem
        self.aim = Aim(problem)
        self.rng = Random(seed)  # noqa: S311 - nothing secret about it
        self.best = NOTHING
        self.until_s = float("inf")
        both = problem.can_page and any(map(problem.may_recompute, range(len(problem.graph.nodes))))
        self._lines = [
            _Line(Draft(problem.graph), depth, paging)
            for depth, paging in (WAYS if both else WAYS[:1])
        ]
        self._turns = 0
        self._stress = 1.0
        self._best_supplies: list[Supply] = []
        self._exceeded = False
        self._limit_bytes = problem.usable_ram_bytes

    def schedule(self) -> Schedule | None:
        """Return the best schedule that keeps all limits, if there is one."""
        if self.best[0] > 0:
            return None
        return Draft(self.problem.graph, self._best_supplies).schedule()

    def consider(self, supplies: Iterable[Supply]) -> bool:
        """Mend a draft with these supplies, and go on from it if it is the best so far.

        Returns
        -------
        bool
            Whether it is.
        """
        line = self._lines[0]
        draft, current = line.draft, line.current
        given = list(supplies)
        better = False
        for stress in (self._stress, float("inf")) if self.aim.limits else (0.0,):
            line.draft, line.current = Draft(self.problem.graph, given), NOTHING
            better = self._mend(line, 0.0, stress)
            if better or line.current[0] == 0:
                break
        if not better and current < NOTHING:
            line.draft, line.current = draft, current
        if current == NOTHING:
            if self.aim.limits:
                self._stress = self.aim.balance(line.draft)
            for other in self._lines[1:]:
                better = self._mend(other, 0.0, self._stress) or better
        return better

    def turn(self) -> bool:
        """Tear and mend once; return whether that led to the best draft so far."""
        line = self._next_line()
        supplies = line.draft.supplies()
        if not supplies:
            return self._mend(line, NOISE, self._stress)
        rng, node_of = self.rng, self.problem.graph.node_of
        centre = rng.choice(supplies)
        if rng.random() < 0.5:  # noqa: PLR2004 - one way as often as the other
            supplies.sort(key=lambda s: abs(s.stage - centre.stage))
        else:
            maker = [s.item if s.again else node_of[s.item] for s in supplies]
            node = maker[supplies.index(centre)]
            order = sorted(range(len(supplies)), key=lambda place: abs(maker[place] - node))
            supplies = [supplies[place] for place in order]
        size = rng.randint(1, LARGEST_TEAR)
        near = supplies[: 2 * size]
        for supply in rng.sample(near, min(size, len(near))):
            if supply in line.draft:
                line.draft.remove(supply)
        better = self._mend(line, NOISE, self._stress)
        if self.aim.limits:
            self._stress *= STRESS_STEP if self._exceeded else 1 / STRESS_STEP
        return better

    def _next_line(self) -> _Line:
        """Return the line whose turn it is; one that is far behind begins from the best draft."""
        line = self._lines[self._turns % len(self._lines)]
        self._turns += 1
        which = 0 if self.best[0] > 0 else 1
        behind = line.best[0] > self.best[0] or line.best[which] > self.best[which] * (1 + FAR)
        if line.idle > HOPELESS and behind:
            line.draft = Draft(self.problem.graph, self._best_supplies)
            line.current, line.best, line.idle = self.best, self.best, 0
        return line

    def _mend(self, line: _Line, noise: float, stress: float) -> bool:
        """Mend the draft of a line, and take it back if it is not worth following.

        Returns
        -------
        bool
            Whether it is the best so far.
        """
        draft = line.draft
        line.idle += 1
        repair = Repair(
            self.problem,
            draft,
            self.aim.prices(stress),
            self._limit_bytes,
            rng=self.rng,
            until_s=self.until_s,
            depth=line.depth,
            paging=line.paging,
        )
        if not repair.fit(noise):
            draft.undo(0)
            line.idle += HOPELESS // 2
            return False
        repair.tighten(noise and TIGHTEN_NOISE)
        found = (self.aim.excess(draft), self.aim.value(draft))
        self._exceeded = found[0] > 0
        better = found < self.best
        if not (better or self._may_follow(line, found)):
            draft.undo(0)
            return False
        draft.commit()
        line.current = found
        if found < line.best:
            line.best, line.idle = found, 0
        if better:
            self.best = found
            self._best_supplies = draft.supplies()
            if found[0] == 0 and self.problem.minimize == Quantity.RAM:
                self._limit_bytes = min(self._limit_bytes, int(found[1]) - 1)
        return better

    def _may_follow(self, line: _Line, found: tuple[float, float]) -> bool:
        """Return whether a line goes on from a draft that is not the best."""
        if found <= line.current:
            return True
        which = 0 if line.best[0] > 0 else 1
        if found[0] > 0 and which == 1:
            return False
        near = found[which] <= line.current[which] * (1 + WORSE)
        return near and found[which] <= line.best[which] * (1 + FAR)
