"""The relaxations that ``lazy`` solves: ``compact`` over groups of stages, few memory rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyomo.core as pyo

from poetmodel.model.compact import (
    FROM_STORAGE,
    INPUTS,
    KEEPING,
    STORAGE,
    VARIABLES,
    state_once,
)
from poetmodel.model.component import Component, Formulation
from poetmodel.model.grouping import find_group_events
from poetmodel.model.linear import entry
from poetmodel.model.memory import StepView, state_memory
from poetmodel.model.objective import DEADLINE, ENERGY_BUDGET, OBJECTIVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.model.grouping import Grouping
    from poetmodel.problem import Problem


def _sure_keeps(m: pyo.ConcreteModel) -> None:
    """Keep what is surely in RAM and counted by no enforced row.

    ::

        kept[i,a] = 1    for the free keeps
    """
    for i, a in m.group_events.kept:
        m.kept[i, a].fix(1)


def _once(m: pyo.ConcreteModel) -> None:
    """Put a tensor into RAM at most once in a group.

    Where room cuts are to be stated, in groups of one stage only: in a longer one a tensor may go
    to make room for a recomputation, and come back::

        kept[i into l] + paged_in[l,i] + recomputed[l,node(i)] <= 1    node(i) has one output
        kept[i into l] + paged_in[l,i] <= 1                            otherwise
    """
    grouping = m.grouping
    long = {
        group
        for group, last in enumerate(grouping.last_stage)
        if m.restoring and grouping.first_stage[group] < last
    }
    events = enumerate(m.events.events)
    state_once(m, [(group, i) for i, groups in events for group in groups if group not in long])


class GroupView(StepView):
    """Entries of the relations at enforced rows, where a group ends or is a single stage."""

    def in_ram(self, t: int, i: int) -> Any | None:
        """Return the variable of keeping tensor `i` into the group of stage `t`, or None."""
        group_of = self.m.events.group_of
        if t >= len(group_of):
            return None
        segment = self.m.events.segment(i, group_of[self.graph.node_of[i]], group_of[t])
        return None if segment is None else self.m.kept[i, segment]

    def computed(self, t: int, k: int) -> Any | None:
        """Return the variable of recomputing node `k` in the group of stage `t`, or None."""
        return entry(self.m.recomputed, (self.m.events.group_of[t], k))

    def paged_in(self, t: int, i: int) -> Any | None:
        """Return the variable of paging tensor `i` in, in the group of stage `t`, or None."""
        return entry(self.m.paged_in, (self.m.events.group_of[t], i))


def _memory(m: pyo.ConcreteModel) -> None:
    """Keep within RAM at the enforced rows.

    For a stage row ``(q,q)``, over the tensors that `q` neither reads nor makes::

        sum(bytes[i] * kept(i across the end of q's group))
        + sum(bytes of in(q) and out(q)) + workspace[q]  <=  budget

    and for a step row ``(t,k)`` the row of ``compact``.
    """
    state_memory(m, GroupView(m), m.grouping.steps)


LAZY = Formulation(
    "lazy",
    (
        VARIABLES,
        Component(
            "sure_keeps", _sure_keeps, "poetmodel: free keep", requires=frozenset({"variables"})
        ),
        Component("once", _once, "poetmodel: once of compact", requires=frozenset({"variables"})),
        KEEPING,
        FROM_STORAGE,
        INPUTS,
        Component(
            "memory",
            _memory,
            "poetmodel: rows of compact that are enforced",
            requires=frozenset({"variables"}),
        ),
        STORAGE,
        DEADLINE,
        ENERGY_BUDGET,
        OBJECTIVE,
    ),
)


def build_relaxation(
    problem: Problem,
    grouping: Grouping,
    recomputable: Sequence[bool],
    *,
    restoring: bool = False,
) -> pyo.ConcreteModel:
    """Return the relaxation of a problem that enforces the rows of a grouping.

    Parameters
    ----------
    problem : Problem
        What to relax.
    grouping : Grouping
        The enforced rows.
    recomputable : sequence of bool, one per node
        From `poetmodel.model.events.recomputable_nodes`.
    restoring : bool
        Whether a tensor may come back to a group that it enters, as room cuts need.

    Returns
    -------
    ConcreteModel
        Its optimum is a lower bound for the problem, and that of the problem where its solution,
        placed on stages, keeps every row.
    """
    m = pyo.ConcreteModel(name=f"{problem.graph.name} (lazy)")
    m.problem = problem
    m.formulation = LAZY
    m.exact = True
    m.grouping = grouping
    m.restoring = restoring
    m.recomputable = tuple(recomputable)
    m.group_events = find_group_events(problem, grouping, recomputable)
    m.events = m.group_events.events
    LAZY.populate(m)
    return m
