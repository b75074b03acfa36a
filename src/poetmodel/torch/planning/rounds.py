"""A search that ends when what it may still gain is less than it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.result import Termination
from poetmodel.torch.planning.cache import rank_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule

FIRST_ROUND_S: Final = 1.0
"""Time limit of the first round of a search [s]."""


def search_in_rounds(
    solve_within: Callable[[float, Schedule | None], SolveResult],
    known: SolveResult | None,
    *,
    steps: int,
    time_limit_s: float,
) -> SolveResult:
    """Solve in rounds, each twice as long, until `steps` steps cannot gain what a round costs.

    `solve_within` gets a time limit [s] and the best schedule so far; the minimized value is the
    time of a step [s]. The result has the time of all rounds as its time limit, so that a later
    search continues from there.
    """
    best, spent_s = known, 0.0
    round_s = max(FIRST_ROUND_S, 0.0 if known is None else known.time_limit_s or 0.0)
    while best is None or (spent_s < time_limit_s and _is_worth(best, steps, round_s)):
        limit_s = min(round_s, time_limit_s - spent_s)
        result = solve_within(limit_s, None if best is None else best.schedule)
        spent_s += limit_s
        if best is None or best.schedule is None or rank_key(result) <= rank_key(best):
            best = result
        if result.termination != Termination.TIME_LIMIT:
            break
        round_s *= 2
    if not spent_s:
        return best
    earlier_s = 0.0 if known is None else known.time_limit_s or 0.0
    return replace(best, time_limit_s=earlier_s + spent_s)


def _is_worth(result: SolveResult, steps: int, round_s: float) -> bool:
    """Return whether a better schedule may gain more in `steps` steps than a round takes."""
    value, bound = result.value, result.bound
    if value is None or bound is None:
        return True
    return steps * (value - bound) > round_s
