"""Stages merged into groups: between two rows that are enforced nothing tells stages apart."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from poetmodel.model.events import Events
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.problem import Problem


@dataclass(frozen=True)
class Grouping:
    """Which memory rows are enforced, and the groups of stages that they leave.

    A group ends after every enforced stage row, and a stage with an enforced step row is a group of
    its own. The relaxation that enforces just these rows loses nothing by deciding once per group.
    """

    n_stages: int
    """Number of stages."""
    stage_rows: frozenset[int] = frozenset()
    """Stages `q` whose row ``(q, q)`` is enforced."""
    step_rows: frozenset[tuple[int, int]] = frozenset()
    """Steps ``(t, k)``, ``k < t``, whose rows are enforced."""

    @cached_property
    def step_stages(self) -> frozenset[int]:
        """Stages that have an enforced step row."""
        return frozenset(t for t, _ in self.step_rows)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """For each stage its group."""
        cuts = set(self.stage_rows)
        for t in self.step_stages:
            cuts.update((t - 1, t))
        groups = []
        group = 0
        for t in range(self.n_stages):
            groups.append(group)
            group += t in cuts
        return tuple(groups)

    @cached_property
    def last_stage(self) -> tuple[int, ...]:
        """For each group its last stage."""
        last: list[int] = []
        for t, group in enumerate(self.group_of):
            if group == len(last):
                last.append(t)
            last[group] = t
        return tuple(last)

    @cached_property
    def first_stage(self) -> tuple[int, ...]:
        """For each group its first stage."""
        return (0, *(t + 1 for t in self.last_stage[:-1]))

    @cached_property
    def steps(self) -> dict[int, frozenset[int]]:
        """For each stage with enforced rows the steps of them."""
        wanted: dict[int, set[int]] = {q: {q} for q in self.stage_rows}
        for t, k in self.step_rows:
            wanted.setdefault(t, set()).add(k)
        return {t: frozenset(steps) for t, steps in wanted.items()}

    def add(
        self, stage_rows: Sequence[int] = (), step_rows: Sequence[tuple[int, int]] = ()
    ) -> Grouping:
        """Return a grouping that enforces these rows too."""
        return Grouping(
            self.n_stages,
            self.stage_rows | frozenset(stage_rows),
            self.step_rows | frozenset(step_rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupEvents:
    """Where decisions of a grouped relaxation lie, after what is sure has been taken out."""

    events: Events
    """The groups of each decision."""
    kept: frozenset[tuple[int, int]]
    """Segments ``(i, a)`` in which tensor `i` stays in RAM at no cost: surely there before, and
    counted by no enforced row."""
    sure: tuple[frozenset[int], ...]
    """For each tensor the groups that it surely enters in RAM."""


def find_group_events(
    problem: Problem, grouping: Grouping, recomputable: Sequence[bool]
) -> GroupEvents:
    """Return the groups at which decisions of the grouped relaxation matter.

    Notes
    -----
    As `find_events` with ``stages="all"``, from the last node to the first, with a reduction that
    is exact for the enforced rows. *Free keep*: a tensor that is surely in RAM in an event's group
    and whose keep up to the next event is counted by no enforced row is kept; then it need not be
    paged in there, and its node not be recomputed if that holds for all its outputs. Every
    recomputation that goes away takes its inputs' uses with it.
    """
    graph = problem.graph
    sweep = _Sweep(problem, grouping, recomputable)
    for k in range(len(graph.nodes) - 1, -1, -1):
        check_time_limit()
        sweep.visit(k)
    events = Events(
        group_of=grouping.group_of,
        uses=tuple(sweep.uses),
        events=tuple(sweep.events),
        recompute=tuple(sweep.recompute),
        page_in=tuple(sweep.page_in),
    )
    return GroupEvents(
        events=events, kept=frozenset(sweep.kept), sure=tuple(map(frozenset, sweep.sure))
    )


class _Sweep:
    def __init__(self, problem: Problem, grouping: Grouping, recomputable: Sequence[bool]) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.grouping = grouping
        self.recomputable = recomputable
        n_tensors = len(self.graph.tensors)
        self.uses: list[tuple[int, ...]] = [()] * n_tensors
        self.events: list[tuple[int, ...]] = [()] * n_tensors
        self.page_in: list[tuple[int, ...]] = [()] * n_tensors
        self.sure: list[set[int]] = [set() for _ in range(n_tensors)]
        self.recompute: list[tuple[int, ...]] = [()] * len(self.graph.nodes)
        self.kept: set[tuple[int, int]] = set()

    def visit(self, k: int) -> None:
        graph, group_of = self.graph, self.grouping.group_of
        first = group_of[k]
        outputs = [i for i in graph.outputs_of[k] if graph.users_of[i]]
        wanted: set[int] = set()
        for i in outputs:
            readers = graph.users_of[i]
            found = {group_of[j] for j in readers}.union(*(self.recompute[j] for j in readers))
            self.uses[i] = tuple(sorted(e for e in found if e > first))
            wanted.update(self.uses[i])
        if not wanted:
            return
        if self.recomputable[k]:
            groups = set(range(first + 1, max(wanted) + 1))
            useless = set(groups)
            for i in outputs:
                if self.uses[i]:
                    sure = self._surely_entered(i, self._events(i, groups))
                    useless -= {e for e in groups if e <= self.uses[i][-1] and e not in sure}
            self.recompute[k] = tuple(sorted(groups - useless))
        for i in outputs:
            self.events[i] = self._events(i, set(self.recompute[k]))
            self.sure[i] = self._surely_entered(i, self.events[i])
            if self.problem.can_page:
                self.page_in[i] = tuple(e for e in self.uses[i] if e not in self.sure[i])
            self.kept.update((i, a) for a, e in enumerate(self.events[i]) if e in self.sure[i])

    def _events(self, i: int, recompute: set[int]) -> tuple[int, ...]:
        last = self.uses[i][-1] if self.uses[i] else -1
        return tuple(sorted({*self.uses[i], *(e for e in recompute if e <= last)}))

    def _surely_entered(self, i: int, events: tuple[int, ...]) -> set[int]:
        """Return the events that tensor `i` may enter in RAM at no cost, in any solution.

        A free stretch begins in a group whose last stage makes or reads `i`, which is there then. A
        tensor without bytes is never let go.
        """
        first = self.grouping.group_of[self.graph.node_of[i]]
        stretches = pairwise((first, *events))
        return {end for begin, end in stretches if self._is_free(i, begin, end)}

    def _is_free(self, i: int, begin: int, end: int) -> bool:
        """Return whether no enforced row counts tensor `i` over the ends of groups begin..end-1.

        Each end is one of a stage with a row, or lies beside a step row's stage. The row of a stage
        that makes or reads `i` counts it in any case; what lies beside a step row may count.
        """
        graph, grouping = self.graph, self.grouping
        if graph.tensor_bytes[i] == 0:
            return True
        users = graph.users_of[i]
        own = 0
        for q in (graph.node_of[i], *users[bisect_left(users, grouping.first_stage[begin]) :]):
            group = grouping.group_of[q]
            own += (
                begin <= group < end
                and q == grouping.last_stage[group]
                and q not in grouping.step_stages
                and q + 1 not in grouping.step_stages
            )
        return own == end - begin
