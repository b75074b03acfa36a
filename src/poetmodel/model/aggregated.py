"""The relaxations that ``lazy`` solves: ``compact`` over groups of stages, few memory rows.

Between two memory rows that are enforced nothing tells stages apart: they share their columns.
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
from poetmodel.model.events import find_events, without_dominated_keeps
from poetmodel.model.formulation import AFTER_VARIABLES, Component, Formulation
from poetmodel.model.memory import MEMORY
from poetmodel.model.objective import LIMITS_AND_OBJECTIVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import Problem


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
    wanted, node_of = problem.rewards, problem.graph.node_of
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
