"""When which part of the row generation runs: every number that its policy depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CUT_FAMILIES: Final = ("rounding", "interval")
"""Families of cuts, by the names of their modules, in the order in which they are sought."""
HEURISTICS: Final = frozenset({"repair", "repair_on_the_way", "local_search"})
"""Parts of the primal heuristic; the second repairs what a solve finds before its last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyParams:
    """Parameters of the row generation.

    None of them can make an answer wrong: they decide only how soon there is one.
    ``docs/concepts/lazy.md`` says what was tried.

    Names tell units and ranges: ``_ratio`` is a fraction from 0 to 1, ``_s`` seconds from 0 on, and
    a whole number is at least 1. *Gap* is that between bound and incumbent, or the ceiling.
    """

    # -- what runs at all --------------------------------------------------------------------------
    cuts: frozenset[str] = frozenset(CUT_FAMILIES)
    """Families of cuts that are separated."""
    heuristics: frozenset[str] = HEURISTICS
    """Parts of the primal heuristic that run."""

    # -- how far the end is ------------------------------------------------------------------------
    small_gap_ratio: float = 0.01
    """Gap up to which a solve is near its end: there is no local search any more, and equal
    decisions are not counted, as counters are only more columns then."""
    wide_gap_ratio: float = 0.03
    """Gap above which it is far from it: relaxations take long there, so few rows are added."""
    far_gap_ratio: float = 0.1
    """Gap above which the proof will hardly be complete in time: the larger the gap is, the more
    time goes from integer solves to the search, up to twice this gap."""

    # -- linear phase ------------------------------------------------------------------------------
    cut_rounds: int = 30
    """Most rounds of cuts on one relaxation."""
    cuts_per_round: int = 400
    """Most cuts of a family that are added at once, the most violated ones."""
    cut_violation: float = 1e-3
    """Least violation of a cut that is worth adding, 0 or more. A cut that counts decisions has
    coefficients of 1, one in bytes is in units of the budget."""
    cut_gain_ratio: float = 1e-3
    """Rise of the linear bound that is worth another round of cuts, relative to the bound."""
    row_gain_ratio: float = 4e-3
    """The same for another round of rows; rows cost columns of the integer relaxations."""
    linear_rows: int = 4
    """Rows added at once; twice as many after each round without gain. All at once would make the
    groups of large graphs so fine that their linear relaxations take seconds each."""
    linear_growth_ratio: float = 0.5
    """The same as a part of the groups, where that is more."""
    tight_ratio: float = 0.97
    """Part of the RAM above which a stage of the incumbent is tight. With 1 there are none."""
    large_columns: int = 5000
    """Columns above which rows that are tight at the incumbent are added, too. Smaller relaxations
    are solved as integer programs, which more rows make harder."""
    rounds_without_gain: int = 3
    """Rounds without such a rise after which either loop stops."""
    most_sums: int = 1 << 20
    """Most sums of tensor sizes told apart for a rounded row, in greatest common divisors: a bit
    each."""

    # -- rows after an integer relaxation ----------------------------------------------------------
    easy_growth_ratio: float = 0.5
    """Rows that may be added after a relaxation that was solved without branching, as a part of its
    groups: the next one is hardly larger, and what it takes is building it."""
    single_row_gain_ratio: float = 0.02
    """Rise of the bound by the rows added before after which a single one is added: more rows make
    finer groups, more columns and a weaker linear relaxation."""
    few_rows: int = 2
    """Rows added near the end after half of such a rise. After less, answers only dodge what is
    enforced, and all rows come at once."""
    wide_gap_rows: int = 3
    """Rows added far from it after a rise below `single_row_gain_ratio`: with all of them the
    relaxations would not be solved in their time."""

    # -- integer relaxations -----------------------------------------------------------------------
    wide_gap_time_ratio: float = 0.75
    """Most of the time left for one integer solve with a wide gap; the primal heuristic has the
    rest. Near the end a solve may take all of it: one that is cut short begins anew."""
    far_gap_time_ratio: float = 0.3
    """The same from twice `far_gap_ratio` on."""
    idle_root_time_ratio: float = 0.1
    """Part of the time left after which an integer solve with a wide gap ends if it is still at its
    root, with no better answer and no higher bound in that time: the search is worth more."""
    search_time_ratio: float = 0.5
    """Part of the time that the primal heuristic may take of the linear phase with a wide gap: a
    local search does not wait until relaxations that take seconds each have come to their end."""
    far_search_time_ratio: float = 0.8
    """The same from twice `far_gap_ratio` on, as of steps in tiles: rounds take seconds there and
    prove little. Some time is left to them, as their answers lead the search to other places."""
    counted_part_ratio: float = 0.02
    """Part of the best value, or of a limit, that one decision must take where equal ones are
    counted; 1 switches counting off."""

    # -- deadlines ---------------------------------------------------------------------------------
    without_schedule_time_ratio: float = 1 / 6
    """Part of the time left without a schedule after which the fastest schedule is looked for; 1
    for never."""

    # -- primal worker -----------------------------------------------------------------------------
    worker_start_s: float = 0.5
    """After how long the process is started: that takes a second of its core."""

    def search_share(self, gap: float) -> float:
        """Return the part of the time that the primal heuristic may take with a wide gap."""
        return self._by_gap(gap, self.search_time_ratio, self.far_search_time_ratio)

    def solve_share(self, gap: float) -> float:
        """Return the part of the time left that one integer solve may take with a wide gap."""
        return self._by_gap(gap, self.wide_gap_time_ratio, self.far_gap_time_ratio)

    def _by_gap(self, gap: float, near: float, far: float) -> float:
        """Return a value between two: up to `far_gap_ratio`, and from twice as much on."""
        if gap >= 2 * self.far_gap_ratio:
            return far
        return near + (far - near) * max(0.0, gap / self.far_gap_ratio - 1)
