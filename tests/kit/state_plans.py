"""Plans of random training steps with state and operators in place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from kit.instances import random_costs
from kit.state_steps import random_state_schedule, random_step, state, update
from poetmodel.graph import Graph, operation
from poetmodel.planner import make_plan
from poetmodel.schedule import simulate

if TYPE_CHECKING:
    from random import Random

    from poetmodel.device import Costs
    from poetmodel.plan import Plan
    from poetmodel.schedule import Schedule


PAGED: Final = "c0 c1 c2 f0 f1 i1 c3 c4 f2 f3 c5 f4 o5 f5"
"""A blocking program of `step` with all state on storage; w is read twice."""
KEPT: Final = "c0 c1 c2 f0 c3 c4 f2 c5 f4"
"""One with all state in RAM, or memory-mapped but for the page-out of w+."""


def step() -> Graph:
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
