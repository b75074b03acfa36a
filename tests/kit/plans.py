"""Programs spelled in short words, and random plans, of training steps with state too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kit.instances import (
    random_costs,
    random_graph,
    random_schedule,
    random_state_schedule,
    random_step,
)
from kit.worked import state, update
from poetmodel.device import StorageMode
from poetmodel.graph import Graph, operation
from poetmodel.plan import Instruction, Op, Plan, check_plan
from poetmodel.plan.derivation import with_waits_and_frees
from poetmodel.planner import make_plan
from poetmodel.schedule import simulate
from poetmodel.schedule.homes import Homes

if TYPE_CHECKING:
    from random import Random

    from poetmodel.device import Costs
    from poetmodel.schedule import Schedule


WORDS: Final = {"c": Op.COMPUTE, "i": Op.PAGE_IN, "o": Op.PAGE_OUT, "w": Op.WAIT, "f": Op.FREE}
PAGED: Final = "c0 o0 c1 w0 f0 c2 f1 i0 w0 c3 f0 f2"
"""`worked.skip_graph` with `a` paged; without both ``w0`` it is a blocking program."""
FOLLOWS: Final = f"{PAGED} f3"
"""The same, and the tensor that nobody reads is freed too, as the derived frees have it."""


def plan(text: str, mode: str = "dma", **keys: Any) -> Plan:
    """Return the plan that words such as ``c0 o0 w0 f0`` spell."""
    words = text.split()
    program = tuple(Instruction(WORDS[word[0]], int(word[1:])) for word in words)
    return Plan(program=program, mode=StorageMode(mode), **keys)


def random_plan(rng: Random, mode: str, n: tuple[int, int] = (3, 10)) -> tuple[Graph, Costs, Plan]:
    """Return a random graph, its costs, and the plan of a random schedule."""
    graph = random_graph(rng, n)
    costs = random_costs(rng, graph, mode=mode)
    schedule = random_schedule(rng, graph)
    return graph, costs, make_plan(graph, costs, schedule, mode=mode)


def altered(rng: Random, graph: Graph, plan: Plan) -> Plan:
    """Return a plan with one instruction taken out, doubled, moved or pointed elsewhere."""
    lines = list(plan.program)
    k = rng.randrange(len(lines))
    how = rng.randrange(4)
    if how == 0:
        del lines[k]
    elif how == 1:
        lines.insert(rng.randrange(len(lines)), lines[k])
    elif how == 2:
        line = lines.pop(k)
        lines.insert(rng.randrange(len(lines) + 1), line)
    else:
        most = len(graph.nodes) if lines[k].op == Op.COMPUTE else len(graph.tensors)
        lines[k] = Instruction(lines[k].op, rng.randrange(most) if most else 0)
    return replace(plan, program=tuple(lines), ram_budget_bytes=None)


def random_program(
    graph: Graph, random: Random, mode: StorageMode, *, page: float = 0.4, drop: float = 0.2
) -> Plan:
    """Return a valid plan in which inputs are at random paged in, computed anew, or still there."""
    made = _Program(graph, random, page, drop)
    for k in range(len(graph.nodes)):
        made.compute(k)
    plan = Plan(program=with_waits_and_frees(Homes.of(graph), made.steps, mode), mode=mode)
    check = check_plan(graph, None, plan)
    assert check.valid, check.violations
    return plan


class _Program:
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


STORED: Final = "c0 c1 c2 f0 f1 i1 c3 c4 f2 f3 c5 f4 o5 f5"
"""A blocking program of `state_step` with all state on storage; w is read twice."""
HELD: Final = "c0 c1 c2 f0 c3 c4 f2 c5 f4"
"""One with all state in RAM, or memory-mapped but for the page-out of w+."""


def state_step() -> Graph:
    """Return x, w, y = f(x, w) in place of x, v, g = b(y, w), w+ = u(w, g)."""
    return Graph(
        name="step",
        nodes=(
            operation("x", output_bytes=10),
            state("w", 8),
            operation("y", output_bytes=6, inputs=("x", "w"), in_place={"y": "x"}),
            state("v", 3),
            operation("g", output_bytes=9, inputs=("y", "w", "v")),
            update("u", "g", w=8),
        ),
    )


class StateCase(NamedTuple):
    """A schedule of a random training step, and its costs."""

    graph: Graph
    costs: Costs
    schedule: Schedule


def random_state_case(
    rng: Random, n: tuple[int, int] = (3, 9), *, mapped: bool = False
) -> StateCase:
    """Return a random step with a valid schedule; its storage has DMA unless it is mapped."""
    while True:
        graph = random_step(rng, n, flops=9)
        schedule = random_state_schedule(rng, graph, mapped=mapped)
        costs = random_costs(rng, graph, mode="blocking" if mapped else "dma")
        device = costs.device
        if mapped and device is not None and device.storage is not None:
            storage = replace(device.storage, memory_mapped=True)
            costs = replace(costs, device=replace(device, storage=storage))
        if schedule is not None and simulate(graph, costs, schedule).valid:
            return StateCase(graph, costs, schedule)


def random_state_plan(rng: Random, mode: str) -> tuple[Graph, Costs, Plan]:
    """Return a random step, its costs, and the plan of a random schedule, a quarter mapped."""
    graph, costs, schedule = random_state_case(rng, mapped=rng.random() < 0.25)
    return graph, costs, make_plan(graph, costs, schedule, mode=mode)
