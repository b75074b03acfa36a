"""Policy of a solve: numbers on which the course of the search depends, but no claim does.

They say whether, when and how long a part runs. How a heuristic works is in constants of its module
in `poetmodel.heuristics`; plans and arenas around the solves of any method have those of `fitting`.
Tolerances of values and bounds are no policy: they are stated where a proof needs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

CUT_FAMILIES: Final = ("rounding", "interval")
"""Families of cuts, named like their modules, in the order in which they are separated."""
HEURISTICS: Final = frozenset({"repair", "repair_on_the_way", "local_search"})
"""Searches of the primal heuristic: ``repair`` repairs solutions of relaxations, with
``repair_on_the_way`` also those of unfinished solves; ``local_search`` is the large neighbourhood
search."""
ALL_ROWS: Final = 1 << 20
"""More rows than any round has candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Parameters of the search; none can make a schedule or a bound invalid.

    The end of a name states unit and range: ``_ratio`` is a fraction from 0 to 1, ``_s`` seconds
    from 0 on, a whole number is at least 1. The *gap* is that between the bound and the incumbent's
    value, or the ceiling if smaller. ``docs/concepts/lazy.md`` describes the alternatives that were
    tried.
    """

    # -- enabled parts -----------------------------------------------------------------------------
    cuts: frozenset[str] = frozenset(CUT_FAMILIES)
    """Enabled families of cuts."""
    heuristics: frozenset[str] = HEURISTICS
    """Enabled searches of the primal heuristic."""
    drops_dominated_keeps: bool = True
    """Whether relaxations lack the keeps that a schedule as good as any does without."""

    # -- first schedules and units -----------------------------------------------------------------
    greedy_time_ratio: float = 0.1
    """Fraction of the time limit after which the greedy heuristic returns its best schedule."""
    max_greedy_time_ratio: float = 0.5
    """Fraction of the remaining time after which the greedy heuristic ends without a schedule, but
    not before `GRACE_S`. The rest is for the proof, which can find schedules, too."""
    min_units: float = 1.0
    """Smallest value of a known schedule, in units of the objective, that a solver resolves to a
    millionth. For a smaller value, the problem is restated in finer units."""
    max_units: float = 1e5
    """Largest value of a known schedule, in units of the objective. For a larger value, the problem
    is restated in coarser units, because a solver's tolerance becomes too strict."""

    # -- ranges of the gap -------------------------------------------------------------------------
    small_gap_ratio: float = 0.01
    """Gap up to which a solve is near its end: no local search follows a repair, and equal
    decisions are not counted, because counters would only add columns."""
    wide_gap_ratio: float = 0.03
    """Gap above which relaxations take long: few rows are added, and integer solves are limited."""
    far_gap_ratio: float = 0.1
    """Gap above which the proof will probably not end in time. From this gap to twice the gap, more
    and more time moves from integer solves to the heuristic."""

    # -- linear phase ------------------------------------------------------------------------------
    cut_rounds: int = 30
    """Maximum number of cut rounds on one relaxation."""
    cuts_per_round: int = 400
    """Number of interval cuts in one round after which no further ones are sought."""
    cut_violation: float = 1e-3
    """Violation above which a cut is added, 0 or more. Interval cuts have coefficients of 1 or -1;
    rounding cuts are divided by the size of their largest tensor."""
    cut_gain_ratio: float = 1e-3
    """Minimum rise of the linear bound, relative to the bound, that counts as a gain of a cut
    round."""
    row_gain_ratio: float = 4e-3
    """Minimum relative rise of the linear bound that counts as a gain of a round of rows. Rows add
    columns to the integer relaxations, so a smaller rise is not worth them."""
    linear_rows: int = 4
    """Number of rows added at once, doubled after each round without gain. With all rows at once,
    the groups of large graphs would be so fine that each linear relaxation would take seconds."""
    linear_growth_ratio: float = 0.5
    """Number of rows added at once, as a fraction of the groups, if that is more than
    `linear_rows`."""
    tight_ratio: float = 0.97
    """Fraction of the RAM above which a stage of the incumbent is tight; 1 means never."""
    large_columns: int = 5000
    """Number of columns above which rows that are tight at the incumbent are added, too. In smaller
    relaxations they cost more than they gain, because more rows make integer programs harder."""
    rounds_without_gain: int = 3
    """Number of rounds without a gain after which the cut loop or the row loop stops."""
    max_sums: int = 1 << 20
    """Maximum limit of a row for which sums of tensor sizes are enumerated, one bit each, in
    multiples of their greatest common divisor. Larger limits are rounded down to a multiple."""

    # -- rows after an integer relaxation ----------------------------------------------------------
    easy_growth_ratio: float = 0.5
    """Maximum number of rows added after a relaxation that was solved without branching, as a
    fraction of its groups, if the parameters below permit fewer. The next relaxation is hardly
    larger, and most of its time is for building it."""
    single_row_gain_ratio: float = 0.02
    """Relative rise of the bound by the last rows, above which a single row is added. More rows
    cause finer groups, more columns and a weaker linear relaxation."""
    few_rows: int = 2
    """Number of rows added without a wide gap after half of such a rise. After a smaller rise, all
    violated rows are added at once, because solutions only move the violation to other stages."""
    wide_gap_rows: int = 3
    """Number of rows added with a wide gap after a rise below `single_row_gain_ratio`. With all
    rows, the relaxations would exceed their time limits."""

    # -- integer relaxations -----------------------------------------------------------------------
    min_solve_s: float = 5.0
    """Minimum time limit of the first integer solve, within the remaining time; doubled after a
    solve after which no row or cover cut is added [s]."""
    wide_gap_time_ratio: float = 0.75
    """Maximum fraction of the remaining time, at least `min_solve_s`, for one integer solve with a
    wide gap; the rest is for the primal heuristic. With a smaller gap a solve may take all
    remaining time, because a solve that is cut short starts again."""
    far_gap_time_ratio: float = 0.3
    """As `wide_gap_time_ratio`, for gaps of at least twice `far_gap_ratio`."""
    idle_root_time_ratio: float = 0.1
    """Fraction of the remaining time, at least `min_solve_s`, without a better solution or bound
    after which an integer solve with a wide gap ends if it is still at its root."""
    counted_use_ratio: float = 0.02
    """Fraction of the cutoff, or of a limit, that one decision must exceed so that equal decisions
    are counted; 1 disables counting."""

    # -- primal heuristic --------------------------------------------------------------------------
    repair_s: float = 1.0
    """Maximum time of one repair in the proof's thread, unless the heuristic is due more: the
    solver waits meanwhile [s]."""
    search_s: float = 3.0
    """Maximum time of the local search after one solution, unless the heuristic is due more [s]."""
    idle_iterations_per_column: float = 0.01
    """Iterations without a better schedule after which the first local search ends, for each column
    of the largest relaxation. The limit is doubled after a search that found a better schedule, and
    halved after other searches, but never below this number."""
    iterations_per_offer: int = 100
    """Number of iterations of a local search between two offers of its best schedule: each offer is
    verified."""
    search_time_ratio: float = 0.5
    """Fraction of the elapsed time that is due to the primal heuristic, for gaps up to
    `far_gap_ratio`. With a wide gap, the local search does not wait until all linear relaxations
    are solved, which may take seconds each."""
    far_search_time_ratio: float = 0.8
    """As `search_time_ratio`, for gaps of at least twice `far_gap_ratio`. Examples are training
    steps in tiles, whose rounds take seconds and prove little; the remaining rounds yield solutions
    from which the search starts."""

    # -- deadlines ---------------------------------------------------------------------------------
    without_schedule_time_ratio: float = 1 / 6
    """Fraction of the remaining time after which, if no schedule was found, the search for the
    fastest schedule begins, if `can_search_fastest`; 1 disables that search."""
    fastest_time_ratio: float = 0.8
    """Maximum fraction of the remaining time for the search for the fastest schedule; the rest is
    for a proof that starts from this schedule."""

    # -- makespans ---------------------------------------------------------------------------------
    relaxation_time_ratio: float = 0.5
    """Fraction of the remaining time for the relaxation, if the makespan matters."""
    surrogate_time_ratio: float = 0.5
    """Fraction of the remaining time for each further surrogate."""
    least_makespan_time_ratio: float = 0.25
    """Fraction of the bisection's time left for the least makespan if no plan is in time."""
    min_weight_step: float = 1 / 64
    """Smallest difference between two transfer weights that the bisection distinguishes."""
    time_weights: tuple[float, ...] = (1 / 1024, 1 / 256, 1 / 64, 1 / 8, 1.0)
    """Transfer weights of surrogates that minimize time, in the order in which they are tried after
    weight 0. Small weights are first because most transfers can overlap computations."""

    # -- primal worker -----------------------------------------------------------------------------
    worker_start_s: float = 0.5
    """Delay before the worker process starts, because the start takes a second of one core [s]."""

    def search_time_fraction(self, gap: float) -> float:
        """Return the fraction of the elapsed time that is due to the primal heuristic at `gap`."""
        return self._interpolate_by_gap(gap, self.search_time_ratio, self.far_search_time_ratio)

    def solve_time_fraction(self, gap: float) -> float:
        """Return the fraction of the remaining time for one integer solve at a wide `gap`."""
        return self._interpolate_by_gap(gap, self.wide_gap_time_ratio, self.far_gap_time_ratio)

    def _interpolate_by_gap(self, gap: float, near: float, far: float) -> float:
        """Return `near` up to `far_gap_ratio`, `far` from twice that gap on, linear in between."""
        if gap >= 2 * self.far_gap_ratio:
            return far
        return near + (far - near) * max(0.0, gap / self.far_gap_ratio - 1)


SWITCHES: Final[Mapping[str, Mapping[str, Any]]] = {
    **{f"{name} cuts": {"cuts": frozenset(CUT_FAMILIES) - {name}} for name in CUT_FAMILIES},
    **{name.replace("_", " "): {"heuristics": HEURISTICS - {name}} for name in sorted(HEURISTICS)},
    "dominated keeps": {"drops_dominated_keeps": False},
    "few rows in the linear phase": {"linear_growth_ratio": 1.0, "linear_rows": ALL_ROWS},
    "rows tight at the incumbent": {"tight_ratio": 1.0},
    "more rows after easy relaxations": {"easy_growth_ratio": 0.0},
    "few rows after integer relaxations": {"few_rows": ALL_ROWS, "wide_gap_rows": ALL_ROWS},
    "limit of integer solves": {"wide_gap_time_ratio": 1.0, "far_gap_time_ratio": 1.0},
    "end at an idle root": {"idle_root_time_ratio": 1.0},
    "more time far from the proof": {"far_gap_ratio": math.inf},
    "count of equal decisions": {"counted_use_ratio": 1.0},
    "search for the fastest schedule": {"without_schedule_time_ratio": 1.0},
}
"""The parts of the search that can be switched off, with the parameters that do so."""
