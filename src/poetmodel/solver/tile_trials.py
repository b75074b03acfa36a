"""The size of tiles with the best schedule: each that fits is solved for a share of the time."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.result import Termination
from poetmodel.solver.facade import solve as solve_by_default

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import Request, SolveProgress

TRIAL_RATIO: Final = 0.4
"""Share of the time left that all trials may take together; the rest is for the chosen size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTrial:
    """Value and bound that a short solve found for a size of tiles."""

    tile_bytes: int
    """The size [B]."""
    value: float | None
    """The minimized value of the best schedule, in its own unit; None without a schedule."""
    bound: float | None
    """Proven bound on it; None if no schedule exists."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTiles:
    """The size of tiles that trials chose."""

    tile_bytes: int | None
    """The size [B]; None where the step stays whole."""
    step: LoweredStep
    """The step in these tiles."""
    result: SolveResult | None = None
    """The result of the trial with the best schedule, to begin from; None without a schedule."""
    trials: tuple[TileTrial, ...] = ()
    """All trials, the largest size first; empty if there was one size alone."""
    interrupted: bool = False
    """Whether Ctrl-C or the observer ended the trials."""


def cheapest_tiles(
    candidates: Sequence[tuple[int | None, LoweredStep]],
    state: Callable[[LoweredStep], Problem],
    clock: Request,
    *,
    solve: Callable[..., SolveResult] = solve_by_default,
    time_ratio: float = TRIAL_RATIO,
) -> ChosenTiles:
    """Solve each size of tiles for a share of the time, and return that of the least value.

    Of equal sizes the largest is returned. A single candidate is returned without a solve.

    Parameters
    ----------
    candidates : sequence of (int or None, LoweredStep)
        Sizes that fit, with the step in tiles of each; if several, none is whole.
    state : callable
        Returns the problem of a step.
    clock : Request
        The request whose time, gap, back end and observer count.
    solve : callable
        The function that solves a problem, with keyword arguments of `poetmodel.solve`.
    time_ratio : float
        Share of the time left that the trials may take. Each may take an equal part of what is left
        of that. A trial ends early where its bound proves that it cannot be the cheapest.
    """
    trials: list[TileTrial] = []
    best: tuple[float, int, SolveResult | None] = (math.inf, 0, None)
    interrupted = False
    end_s = clock.remaining_s() * (1 - time_ratio)
    for number, (tile_bytes, step) in enumerate(candidates if len(candidates) > 1 else ()):
        share_s = (clock.remaining_s() - end_s) / (len(candidates) - number)
        if share_s <= 0 or tile_bytes is None or interrupted:
            break
        cutoff = _Cutoff(clock, best[0])
        result = solve(
            state(step),
            time_limit=share_s,
            gap=clock.gap,
            backend=clock.backend,
            threads=clock.threads,
            seed=clock.seed,
            solver_options=clock.solver_options,
            on_progress=cutoff.watch,
        )
        value, bound = result.value, result.proven_bound
        known_bound = bound if math.isfinite(bound) else None
        trials.append(TileTrial(tile_bytes=tile_bytes, value=value, bound=known_bound))
        if value is not None and value < best[0]:
            best = value, number, result
        interrupted = result.termination == Termination.INTERRUPTED and not cutoff.is_reached
    tile_bytes, step = candidates[best[1]]
    return ChosenTiles(
        tile_bytes=tile_bytes,
        step=step,
        result=best[2],
        trials=tuple(trials),
        interrupted=interrupted,
    )


class _Cutoff:
    """An observer that ends a trial whose bound reaches the least value of earlier trials."""

    def __init__(self, clock: Request, least: float) -> None:
        self.clock, self.least = clock, least
        self.is_reached = False

    def watch(self, progress: SolveProgress) -> bool:
        """Pass a report on to the observer of the request; return whether the trial goes on."""
        wanted = None if self.clock.on_progress is None else self.clock.on_progress(progress)
        if progress.bound is not None and progress.bound >= self.least:
            self.is_reached = True
        return wanted is not False and not self.is_reached
