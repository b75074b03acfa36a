"""Parameters of the row generation: all numbers on which its decisions depend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CUT_FAMILIES: Final = ("rounding", "interval")
"""Families of cuts, named like their modules, in the order in which they are separated."""
HEURISTICS: Final = frozenset({"repair", "repair_on_the_way", "local_search"})
"""Phases of the primal heuristic: ``repair`` repairs solutions of relaxations, with
``repair_on_the_way`` also those of unfinished solves; ``local_search`` is the large neighbourhood
search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyParams:
    """Parameters of the row generation.

    No parameter can make a schedule or a bound invalid: parameters change the search and its time.
    ``docs/concepts/lazy.md`` describes the alternatives that were tried.

    The end of a name states unit and range: ``_ratio`` is a fraction from 0 to 1, ``_s`` seconds
    from 0 on, and a whole number is at least 1. The *gap* is that between the bound and the
    incumbent's value, or the ceiling if that is smaller.
    """

    # -- enabled phases ----------------------------------------------------------------------------
    cuts: frozenset[str] = frozenset(CUT_FAMILIES)
    """Enabled families of cuts."""
    heuristics: frozenset[str] = HEURISTICS
    """Enabled phases of the primal heuristic."""

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
    wide_gap_time_ratio: float = 0.75
    """Maximum fraction of the remaining time, at least `MIN_SOLVE_S`, for one integer solve with a
    wide gap; the rest is for the primal heuristic. With a smaller gap a solve may take all
    remaining time, because a solve that is cut short starts again."""
    far_gap_time_ratio: float = 0.3
    """As `wide_gap_time_ratio`, for gaps of at least twice `far_gap_ratio`."""
    idle_root_time_ratio: float = 0.1
    """Fraction of the remaining time, at least `MIN_SOLVE_S`, without a better solution or bound
    after which an integer solve with a wide gap ends if it is still at its root."""
    search_time_ratio: float = 0.5
    """Fraction of the elapsed time that is due to the primal heuristic, for gaps up to
    `far_gap_ratio`. With a wide gap, the local search does not wait until all linear relaxations
    are solved, which may take seconds each."""
    far_search_time_ratio: float = 0.8
    """As `search_time_ratio`, for gaps of at least twice `far_gap_ratio`. Examples are training
    steps in tiles, whose rounds take seconds and prove little; the remaining rounds yield solutions
    from which the search starts."""
    counted_use_ratio: float = 0.02
    """Fraction of the cutoff, or of a limit, that one decision must exceed so that equal decisions
    are counted; 1 disables counting."""

    # -- deadlines ---------------------------------------------------------------------------------
    without_schedule_time_ratio: float = 1 / 6
    """Fraction of the remaining time after which, if no schedule was found, the search for the
    fastest schedule begins, if `can_search_fastest`; 1 disables that search."""

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
