"""Content of RAM over time: each copy of a tensor and each workspace of a plan, and its origin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.plan.simulation import check_identity
from poetmodel.schedule.machine import Machine, Origin, Stay

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.plan.program import Plan

__all__ = ["Origin", "Stay", "stays"]


def stays(graph: Graph, plan: Plan) -> tuple[Stay, ...]:
    """Return all that a valid plan has in RAM, in the order in which the program makes it.

    An output in place and its input, and state and what replaces it, share memory: no byte belongs
    to two of them, so that the sum at each instruction is the RAM that `check_plan` finds.

    Raises
    ------
    PlanError
        If the plan names another graph.
    """
    check_identity(graph, plan)
    machine = Machine(plan.homes(graph), plan.program, mode=plan.mode)
    machine.run()
    return tuple(machine.copies)
