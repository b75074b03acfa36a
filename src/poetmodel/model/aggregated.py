"""The relaxations that ``lazy`` solves: ``compact`` over groups of stages, few memory rows.

Between two memory rows that are enforced nothing tells stages apart: they share their columns.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING

from poetmodel.model.arrays import Model
from poetmodel.model.compact import (
    FROM_STORAGE,
    INPUTS,
    KEEPING,
    ONCE,
    STAGE_LIMITS,
    STORAGE,
    VARIABLES,
)
from poetmodel.model.events import find_events, without_dominated_keeps
from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.memory import MEMORY
from poetmodel.model.objective import LIMITS_AND_OBJECTIVE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.problem import LinearRow, Problem


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
    own_rows: frozenset[int] = frozenset()
    """Rows of the problem over stages that are enforced, by position."""
    own_cuts: frozenset[int] = frozenset()
    """Stages after which groups end for their sake."""
    every_row: bool = False
    """Whether the rows of all steps that may execute are enforced."""

    @classmethod
    def of_stages(cls, n_stages: int, own_rows: int = 0) -> Grouping:
        """Return the grouping of ``compact``: each stage is a group, and every row is enforced."""
        cuts, own = frozenset(range(n_stages)), frozenset(range(own_rows))
        return cls(n_stages, own_rows=own, own_cuts=cuts, every_row=True)

    @cached_property
    def step_stages(self) -> frozenset[int]:
        """Stages that have an enforced step row."""
        return frozenset(t for t, _ in self.step_rows)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """For each stage its group."""
        cuts = self.stage_rows | self.step_stages | {t - 1 for t in self.step_stages}
        cuts |= self.own_cuts
        return tuple(accumulate((t in cuts for t in range(self.n_stages - 1)), initial=0))

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return len(self.last_stage)

    @cached_property
    def last_stage(self) -> tuple[int, ...]:
        """For each group its last stage."""
        return tuple({group: t for t, group in enumerate(self.group_of)}.values())

    @cached_property
    def first_stage(self) -> tuple[int, ...]:
        """For each group its first stage."""
        return (0, *(t + 1 for t in self.last_stage[:-1]))

    @cached_property
    def steps(self) -> Mapping[int, Collection[int]]:
        """For each stage with enforced rows the steps of them."""
        if self.every_row:
            return {t: range(t + 1) for t in range(self.n_stages)}
        rows: dict[int, set[int]] = {q: {q} for q in self.stage_rows}
        for t, k in self.step_rows:
            rows.setdefault(t, set()).add(k)
        return {t: frozenset(steps) for t, steps in rows.items()}

    def is_free(self, graph: Graph, i: int, begin: int, end: int) -> bool:
        """Return whether no enforced row counts tensor `i` over the ends of groups begin..end-1.

        Each end is one of a stage with a row, or lies beside a step row's stage. The row of a stage
        that makes or reads `i` counts it in any case, unless an output may be written over it; what
        lies beside a step row may count. A tensor without bytes is never let go.
        """
        if graph.tensor_bytes[i] == 0:
            return True
        users = graph.users_of[i]
        own = 0
        for q in (graph.node_of[i], *users[bisect_left(users, self.first_stage[begin]) :]):
            group = self.group_of[q]
            own += (
                begin <= group < end
                and q == self.last_stage[group]
                and q not in self.step_stages
                and q + 1 not in self.step_stages
                and i not in graph.shared_bytes_of[q]
            )
        return own == end - begin

    def add(
        self,
        stage_rows: Sequence[int] = (),
        step_rows: Sequence[tuple[int, int]] = (),
        own: Mapping[int, frozenset[int]] | None = None,
    ) -> Grouping:
        """Return a grouping that enforces these rows too, own ones with their cuts."""
        own = own or {}
        return Grouping(
            self.n_stages,
            self.stage_rows | frozenset(stage_rows),
            self.step_rows | frozenset(step_rows),
            self.own_rows | own.keys(),
            self.own_cuts.union(*own.values()),
        )


def stages_of_change(row: LinearRow) -> frozenset[int]:
    """Return the stages after which values of a row over stages change.

    Between two of them it does not tell stages apart.
    """
    stages: dict[int, dict[tuple[str, int], float]] = {}
    for value, (family, (t, item)) in row.terms:
        stages.setdefault(t, {})[family, item] = value
    changes: set[int] = set()
    group: dict[tuple[str, int], float] = {}
    for t in sorted(stages):
        if any(group.get(counted, value) != value for counted, value in stages[t].items()):
            changes.add(t - 1)
            group = {}
        group |= stages[t]
    return frozenset(changes)


def _beside(m: Model) -> None:
    """Count what a limit or the objective wants for its own sake, and no group tells apart.

    A group decides once whether it recomputes a node; in its stages that may happen as often as
    there are. So of a node, or tensor, that may be wanted a whole number counts the others::

        recomputed_beside[k] <= stages after k - groups that decide on k
        paged_in_beside[i]   <= stages after node(i) - groups that decide on i

    Limits and the objective count them, no memory row does. In groups of one stage there are none.
    Nothing is paged in that is not paged out::

        paged_in_beside[i] <= most * paged_out[i]    i is not on storage from the start
    """
    problem, events = m.problem, m.events
    wanted, node_of = problem.wanted, problem.graph.node_of
    again = {
        k: problem.graph.last_stages[k] - k - len(events.recompute[k])
        for k, wants in enumerate(wanted.compute)
        if wants and m.recomputable[k]
    }
    pages = {
        i: problem.graph.last_page_in(i) - node_of[i] - len(events.page_in[i])
        for i, wants in enumerate(wanted.page_in)
        if wants and problem.can_page
    }
    for name, most in (("recomputed_beside", again), ("paged_in_beside", pages)):
        offered = {item: times for item, times in most.items() if times}
        m.add_variables(name, offered, upper=[float(times) for times in offered.values()])
    m.decisions = replace(
        m.decisions,
        recomputations=[*m.decisions.recomputations, *m.recomputed_beside.items()],
        page_ins=[*m.decisions.page_ins, *m.paged_in_beside.items()],
    )
    m.begin_rows("beside_from_storage")
    for i, column in m.paged_in_beside.items():
        if i not in problem.graph.on_aux:
            home = m.storage_home[i] if i in m.storage_home else m.paged_out[i]
            m.add_row(i, (column, home), (1.0, -pages[i]), upper=0.0)


def _fixed_keeps(m: Model) -> None:
    """Keep what is surely in RAM and counted by no enforced row, and not what is never better kept.

    ::

        kept[i,a] = 1    for the free keeps
        kept[i,a] = 0    for the dominated keeps
    """
    for value, segments in ((1.0, m.events.kept), (0.0, m.events.dominated)):
        for i, a in segments:
            m.fixed[m.kept[i, a]] = value


LAZY = Formulation(
    "lazy",
    (
        VARIABLES,
        Component(
            "beside",
            _beside,
            "poetmodel: own constraints count every recomputation and page-in",
            AFTER_VARIABLES,
        ),
        Component(
            "fixed_keeps",
            _fixed_keeps,
            "poetmodel: free and dominated keeps",
            AFTER_VARIABLES,
        ),
        ONCE,
        KEEPING,
        FROM_STORAGE,
        INPUTS,
        MEMORY,
        STORAGE,
        STAGE_LIMITS,
        *LIMITS_AND_OBJECTIVE,
    ),
)


def build_relaxation(problem: Problem, grouping: Grouping, recomputable: Sequence[bool]) -> Model:
    """Return the relaxation of a problem that enforces the rows of a grouping.

    Its optimum is a lower bound for the problem, and that of the problem where its solution, placed
    on stages, keeps every row. `recomputable` is from `poetmodel.model.events.recomputable_nodes`.
    """
    m = Model(problem, LAZY, exact=True)
    m.grouping = grouping
    m.recomputable = tuple(recomputable)
    events = find_events(
        problem,
        grouping.group_of,
        recomputable=recomputable,
        counted=[problem.stage_limits[number] for number in grouping.own_rows],
        is_free=partial(grouping.is_free, problem.working_graph),
    )
    if not grouping.own_rows:
        single = {grouping.group_of[t] for t in grouping.step_stages}
        events = without_dominated_keeps(problem, events, moves=lambda group: group not in single)
    m.events = events
    LAZY.populate(m)
    return m
