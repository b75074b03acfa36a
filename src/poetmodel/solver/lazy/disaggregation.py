"""Disaggregation: assign the decisions of groups to stages, and find the rows that this violates.

A recomputation or page-in happens at the earliest need in its group: the first stage that reads the
tensor, or the stage of the first recomputation that reads it. If the tensor is only kept for the
next group, that is the last stage of the group. A node that reads state is recomputed no later than
the replacement of that state. Decisions without a need are dropped, as are page-ins of tensors that
are kept into the group, and recomputations whose needed outputs are all paged in or kept into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.clock import check_time_limit
from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, Restoration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.graph import Graph
    from poetmodel.heuristics.partial_schedule import PartialSchedule
    from poetmodel.model.grouping import Grouping

ROUNDING: Final = 1e-7
"""Maximum excess over a limit, relative to the limit, that counts as a solver's rounding error."""


def disaggregate(
    graph: Graph,
    grouping: Grouping,
    *,
    kept: Iterable[tuple[int, int]] = (),
    recomputed: Iterable[tuple[int, int]] = (),
    paged_in: Iterable[tuple[int, int]] = (),
    last_stages: Sequence[int] | None = None,
) -> list[Restoration]:
    """Return the recomputations, then the page-ins of groups, by stage and item.

    Decisions are (group, item) pairs; a kept tensor is in RAM when the group begins. `graph` is the
    working graph; `last_stages` is `Graph.last_stages` of the graph with its state, by default of
    `graph`. A restoration that its group does not read and the next one does not keep is dropped.
    """
    placement = _Disaggregator(graph, grouping, last_stages or graph.last_stages)
    for decisions, items_of_groups in (
        (kept, placement.kept_tensors),
        (recomputed, placement.recomputed_nodes),
        (paged_in, placement.paged_tensors),
    ):
        for group, item in decisions:
            items_of_groups[group].add(item)
    for group in range(grouping.n_groups):
        check_time_limit()
        placement.add_group(group)
    return [
        Restoration(stage, item, kind)
        for kind, pairs in ((RECOMPUTE, placement.recomputations), (PAGE_IN, placement.page_ins))
        for stage, item in sorted(pairs)
    ]


class _Disaggregator:
    """Assigns the decisions of one solution to stages, group by group.

    `last_stages` has the last stage in which each node may be computed.
    """

    def __init__(self, graph: Graph, grouping: Grouping, last_stages: Sequence[int]) -> None:
        self.graph, self.grouping, self.last_stages = graph, grouping, last_stages
        n_groups = grouping.n_groups
        self.recomputed_nodes: list[set[int]] = [set() for _ in range(n_groups)]
        self.paged_tensors: list[set[int]] = [set() for _ in range(n_groups)]
        self.kept_tensors: list[set[int]] = [set() for _ in range(n_groups + 1)]
        """For each group, the tensors in RAM when it begins."""
        self.recomputations: list[tuple[int, int]] = []
        """(stage, node) pairs."""
        self.page_ins: list[tuple[int, int]] = []
        """(stage, tensor) pairs."""

    def add_group(self, group: int) -> None:
        """Assign stages to the recomputations, then page-ins, of a group; drop unread ones."""
        graph, grouping = self.graph, self.grouping
        readers: dict[int, list[int]] = {}
        """For each tensor, the stages of the group that read it, also for a recomputation."""
        for t in range(grouping.first_stage[group], grouping.last_stage[group] + 1):
            for i in graph.inputs_of[t]:
                readers.setdefault(i, []).append(t)
        self._assign_recomputations(group, readers)
        for i in self.paged_tensors[group] - self.kept_tensors[group]:
            stage = self._first_need(group, i, readers)
            if stage is not None:
                self.page_ins.append((stage, i))

    def _assign_recomputations(self, group: int, readers: dict[int, list[int]]) -> None:
        """Assign stages to the recomputations of a group, the last node first; add to `readers`."""
        for k in sorted(self.recomputed_nodes[group], reverse=True):
            needs = [
                self._first_need(group, i, readers)
                for i in self.graph.outputs_of[k]
                if i not in self.paged_tensors[group] and i not in self.kept_tensors[group]
            ]
            stages = [stage for stage in needs if stage is not None]
            if not stages:
                continue
            stage = min(*stages, self.last_stages[k])
            self.recomputations.append((stage, k))
            for i in self.graph.inputs_of[k]:
                readers.setdefault(i, []).append(stage)

    def _first_need(self, group: int, i: int, readers: dict[int, list[int]]) -> int | None:
        if readers.get(i):
            return min(readers[i])
        return self.grouping.last_stage[group] if i in self.kept_tensors[group + 1] else None


def violated_stages(loads: Sequence[float], limit_bytes: float) -> list[int]:
    """Return the worst stage of each sequence with `loads` [B] above the limit, fullest first."""
    worst_stages: list[int] = []
    was_violated = False
    for t, load in enumerate(loads):
        is_violated = load > limit_bytes
        if is_violated and not was_violated:
            worst_stages.append(t)
        elif is_violated and load > loads[worst_stages[-1]]:
            worst_stages[-1] = t
        was_violated = is_violated
    return sorted(worst_stages, key=lambda t: -loads[t])


def violated_steps(partial: PartialSchedule, limit_bytes: float) -> list[tuple[int, int]]:
    """Return the highest step ``(t, k)`` of each stage above the limit before its last step."""
    violated = np.flatnonzero(partial.peaks() > limit_bytes).tolist()
    return [(t, partial.highest_step(t)) for t in violated]
