"""The relaxations that ``lazy`` solves: ``compact`` over groups of stages, with few memory rows.

Stages between two enforced memory rows share their columns.
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
from poetmodel.model.events import drop_dominated_keeps, find_events
from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.memory import MEMORY
from poetmodel.model.objective import LIMITS_AND_OBJECTIVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import Problem


def _add_further_counts(m: Model) -> None:
    """Count rewarded recomputations and page-ins beyond one per group.

    A group decides once whether it recomputes a node, which may happen in each of its stages. So
    for each node or tensor that a limit or the objective rewards, an integer counts the further
    recomputations or page-ins::

        recomputed_beside[k] <= stages after k - groups that decide on k
        paged_in_beside[i]   <= stages after node(i) - groups that decide on i

    Limits and the objective include these counts, memory rows do not. With groups of one stage
    there are no such counts. Only tensors that were paged out are paged in::

        paged_in_beside[i] <= max_count * paged_out[i]    i is not on storage from the start
    """
    problem, events = m.problem, m.events
    rewards, node_of = problem.rewards, problem.graph.node_of
    recomputations = {
        k: problem.graph.last_stages[k] - k - len(events.recompute[k])
        for k, reward in enumerate(rewards.compute)
        if reward and m.recomputable[k]
    }
    pages = {
        i: problem.graph.last_page_in_stage(i) - node_of[i] - len(events.page_in[i])
        for i, reward in enumerate(rewards.page_in)
        if reward and problem.can_page
    }
    for name, max_counts in (("recomputed_beside", recomputations), ("paged_in_beside", pages)):
        positive_counts = {item: times for item, times in max_counts.items() if times}
        m.add_variables(
            name, positive_counts, upper=[float(times) for times in positive_counts.values()]
        )
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


def _fix_keeps(m: Model) -> None:
    """Fix free keeps to 1 and dominated keeps to 0.

    A free keep is surely in RAM and in no enforced row; a dominated keep is never needed::

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
            _add_further_counts,
            "poetmodel: own constraints count every recomputation and page-in",
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


def build_relaxation(problem: Problem, grouping: Grouping, recomputable: Sequence[bool]) -> Model:
    """Build the relaxation of a problem that enforces the rows of a grouping.

    Its optimum is a lower bound for the problem, and equals the problem's optimum if its solution,
    disaggregated to stages, satisfies every row. `recomputable` comes from
    `poetmodel.model.events.recomputable_nodes`.
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
        events = drop_dominated_keeps(problem, events, may_move=lambda group: group not in single)
    m.events = events
    LAZY.populate(m)
    return m
