"""Programs spelled in short words, and plans of random schedules, for tests about plans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kit.instances import random_costs, random_graph, random_schedule
from poetmodel.device import StorageMode
from poetmodel.plan import Instruction, Op, Plan
from poetmodel.planner import make_plan

if TYPE_CHECKING:
    from random import Random

    from poetmodel.device import Costs
    from poetmodel.graph import Graph

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
