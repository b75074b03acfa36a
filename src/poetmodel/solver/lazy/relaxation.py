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
from poetmodel.heuristics.restorations import (
    PAGE_IN,
    PAGE_OUT,
    RECOMPUTE,
    STORAGE_HOME,
    Restoration,
)
from poetmodel.model.aggregated import build_relaxation
from poetmodel.model.memory import memory_values
from poetmodel.solver.lazy.disaggregation import ROUNDING, disaggregate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.backends.standard_form import Layout, StandardForm
    from poetmodel.model.arrays import Family, Model
    from poetmodel.model.events import Events
    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.lazy.cuts import Cut, Separator

MAX_START_VIOLATION: Final = 1e-6
"""Maximum violation of a scaled row by a point from which a solver may start."""
MAX_TIGHT_SLACK: Final = 1e-6
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
    """A relaxation over groups of stages, in standard form."""

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
    """Column in the form of ``kept[i, a]``. Families have no entries for columns that the form
    lacks: fixed columns, and columns without costs and coefficients."""
    recomputed: Family
    """Column of ``recomputed[group, k]``."""
    paged_in: Family
    """Column of ``paged_in[group, i]``."""
    paged_out: Family
    """Column of ``paged_out[i]``."""
    resident: Family
    """Column of ``resident[w]`` for state tensor `w`."""
    storage_home: Family
    """Column of ``storage_home[w]`` for state tensor `w`."""
    extra_recomputed: Family
    """Column of ``extra_recomputed[k]``."""
    extra_paged_in: Family
    """Column of ``extra_paged_in[i]``."""
    separators: dict[str, Separator] = field(init=False, default_factory=dict)
    """Separators of cuts, by the name of the family."""
    cuts: list[Cut] = field(init=False, default_factory=list)
    """Current cuts, over the columns of `form`."""

    @classmethod
    def build(
        cls,
        problem: Problem,
        grouping: Grouping,
        is_recomputable: Sequence[bool],
        *,
        drops_dominated_keeps: bool = True,
    ) -> Relaxation:
        """Build and compile the relaxation that enforces the rows of `grouping`, without cuts."""
        started_s = time.monotonic()
        model = build_relaxation(
            problem, grouping, is_recomputable, drops_dominated_keeps=drops_dominated_keeps
        )
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
            build_s=time.monotonic() - started_s,
        )

    @cached_property
    def page_out_column_of(self) -> dict[int, int]:
        """Column of the page-out that page-ins of a tensor need, by tensor."""
        starts_on_storage = self.problem.graph.starts_on_storage
        return {
            i: column for i, column in self.paged_out.items() if not starts_on_storage[i]
        } | self.storage_home

    @property
    def peak_column(self) -> int:
        """Column of the peak; only for problems that minimize RAM."""
        return int(self.layout.positions[self.model.families["peak"][None]])

    def form_with_all_cuts(self) -> StandardForm:
        """Return the form with all cuts in `cuts` of this relaxation as additional rows."""
        return self.form_with_cuts(self.cuts)

    def form_with_cuts(self, cuts: Sequence[Cut]) -> StandardForm:
        """Return the form with `cuts` as additional rows, with limits of `Cut.loosened_lower`."""
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
        right_sides = [cut.loosened_lower() for cut in cuts]
        names = [f"cut {i}" for i in range(len(cuts))]
        return form.with_rows(cut_rows, right_sides, np.full(len(cuts), np.inf), names)

    def separate(self, x: NDArray[Any], min_violation: float) -> list[Cut]:
        """Return cuts that `x` violates by more than `min_violation`; does not add them."""
        cut_lists = (separator.separate(x, min_violation) for separator in self.separators.values())
        return [cut for cuts in cut_lists for cut in cuts]

    def drop_slack_cuts(self, x: NDArray[Any]) -> None:
        """Remove the cuts with a slack above `MAX_TIGHT_SLACK` at `x`; makes a new list."""
        self.cuts = [cut for cut in self.cuts if cut.violation(x) >= -MAX_TIGHT_SLACK]

    def restate_cuts(self, coarser_relaxation: Relaxation) -> None:
        """Replace the cuts by those of `coarser_relaxation`, in the columns of this relaxation."""
        cuts_by_terms: dict[tuple[tuple[float, int], ...], Cut] = {}
        for cut in coarser_relaxation.cuts:
            check_time_limit()
            if cut.name in self.separators:
                for restated_cut in self.separators[cut.name].restate(cut):
                    cuts_by_terms.setdefault(tuple(restated_cut.terms), restated_cut)
        self.cuts = list(cuts_by_terms.values())

    def to_restorations(self, x: NDArray[np.float64]) -> list[Restoration]:
        """Return the decisions of a solution `x` in stages: see `disaggregate`."""
        graph = self.problem.graph
        on_storage = [i for i, column in self.resident.items() if not x[column] > 0.5]  # noqa: PLR2004
        resident = set(graph.state_tensors).difference(on_storage)
        restorations = disaggregate(
            self.problem.working_graph,
            self.grouping,
            kept=self._kept_groups(x, resident),
            recomputed=_indices_at_one(self.recomputed, x),
            paged_in=(
                (group, i) for group, i in _indices_at_one(self.paged_in, x) if i not in resident
            ),
            last_stages=graph.last_stages,
        )
        return restorations + [
            Restoration.at_its_node(graph, i, STORAGE_HOME) for i in sorted(on_storage)
        ]

    def _kept_groups(self, x: NDArray[Any], resident: set[int]) -> Iterator[tuple[int, int]]:
        """Yield (group, tensor) of tensors kept into a group or free to keep, not of `resident`."""
        group_of, node_of = self.grouping.group_of, self.problem.graph.node_of
        for i, a in _indices_at_one(self.kept, x) | self.events.free_keeps:
            if i not in resident:
                groups = self.events.event_groups[i]
                first_group = group_of[node_of[i]] if a == 0 else groups[a - 1]
                yield from ((group, i) for group in range(first_group + 1, groups[a] + 1))

    def rewarded_decisions(
        self, x: NDArray[np.float64], restorations: Sequence[Restoration]
    ) -> list[Restoration]:
        """Return the rewarded decisions of a solution `x` that its `restorations` lack.

        Recomputations and page-ins have stage -1: the solution does not decide their stage.
        """
        graph, rewards = self.problem.graph, self.problem.rewards
        missing: list[Restoration] = []
        for count_columns, group_columns, kind in (
            (self.extra_recomputed, self.recomputed, RECOMPUTE),
            (self.extra_paged_in, self.paged_in, PAGE_IN),
        ):
            rewards_of_kind = rewards.compute if kind == RECOMPUTE else rewards.page_in
            n_missing = {item: 0 for item, reward in enumerate(rewards_of_kind) if reward}
            for item, column in count_columns.items():
                n_missing[item] = round(float(x[column]))
            for (_, item), column in group_columns.items():
                if item in n_missing:
                    n_missing[item] += round(float(x[column]))
            for restoration in restorations:
                if restoration.kind == kind and restoration.item in n_missing:
                    n_missing[restoration.item] -= 1
            for item, count in n_missing.items():
                missing += [Restoration(-1, item, kind)] * count
        return missing + [
            Restoration.at_its_node(graph, i, PAGE_OUT)
            for i, column in self.paged_out.items()
            if rewards.page_out[i] and x[column] > 0.5  # noqa: PLR2004
        ]

    def claimed_ram_bytes(self, x: NDArray[np.float64]) -> float:
        """Return a solution's RAM limit [B]: its peak if RAM is minimized, else the usable RAM."""
        usable_bytes = self.problem.usable_ram_bytes
        if self.model.peak is None:
            return usable_bytes
        peak_bytes = float(x[self.peak_column]) * self.problem.useful_ram_bytes
        return min(max(peak_bytes, self.problem.floor.bytes) * (1 + ROUNDING), usable_bytes)

    def schedule_point(self, schedule: Schedule) -> NDArray[np.float64] | None:
        """Return a schedule's point; None if `form` has none. Cuts are not checked."""
        events, grouping = self.events, self.grouping
        group_of = grouping.group_of
        node_of = self.problem.graph.node_of
        x = np.full(self.form.n_columns, np.nan)
        for (i, a), column in self.kept.items():
            event_groups = events.event_groups[i]
            first_group = group_of[node_of[i]] if a == 0 else event_groups[a - 1]
            kept_groups = range(first_group + 1, event_groups[a] + 1)
            x[column] = all(
                schedule.is_kept(grouping.first_stage[group], i) for group in kept_groups
            )
        recomputations = {(group_of[t], k) for t, k in schedule.R}
        for index, column in self.recomputed.items():
            x[column] = index in recomputations
        page_ins = {(group_of[t], i) for t, i in schedule.M_in}
        for index, column in self.paged_in.items():
            x[column] = index in page_ins
        for count_columns, group_columns, pairs in (
            (self.extra_recomputed, self.recomputed, ((t, k) for t, k in schedule.R if k < t)),
            (self.extra_paged_in, self.paged_in, schedule.M_in),
        ):
            counts = Counter(item for _, item in pairs)
            for (_, item), column in group_columns.items():
                counts[item] -= int(x[column])
            for item, column in count_columns.items():
                x[column] = counts[item]
        page_outs = {i for _, i in schedule.M_out}
        for i, column in self.paged_out.items():
            x[column] = i in page_outs
        self._assign_homes(x, frozenset(schedule.resident))
        positions, values = self.layout.positions, self.layout.model_values(x)
        for column, value in memory_values(self.model, schedule, values):
            if positions[column] >= 0:
                x[positions[column]] = value
        is_valid = not np.isnan(x).any() and self.form.max_violation(x) <= MAX_START_VIOLATION
        return x if is_valid else None

    def _assign_homes(self, x: NDArray[np.float64], resident: frozenset[int]) -> None:
        """Set the columns for homes of state in the point `x`; `resident` is the state in RAM."""
        for i, column in self.resident.items():
            x[column] = i in resident
        for i, column in self.storage_home.items():
            x[column] = i not in resident


def _indices_at_one(columns: Family, x: NDArray[np.float64]) -> frozenset[Any]:
    """Return the indices of the columns whose rounded value is 1."""
    return frozenset(index for index, column in columns.items() if x[column] > 0.5)  # noqa: PLR2004
