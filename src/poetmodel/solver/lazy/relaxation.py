"""A compiled relaxation: its columns by decision, its rows and cuts as arrays."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.layout import require_layout, to_standard_form
from poetmodel.backends.sparse import csr_array
from poetmodel.clock import check_time_limit
from poetmodel.heuristics.restorations import PAGE_IN, PAGE_OUT, RECOMPUTE, Restoration
from poetmodel.model.aggregated import build_relaxation
from poetmodel.model.memory import memory_values
from poetmodel.solver.lazy.disaggregation import (
    ROUNDING,
    Disaggregation,
    GroupDecisions,
    disaggregate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from poetmodel.backends.standard_form import Layout, StandardForm
    from poetmodel.model.arrays import Family, Model
    from poetmodel.model.events import Events
    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.lazy.cuts import Cut, Separator

MAX_START_VIOLATION: Final = 1e-6
"""Maximum violation of a scaled row by a start."""
TIGHT_SLACK: Final = 1e-6
"""Maximum slack of a tight cut."""
FAMILIES: Final = (
    "kept",
    "recomputed",
    "paged_in",
    "paged_out",
    "resident",
    "storage_home",
    "extra_recomputed",
    "extra_paged_in",
)
"""Families of the model's variables whose columns a relaxation has as fields."""


