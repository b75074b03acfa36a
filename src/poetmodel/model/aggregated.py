"""The relaxations that ``lazy`` solves: ``compact`` over groups of stages, with few memory rows.

Stages between two enforced rows are a group, which has one column per decision.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
from poetmodel.model.events import find_events, mark_dominated_keeps
from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.memory import MEMORY
from poetmodel.model.objective import LIMITS_AND_OBJECTIVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import Problem


def _add_extra_count_variables(m: Model) -> None:
    """Add variables that count rewarded recomputations and page-ins beyond one per group.

    A group has one decision to recompute a node, although each of its stages may recompute it. So
    for each node or tensor that a limit or the objective rewards, an integer variable counts the
    additional recomputations or page-ins in all groups::

        extra_recomputed[k] <= stages that may recompute k - groups that decide on k
        extra_paged_in[i]   <= stages that may page in i - groups that decide on i

    They are added to `Model.decisions`: limits and the objective include them, memory rows do not.
    With groups of one stage, there are no such variables. A page-in requires that the tensor was
    paged out, is a sample on storage, or is state whose home is storage::

        extra_paged_in[i] <= upper bound * paged_out[i]       i is not on storage from the start
        extra_paged_in[i] <= upper bound * storage_home[i]    i is state
    """
    problem, events = m.problem, m.events
    rewards, node_of = problem.rewards, problem.graph.node_of
    max_extra_recomputations = {
        k: problem.graph.last_stages[k] - k - len(events.recompute_groups[k])
        for k, reward in enumerate(rewards.compute)
        if reward and m.recomputable[k]
    }
    max_extra_page_ins = {
        i: problem.graph.last_page_in_stage(i) - node_of[i] - len(events.page_in_groups[i])
        for i, reward in enumerate(rewards.page_in)
        if reward and problem.can_page
    }
    for name, max_counts in (
        ("extra_recomputed", max_extra_recomputations),
        ("extra_paged_in", max_extra_page_ins),
    ):
        positive_max_counts = {
            item: max_count for item, max_count in max_counts.items() if max_count
        }
        m.add_variables(
            name,
            positive_max_counts,
            upper=[float(max_count) for max_count in positive_max_counts.values()],
        )
    m.decisions = replace(
        m.decisions,
        recomputations=[*m.decisions.recomputations, *m.extra_recomputed.items()],
        page_ins=[*m.decisions.page_ins, *m.extra_paged_in.items()],
    )
    m.begin_rows("extra_from_storage")
    for i, column in m.extra_paged_in.items():
        if i not in problem.graph.on_aux:
            home = m.storage_home[i] if i in m.storage_home else m.paged_out[i]
            m.add_row(i, (column, home), (1.0, -max_extra_page_ins[i]), upper=0.0)


def _fix_keeps(m: Model) -> None:
    """Fix the free keeps of `Model.events` to 1 and the dominated keeps to 0, in `Model.fixed`.

    The tensor of a free keep can be in RAM in every solution, and keeping it adds to no enforced
    memory row. For every schedule, there is one without dominated keeps that is as good::

        kept[i,a] = 1    for each free keep
        kept[i,a] = 0    for each dominated keep
    """
    for value, keeps in ((1.0, m.events.free_keeps), (0.0, m.events.dominated_keeps)):
        for i, a in keeps:
            m.fixed[m.kept[i, a]] = value


LAZY = Formulation(
    "lazy",
    (
        VARIABLES,
        Component(
            "extra_counts",
            _add_extra_count_variables,
            "poetmodel: user-defined constraints count every recomputation and page-in",
            AFTER_VARIABLES,
        ),
        Component(
            "fixed_keeps",
            _fix_keeps,
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
"""The formulation of relaxations: ``compact`` over the groups of `Model.grouping`."""


def build_relaxation(
    problem: Problem,
    grouping: Grouping,
    recomputable: Sequence[bool],
    *,
    drops_dominated_keeps: bool = True,
) -> Model:
    """Build the relaxation of a problem that enforces the rows of a grouping.

    Its optimum is a lower bound, and equals the problem's if the solution, disaggregated to stages,
    satisfies every row. Dominated keeps are fixed only if no per-stage user constraint is enforced.
    `Model.relations` is not set.
    """
    m = Model(problem, LAZY, exact=True)
    m.grouping = grouping
    m.recomputable = tuple(recomputable)
    events = find_events(
        problem,
        grouping.group_of,
        recomputable=recomputable,
        counted_rows=[problem.stage_limits[position] for position in grouping.user_rows],
        is_free=partial(grouping.is_free, problem.working_graph),
    )
    if drops_dominated_keeps and not grouping.user_rows:
        step_row_groups = {grouping.group_of[t] for t in grouping.step_stages}
        events = mark_dominated_keeps(
            problem, events, allows_moves=lambda group: group not in step_row_groups
        )
    m.events = events
    LAZY.populate(m)
    return m
