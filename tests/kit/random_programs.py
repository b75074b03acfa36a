"""Random programs of a training graph: what may be recomputed or paged, at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.plan import Instruction, Op, Plan, check_plan
from poetmodel.plan.derivation import with_waits_and_frees
from poetmodel.plan.homes import PlanHomes

if TYPE_CHECKING:
    from random import Random

    from poetmodel.device import StorageMode
    from poetmodel.graph import Graph


def random_plan(
    graph: Graph, random: Random, mode: StorageMode, *, page: float = 0.4, drop: float = 0.2
) -> Plan:
    """Return a valid plan in which inputs are at random paged in, computed anew, or still there."""
    made = _Random(graph, random, page, drop)
    for k in range(len(graph.nodes)):
        made.compute(k)
    plan = Plan(program=with_waits_and_frees(PlanHomes.of(graph), made.steps, mode), mode=mode)
    check = check_plan(graph, None, plan)
    assert check.valid, check.violations
    return plan


class _Random:
    def __init__(self, graph: Graph, random: Random, page: float, drop: float) -> None:
        self.graph, self.random, self.page, self.drop = graph, random, page, drop
        self.steps: list[Instruction] = []
        self.stored: set[int] = set()

    def compute(self, k: int, depth: int = 0) -> None:
        """Compute a node, after its inputs were fetched at random."""
        recomputed: set[int] = set()
        for i in self.graph.inputs_of[k]:
            maker = self.graph.node_of[i]
            draw = self.random.random()
            if i in self.stored and draw < self.page and maker not in recomputed:
                self.steps.append(Instruction(Op.PAGE_IN, i))
            elif draw > 1 - self.drop and depth < 3:
                if maker not in recomputed:
                    self.compute(maker, depth + 1)
                recomputed.add(maker)
        self.steps.append(Instruction(Op.COMPUTE, k))
        for i in self.graph.outputs_of[k]:
            if self.graph.users_of[i] and i not in self.stored and self.random.random() < self.page:
                self.steps.append(Instruction(Op.PAGE_OUT, i))
                self.stored.add(i)