@dataclass(kw_only=True)
class Relaxation:
    """A grouped relaxation in standard form."""

    problem: Problem
    grouping: Grouping
    model: Model
    form: StandardForm
    build_s: float
    events: Events
    """Events at which tensors can be read or recomputed."""
    unit: float
    """Amount of the minimized quantity in one unit of the objective."""
    layout: Layout
    """Positions of the model's columns in the form."""
    kept: Family
    """Columns in the form of ``kept[i, a]`` that are not fixed, as for all following families."""
    recomputed: Family
    """Column of ``recomputed[group, k]``."""
    paged_in: Family
    """Column of ``paged_in[group, i]``."""
    paged_out: Family
    """Column of ``paged_out[i]``."""
    resident: Family
    """Column of ``resident[w]``."""
    storage_home: Family
    """Column of ``storage_home[w]``."""
    extra_recomputed: Family
    """Column of ``extra_recomputed[k]``."""
    extra_paged_in: Family
    """Column of ``extra_paged_in[i]``."""
    separators: dict[str, Separator] = field(init=False, default_factory=dict)
    """Separators of the cuts, by family."""
    cuts: list[Cut] = field(init=False, default_factory=list)
    """Valid rows found so far, in columns of `form`."""

    @classmethod
    def build(
        cls,
        problem: Problem,
        grouping: Grouping,
        recomputable: Sequence[bool],
    ) -> Relaxation:
        """Build and compile the relaxation that enforces the rows of `grouping`."""
        begun = time.monotonic()
        model = build_relaxation(problem, grouping, recomputable)
        form = to_standard_form(model)
        layout = require_layout(form)
        return cls(
            problem=problem,
            grouping=grouping,
            model=model,
            form=form,
            events=model.events,
            unit=model.objective_unit,
            layout=layout,
            **{name: layout.form_columns(getattr(model, name)) for name in FAMILIES},
            build_s=time.monotonic() - begun,
        )

    @cached_property
    def needed_page_out(self) -> dict[int, int]:
        """Column of the page-out that page-ins of a tensor need, by tensor.

        Tensors that start on storage have none. For state this is the column of a home on storage.
        """
        starts_on_storage = self.problem.graph.starts_on_storage
        return {
            i: column for i, column in self.paged_out.items() if not starts_on_storage[i]
        } | self.storage_home

    @property
    def peak(self) -> int:
        """Column of the peak; only for problems that minimize RAM."""
        return int(self.layout.positions[self.model.families["peak"][None]])

    def cut_form(self) -> StandardForm:
        """Return the form with all cuts found so far as additional rows."""
        return self.with_cuts(self.cuts)

    def with_cuts(self, cuts: Sequence[Cut]) -> StandardForm:
        """Return the form with the given cuts as additional rows."""
        form = self.form
        if not cuts:
            return form
        counts = [len(cut.values) for cut in cuts]
        cut_rows = csr_array(
            (
                np.array([value for cut in cuts for value in cut.values], dtype=np.float64),
                np.array([column for cut in cuts for column in cut.space], dtype=np.int64),
                np.concatenate(([0], np.cumsum(counts))),
            ),
            shape=(len(cuts), form.n_columns),
        )
        right_sides = [cut.loosened() for cut in cuts]
        names = [f"cut {c}" for c in range(len(cuts))]
        return form.with_rows(cut_rows, right_sides, np.full(len(cuts), np.inf), names)

    def separate(self, x: NDArray[Any], least: float) -> list[Cut]:
        """Return cuts of all families that a point violates by more than `least`."""
        families = (separator.separate(x, least) for separator in self.separators.values())
        return [cut for cuts in families for cut in cuts]

    def drop_slack(self, x: NDArray[Any]) -> None:
        """Remove the cuts that are not tight at a point."""
        self.cuts = [cut for cut in self.cuts if cut.violation(x) >= -TIGHT_SLACK]

    def restate_cuts(self, coarser: Relaxation) -> None:
        """Replace the cuts by those of a coarser relaxation, in the columns of this one."""
        cuts_by_terms: dict[tuple[tuple[float, int], ...], Cut] = {}
        for cut in coarser.cuts:
            check_time_limit()
            if cut.name in self.separators:
                for recomputations in self.separators[cut.name].restate(cut):
                    cuts_by_terms.setdefault(tuple(recomputations.terms), recomputations)
        self.cuts = list(cuts_by_terms.values())

    def decisions(self, x: NDArray[np.float64]) -> GroupDecisions:
        """Return the group decisions of a solution."""
        return GroupDecisions(
            kept=_indices_at_one(self.kept, x) | self.events.free_keeps,
            recomputed=_indices_at_one(self.recomputed, x),
            paged_in=_indices_at_one(self.paged_in, x),
            resident=_indices_at_one(self.resident, x).union(
                set(self.problem.graph.state_tensors) - self.resident.keys()
            ),
        )

    def disaggregate(self, x: NDArray[np.float64]) -> Disaggregation:
        """Convert a solution over groups to a schedule over stages."""
        problem, decisions = self.problem, self.decisions(x)
        graph = problem.working_graph
        return disaggregate(graph, self.grouping, self.events, decisions, stated=problem.graph)

    def rewarded_decisions(
        self, x: NDArray[np.float64], result: Disaggregation
    ) -> list[Restoration]:
        """Return rewarded decisions of a solution that the disaggregated schedule does not contain.

        Recomputations and page-ins have stage -1, because the solution does not decide their stage.
        """
        graph, rewards = self.problem.graph, self.problem.rewards
        restorations: list[Restoration] = []
        for count_columns, groups, placed_decisions, kind in (
            (self.extra_recomputed, self.recomputed, result.recomputed, RECOMPUTE),
            (self.extra_paged_in, self.paged_in, result.paged_in, PAGE_IN),
        ):
            amounts = rewards.compute if kind == RECOMPUTE else rewards.page_in
            unplaced = {item: 0 for item, amount in enumerate(amounts) if amount}
            for item, column in count_columns.items():
                unplaced[item] = round(float(x[column]))
            for (_, item), column in groups.items():
                if item in unplaced:
                    unplaced[item] += round(float(x[column]))
            for _, item in set(placed_decisions):
                if item in unplaced:
                    unplaced[item] -= 1
            for item, times in unplaced.items():
                restorations += [Restoration(-1, item, kind)] * times
        return restorations + [
            Restoration.at_its_node(graph, i, PAGE_OUT)
            for i, column in self.paged_out.items()
            if rewards.page_out[i] and x[column] > 0.5  # noqa: PLR2004
        ]

    def claimed_ram(self, x: NDArray[np.float64]) -> float:
        """Return the RAM that a solution claims to need [B]: the budget, or its minimized peak."""
        usable = self.problem.usable_ram_bytes
        if self.model.peak is None:
            return usable
        peak = float(x[self.peak]) * self.problem.useful_ram_bytes
        return min(max(peak, self.problem.floor.bytes) * (1 + ROUNDING), usable)

    def start(self, schedule: Schedule) -> NDArray[np.float64] | None:
        """Return the point of a schedule; None if the reduced relaxation cannot represent it."""
        events, grouping = self.events, self.grouping
        group_of = grouping.group_of
        node_of = self.problem.graph.node_of
        x = np.full(self.form.n_columns, np.nan)
        for (i, a), column in self.kept.items():
            stages = events.event_groups[i]
            begin = group_of[node_of[i]] if a == 0 else stages[a - 1]
            crossed = range(begin + 1, stages[a] + 1)
            x[column] = all(schedule.is_kept(grouping.first_stage[group], i) for group in crossed)
        recomputations = {(group_of[t], k) for t, k in schedule.R}
        for index, column in self.recomputed.items():
            x[column] = index in recomputations
        page_ins = {(group_of[t], i) for t, i in schedule.M_in}
        for index, column in self.paged_in.items():
            x[column] = index in page_ins
        for count_columns, groups, pairs in (
            (self.extra_recomputed, self.recomputed, ((t, k) for t, k in schedule.R if k < t)),
            (self.extra_paged_in, self.paged_in, schedule.M_in),
        ):
            times = Counter(item for _, item in pairs)
            for (_, item), column in groups.items():
                times[item] -= int(x[column])
            for item, column in count_columns.items():
                x[column] = times[item]
        out = {i for _, i in schedule.M_out}
        for i, column in self.paged_out.items():
            x[column] = i in out
        self._assign_homes(x, frozenset(schedule.resident))
        positions, values = self.layout.positions, self.layout.model_values(x)
        for column, value in memory_values(self.model, schedule, values):
            if positions[column] >= 0:
                x[positions[column]] = value
        is_valid = not np.isnan(x).any() and self.form.max_violation(x) <= MAX_START_VIOLATION
        return x if is_valid else None

    def _assign_homes(self, x: NDArray[np.float64], resident: frozenset[int]) -> None:
        """Set the columns of homes of state at a point."""
        for i, column in self.resident.items():
            x[column] = i in resident
        for i, column in self.storage_home.items():
            x[column] = i not in resident


def _indices_at_one(columns: Family, x: NDArray[np.float64]) -> frozenset[Any]:
    """Return the indices of the columns whose rounded value is 1."""
    return frozenset(index for index, column in columns.items() if x[column] > 0.5)  # noqa: PLR2004
