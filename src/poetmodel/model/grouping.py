"""Enforced rows of a relaxation, and the groups of stages with common decisions."""

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
    """The enforced memory rows and per-stage user constraints, and the resulting groups of stages.

    A group ends after every enforced stage row and after `user_row_ends`; a stage with an enforced
    step row is a group. With only these rows, one decision per group has the same bound as one per
    stage.
    """

    n_stages: int
    """Number of stages."""
    stage_rows: frozenset[int] = frozenset()
    """Stages `q` whose row ``(q, q)`` is enforced."""
    step_rows: frozenset[tuple[int, int]] = frozenset()
    """Steps ``(t, k)``, ``k < t``, whose rows are enforced."""
    user_rows: frozenset[int] = frozenset()
    """Positions of the enforced per-stage user constraints in `Problem.stage_limits`."""
    user_row_ends: frozenset[int] = frozenset()
    """Stages after which groups end because coefficients of `user_rows` change; all stages in
    `one_group_per_stage`."""
    enforces_all_steps: bool = False
    """Whether the rows of all possible steps are enforced."""

    @classmethod
    def one_group_per_stage(cls, n_stages: int, n_user_rows: int) -> Grouping:
        """Return the grouping of ``compact``: one group per stage, with all rows enforced."""
        stages, user_rows = frozenset(range(n_stages)), frozenset(range(n_user_rows))
        return cls(n_stages, user_rows=user_rows, user_row_ends=stages, enforces_all_steps=True)

    @cached_property
    def step_stages(self) -> frozenset[int]:
        """Stages that have an enforced step row."""
        return frozenset(t for t, _ in self.step_rows)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Group of each stage; groups are numbered from 0, in order."""
        end_stages = self.stage_rows | self.step_stages | {t - 1 for t in self.step_stages}
        end_stages |= self.user_row_ends
        return tuple(accumulate((t in end_stages for t in range(self.n_stages - 1)), initial=0))

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
        """Steps ``k`` with enforced memory rows, by stage ``t``; omits stages without such rows."""
        if self.enforces_all_steps:
            return {t: range(t + 1) for t in range(self.n_stages)}
        rows: dict[int, set[int]] = {q: {q} for q in self.stage_rows}
        for t, k in self.step_rows:
            rows.setdefault(t, set()).add(k)
        return {t: frozenset(steps) for t, steps in rows.items()}

    def is_free(self, graph: Graph, i: int, begin: int, end: int) -> bool:
        """Return whether keeping tensor `i` from group `begin` to `end` adds to no enforced row.

        It is free if each group ends at a stage whose row counts `i` anyway, because its node makes
        or reads `i` and overwrites it with no output; and if no step row may count `i`.
        """
        if graph.tensor_bytes[i] == 0:
            return True
        readers = graph.users_of[i]
        n_free_ends = 0
        for q in (graph.node_of[i], *readers[bisect_left(readers, self.first_stage[begin]) :]):
            group = self.group_of[q]
            n_free_ends += (
                begin <= group < end
                and q == self.last_stage[group]
                and q not in self.step_stages
                and q + 1 not in self.step_stages
                and i not in graph.shared_bytes_of[q]
            )
        return n_free_ends == end - begin

    def with_rows(
        self,
        stage_rows: Sequence[int] = (),
        step_rows: Sequence[tuple[int, int]] = (),
        ends_of_user_row: Mapping[int, frozenset[int]] | None = None,
    ) -> Grouping:
        """Return a grouping that enforces the rows of this one and the given rows.

        `ends_of_user_row` maps positions of per-stage user constraints to their
        `coefficient_change_stages`, where groups end. Not for `one_group_per_stage`.
        """
        ends_of_user_row = ends_of_user_row or {}
        return Grouping(
            self.n_stages,
            self.stage_rows | frozenset(stage_rows),
            self.step_rows | frozenset(step_rows),
            self.user_rows | ends_of_user_row.keys(),
            self.user_row_ends.union(*ends_of_user_row.values()),
        )


def coefficient_change_stages(row: LinearRow) -> frozenset[int]:
    """Return the stages `t - 1` for which the coefficients of a per-stage row change at stage `t`.

    A decision's coefficient is compared with its latest one since the last change; stages without a
    term of the decision are skipped.
    """
    values_of_stage: dict[int, dict[tuple[str, int], float]] = {}
    for value, (family, (t, item)) in row.terms:
        values_of_stage.setdefault(t, {})[family, item] = value
    change_stages: set[int] = set()
    current_values: dict[tuple[str, int], float] = {}
    for t in sorted(values_of_stage):
        if any(
            current_values.get(decision, value) != value
            for decision, value in values_of_stage[t].items()
        ):
            change_stages.add(t - 1)
            current_values = {}
        current_values |= values_of_stage[t]
    return frozenset(change_stages)
