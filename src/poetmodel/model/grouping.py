"""Groups of stages: which memory rows a relaxation enforces, and which stages decide together."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.problem import LinearRow


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
