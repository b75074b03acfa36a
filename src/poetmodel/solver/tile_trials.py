"""Choose the tile size with the best schedule: solve each size for a fraction of the time limit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.result import Termination
from poetmodel.solver.facade import execute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import Request, SolveProgress

TRIAL_RATIO: Final = 0.4
"""Fraction of the remaining time for all trials together. The rest is for the chosen size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTrial:
    """Value and bound that a short solve found for one tile size."""

    tile_bytes: int
    """The tile size [B]."""
    value: float | None
    """The minimized value of the best schedule, in the unit of the quantity; None without one."""
    bound: float | None
    """Proven lower bound on the value, at least the baseline, also if there is no schedule; None if
    it is not finite."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTiles:
    """The tile size with the best trial."""

    tile_bytes: int | None
    """The tile size [B]; None if the step has no tiles."""
    step: LoweredStep
    """The step in tiles of `tile_bytes`."""
    result: SolveResult | None = None
    """The result of the trial with the best schedule, from which the next solve starts; None if no
    trial found one."""
    trials: tuple[TileTrial, ...] = ()
    """All executed trials in the order of the candidates; empty if there was a single candidate, or
    no time remained."""
    is_interrupted: bool = False
    """Whether Ctrl-C or the progress callback ended the trials."""


def find_cheapest_tiles(
    candidates: Sequence[tuple[int | None, LoweredStep]],
    make_problem: Callable[[LoweredStep], Problem],
    request: Request,
    *,
    excess_bytes: Callable[[LoweredStep, SolveResult], int] = lambda _step, _result: 0,
    solve: Callable[[Problem, Request], SolveResult] = execute,
    time_ratio: float = TRIAL_RATIO,
) -> ChosenTiles:
    """Solve each tile size for a fraction of the time, and return the size with the smallest value.

    `candidates` are tile sizes [B] with their steps; None is a step without tiles, valid only
    alone. `excess_bytes` returns the bytes by which a trial's program exceeds a limit of the
    device; if all exceed it, the smallest excess counts. The first of equal sizes is returned. The
    fraction `time_ratio` of the remaining time is divided equally among trials. After Ctrl-C, the
    best size so far is returned.
    """
    trials: list[TileTrial] = []
    best: tuple[float, float, int, SolveResult | None] = (math.inf, math.inf, 0, None)
    """Smallest excess so far [B], the smallest value with that excess, the position of its
    candidate, and the result of its trial."""
    was_interrupted = False
    reserved_s = request.remaining_s() * (1 - time_ratio)
    for position, (tile_bytes, step) in enumerate(candidates if len(candidates) > 1 else ()):
        limit_s = (request.remaining_s() - reserved_s) / (len(candidates) - position)
        if limit_s <= 0 or tile_bytes is None or was_interrupted:
            break
        cutoff = _Cutoff(request, math.inf if best[0] else best[1])
        result = solve(
            make_problem(step), request.restart(limit_s, on_progress=cutoff.handle_report)
        )
        value, bound = result.value, result.proven_bound
        known_bound = bound if math.isfinite(bound) else None
        trials.append(TileTrial(tile_bytes=tile_bytes, value=value, bound=known_bound))
        if value is not None and (best[0] or value < best[1]):
            excess = excess_bytes(step, result)
            if (excess, value) < best[:2]:
                best = excess, value, position, result
        was_interrupted = result.termination == Termination.INTERRUPTED and not cutoff.is_reached
    *_, best_position, best_result = best
    tile_bytes, step = candidates[best_position]
    return ChosenTiles(
        tile_bytes=tile_bytes,
        step=step,
        result=best_result,
        trials=tuple(trials),
        is_interrupted=was_interrupted,
    )


class _Cutoff:
    """A progress callback that ends a trial when the trial's bound reaches `min_value`."""

    def __init__(self, request: Request, min_value: float) -> None:
        self.request, self.min_value = request, min_value
        self.is_reached = False

    def handle_report(self, progress: SolveProgress) -> bool:
        """Forward a report; return whether the trial continues. Sets `is_reached`."""
        on_progress = self.request.on_progress
        if on_progress is not None and on_progress(progress) is False:
            return False
        if progress.bound is not None and progress.bound >= self.min_value:
            self.is_reached = True
        return not self.is_reached
