"""Groups of stages: enforced memory rows of a relaxation, and stages with common decisions."""

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
    """The enforced memory rows, and the resulting groups of stages.

    A group ends after every enforced stage row, and a stage with an enforced step row is a group by
    itself. A relaxation that enforces only these rows loses no strength by deciding once per group.
    """

    n_stages: int
    """Number of stages."""
    stage_rows: frozenset[int] = frozenset()
    """Stages `q` whose row ``(q, q)`` is enforced."""
    step_rows: frozenset[tuple[int, int]] = frozenset()
    """Steps ``(t, k)``, ``k < t``, whose rows are enforced."""
    own_rows: frozenset[int] = frozenset()
    """Positions of the enforced per-stage user constraints."""
    own_cuts: frozenset[int] = frozenset()
    """Stages after which groups end because of the constraints in `own_rows`."""
    every_row: bool = False
    """Whether the rows of all possible steps are enforced."""

    @classmethod
    def one_group_per_stage(cls, n_stages: int, own_rows: int = 0) -> Grouping:
        """Return the grouping of ``compact``: one group per stage, with all rows enforced."""
        cuts, rows = frozenset(range(n_stages)), frozenset(range(own_rows))
        return cls(n_stages, own_rows=rows, own_cuts=cuts, every_row=True)

    @cached_property
    def step_stages(self) -> frozenset[int]:
        """Stages that have an enforced step row."""
        return frozenset(t for t, _ in self.step_rows)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Group of each stage."""
        cuts = self.stage_rows | self.step_stages | {t - 1 for t in self.step_stages}
        cuts |= self.own_cuts
        return tuple(accumulate((t in cuts for t in range(self.n_stages - 1)), initial=0))

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return len(self.last_stage)

    @cached_property
    def last_stage(self) -> tuple[int, ...]:
        """Last stage of each group."""
        return tuple({group: t for t, group in enumerate(self.group_of)}.values())

    @cached_property
    def first_stage(self) -> tuple[int, ...]:
        """First stage of each group."""
        return (0, *(t + 1 for t in self.last_stage[:-1]))

    @cached_property
    def steps(self) -> Mapping[int, Collection[int]]:
        """Steps with enforced rows, by stage."""
        if self.every_row:
            return {t: range(t + 1) for t in range(self.n_stages)}
        rows: dict[int, set[int]] = {q: {q} for q in self.stage_rows}
        for t, k in self.step_rows:
            rows.setdefault(t, set()).add(k)
        return {t: frozenset(steps) for t, steps in rows.items()}

    def is_free(self, graph: Graph, i: int, begin: int, end: int) -> bool:
        """Return whether no enforced row counts tensor `i` across the ends of groups begin..end-1.

        A group ends at a stage with an enforced row, or next to a stage with an enforced step row.
        The row of a stage that makes or reads `i` counts `i` in any case, unless an output may
        overwrite `i`. A step row next to an end may count `i`. A tensor of 0 bytes is always free
        to keep.
        """
        if graph.tensor_bytes[i] == 0:
            return True
        users = graph.users_of[i]
        n_free_ends = 0
        for q in (graph.node_of[i], *users[bisect_left(users, self.first_stage[begin]) :]):
            group = self.group_of[q]
            n_free_ends += (
                begin <= group < end
                and q == self.last_stage[group]
                and q not in self.step_stages
                and q + 1 not in self.step_stages
                and i not in graph.shared_bytes_of[q]
            )
        return n_free_ends == end - begin

    def add(
        self,
        stage_rows: Sequence[int] = (),
        step_rows: Sequence[tuple[int, int]] = (),
        own: Mapping[int, frozenset[int]] | None = None,
    ) -> Grouping:
        """Return a grouping that enforces further rows.

        `own` maps the position of each further per-stage user constraint to its `change_stages`.
        """
        own = own or {}
        return Grouping(
            self.n_stages,
            self.stage_rows | frozenset(stage_rows),
            self.step_rows | frozenset(step_rows),
            self.own_rows | own.keys(),
            self.own_cuts.union(*own.values()),
        )


def change_stages(row: LinearRow) -> frozenset[int]:
    """Return the stages after which the coefficients of a row over stages change.

    Between two of them, the row has equal coefficients in all stages.
    """
    stages: dict[int, dict[tuple[str, int], float]] = {}
    for value, (family, (t, item)) in row.terms:
        stages.setdefault(t, {})[family, item] = value
    last_stages: set[int] = set()
    group_values: dict[tuple[str, int], float] = {}
    for t in sorted(stages):
        if any(group_values.get(decision, value) != value for decision, value in stages[t].items()):
            last_stages.add(t - 1)
            group_values = {}
        group_values |= stages[t]
    return frozenset(last_stages)
