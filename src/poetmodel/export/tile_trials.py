"""The size of tiles with the best schedule: each that fits is solved for a share of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.solver import solve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import Request, SolveProgress

TRIAL_RATIO: Final = 0.4
"""Share of the time left that all trials may take together; the rest is for the chosen size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTrial:
    """What a short solve found for a size of tiles."""

    tile_bytes: int
    """The size [B]."""
    value: float | None
    """The minimized value of the best schedule, in its own unit; None without a schedule."""
    bound: float
    """Proven bound on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTiles:
    """The size of tiles that trials chose."""

    tile_bytes: int | None
    """The size [B]; None where the step stays whole."""
    step: LoweredStep
    """The step in them."""
    schedule: Schedule | None
    """The best schedule of the trial, to begin from; None without one."""
    trials: tuple[TileTrial, ...]
    """All trials, the largest size first; none where there was no choice."""


def cheapest_tiles(
    candidates: Sequence[tuple[int | None, LoweredStep]],
    state: Callable[[LoweredStep], Problem],
    clock: Request,
    *,
    time_ratio: float = TRIAL_RATIO,
) -> ChosenTiles:
    """Return the size with the least value found, the largest of equal ones; the only one as it is.

    Parameters
    ----------
    candidates : sequence of (int or None, LoweredStep)
        Sizes that fit, with the step in tiles of each; if several, none is whole.
    state : callable
        Returns the problem of a step.
    clock : Request
        The request whose time, gap and observer count.
    time_ratio : float
        Share of the time left that the trials may take. Each may take an equal part of what is left
        of that. A trial ends early where its bound proves that it cannot be the cheapest.
    """
    trials: list[TileTrial] = []
    best: tuple[float, int, Schedule | None] = (math.inf, 0, None)
    end_s = clock.remaining_s() * (1 - time_ratio)
    for number, (tile_bytes, step) in enumerate(candidates if len(candidates) > 1 else ()):
        share_s = (clock.remaining_s() - end_s) / (len(candidates) - number)
        if share_s <= 0 or tile_bytes is None:
            break
        watch = _watch(clock, best[0])
        result = solve(state(step), time_limit=share_s, gap=clock.gap, on_progress=watch)
        value = result.value
        trials.append(TileTrial(tile_bytes=tile_bytes, value=value, bound=result.proven_bound))
        if value is not None and value < best[0]:
            best = value, number, result.schedule
    tile_bytes, step = candidates[best[1]]
    return ChosenTiles(tile_bytes=tile_bytes, step=step, schedule=best[2], trials=tuple(trials))


def _watch(clock: Request, least: float) -> Callable[[SolveProgress], bool]:
    """Return an observer that ends a trial whose bound reaches `least`."""

    def goes_on(progress: SolveProgress) -> bool:
        wanted = None if clock.on_progress is None else clock.on_progress(progress)
        return wanted is not False and (progress.bound is None or progress.bound < least)

    return goes_on
