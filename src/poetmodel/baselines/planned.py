"""Schedules from a plan that is fixed beforehand: between which uses a tensor is out of RAM."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from poetmodel.baselines.execution import Execution
from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import simulate
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Gap:
    """A tensor between two uses that are not in adjacent stages."""

    tensor: int
    """The tensor."""
    before: int
    """The node that makes or reads it before the gap."""
    after: int
    """The next node that reads it."""


def gaps_of(graph: Graph) -> list[Gap]:
    """Return every gap of a graph, by tensor and stage."""
    found: list[Gap] = []
    for i, users in enumerate(graph.users_of):
        ends = (graph.node_of[i], *users)
        found.extend(Gap(i, a, b) for a, b in pairwise(ends) if b > a + 1)
    return found


def loads_of(graph: Graph) -> NDArray[np.int64]:
    """Return for each stage what RAM holds while its node is computed and no gap is used.

    Returns
    -------
    ndarray of int64, shape (n_nodes,) [B]
        The working set of the node and all tensors in a gap. A tensor that is out of RAM in a gap
        takes its bytes off the stages ``before + 1`` to ``after - 1``.
    """
    load = np.array(graph.step_bytes, dtype=np.int64)
    for gap in gaps_of(graph):
        load[gap.before + 1 : gap.after] += graph.tensor_bytes[gap.tensor]
    return load


def carry_out(problem: Problem, pages: Mapping[Gap, bool]) -> Schedule:
    """Carry out a plan, whatever RAM that takes.

    Parameters
    ----------
    problem : Problem
        Gives the graph.
    pages : mapping of Gap to bool
        The gaps in which a tensor is out of RAM; true where it is paged in after it, false where it
        is recomputed. On the way of a recomputation, what is on storage is paged in and all else
        recomputed, as far back as needed.

    Returns
    -------
    Schedule
        Keeps no limit by itself.
    """
    return _Planned(problem, pages).run()


class _Planned(Execution):
    def __init__(self, problem: Problem, pages: Mapping[Gap, bool]) -> None:
        super().__init__(problem)
        graph = problem.graph
        self.out_after: dict[tuple[int, int], bool] = {
            (gap.tensor, gap.before): page for gap, page in pages.items()
        }
        self.last_use = list(graph.node_of)
        """The last node that has used each tensor in its own stage."""
        self.stored = {gap.tensor for gap, page in pages.items() if page}
        if problem.can_page:
            self.stored |= {i for i, k in enumerate(graph.node_of) if graph.nodes[k].on_aux}

    def fetches(self, i: int) -> bool:
        return self.out_after.get((i, self.last_use[i]), i in self.stored)

    def keeps(self, i: int) -> bool:
        return self.is_awaited(i) and (i, self.last_use[i]) not in self.out_after

    def on_compute(self, k: int) -> None:
        if k == self.stage:
            for i in self.graph.inputs_of[k]:
                self.last_use[i] = k

    def _make_room(self, demand_bytes: int, k: int) -> None:
        """Take what is needed: the plan alone decides what leaves."""


def fitting(problem: Problem, schedule: Schedule) -> Schedule:
    """Return a schedule that keeps the RAM budget.

    Raises
    ------
    MethodNotApplicableError
        If it does not.
    """
    usable = problem.usable_ram_bytes
    peak = simulate(problem.graph, None, schedule).peak
    if peak.ram_bytes > usable:
        msg = (
            f"its schedule needs {format_bytes(peak.ram_bytes)} at "
            f"{problem.graph.nodes[peak.node].name!r}, and tensors may use {format_bytes(usable)}"
        )
        raise MethodNotApplicableError(msg)
    return schedule
