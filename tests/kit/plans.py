"""Plans in a short notation, such as ``c0 o0 w0 f0``; random plans, also with state."""

from dataclasses import replace
from typing import NamedTuple

from kit.instances import make_rng, random_costs, random_graph, random_schedule, random_step
from kit.worked import bench_device, make_state_node, make_update_node
from poetmodel.device import Costs, StorageMode
from poetmodel.graph import Graph, operation
from poetmodel.plan import Instruction, Op, Plan, check_plan
from poetmodel.plan.derivation import add_waits_and_frees
from poetmodel.planner import make_plan
from poetmodel.schedule import Schedule, simulate
from poetmodel.schedule.homes import Homes

OPS = {"c": Op.COMPUTE, "i": Op.PAGE_IN, "o": Op.PAGE_OUT, "w": Op.WAIT, "f": Op.FREE}
PAGED = "c0 o0 c1 w0 f0 c2 f1 i0 w0 c3 f0 f2"
"""Program of `worked.skip_graph` that pages `a`; without both ``w0`` it is blocking."""
PAGED_AND_FREED = f"{PAGED} f3"
"""`PAGED`, which also frees the unread tensor, as derived frees do."""


def parse_plan(text, mode="dma", **keys):
    """Return the plan of a program in short notation: letters of `OPS` with indices.

    `keys` are further fields of `Plan`.
    """
    words = text.split()
    program = tuple(Instruction(OPS[word[0]], int(word[1:])) for word in words)
    return Plan(program=program, mode=StorageMode(mode), **keys)


def random_plan(rng, mode, n=(3, 10)):
    """Draw a graph, its costs, and the plan of a random schedule."""
    graph = random_graph(rng, n)
    costs = random_costs(rng, graph, mode=mode)
    schedule = random_schedule(rng, graph)
    return graph, costs, make_plan(graph, costs, schedule, mode=mode)


def alter_plan(rng, graph, plan):
    """Return a plan without a budget in which a random instruction is altered.

    It is removed, repeated elsewhere, moved, or gets another operand.
    """
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


def random_program(graph, random, mode, *, page=0.4, drop=0.2):
    """Draw a valid plan in which inputs of nodes are kept, paged in or recomputed.

    `page` is the probability of a page-out or page-in, `drop` that of a recomputation.
    """
    made = _Program(graph, random, page, drop)
    for k in range(len(graph.nodes)):
        made.compute(k)
    plan = Plan(
        program=add_waits_and_frees(Homes.from_resident(graph), made.steps, mode), mode=mode
    )
    check = check_plan(graph, None, plan)
    assert check.valid, check.violations
    return plan


class _Program:
    def __init__(self, graph, random, page, drop):
        self.graph, self.random, self.page, self.drop = graph, random, page, drop
        self.steps = []
        self.stored = set()

    def compute(self, k, depth=0):
        """Append the computation of a node, after random instructions that provide its inputs."""
        recomputed = set()
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


STORED = "c0 c1 c2 f0 f1 i1 c3 c4 f2 f3 c5 f4 o5 f5"
"""A blocking program of `state_step` with all state on storage; w is paged in twice."""
HELD = "c0 c1 c2 f0 c3 c4 f2 c5 f4"
"""A program of `state_step` with all state in RAM.

For state on memory-mapped storage, a page-out of w+ must be added.
"""


def state_step():
    """Return a step with state w and v: y = f(x, w) in place of x, g = b(y, w, v), w+ = u(w, g)."""
    return Graph(
        name="step",
        nodes=(
            operation("x", output_bytes=10),
            make_state_node("w", 8),
            operation("y", output_bytes=6, inputs=("x", "w"), in_place={"y": "x"}),
            make_state_node("v", 3),
            operation("g", output_bytes=9, inputs=("y", "w", "v")),
            make_update_node("u", "g", w=8),
        ),
    )


class StateCase(NamedTuple):
    """A schedule of a random training step, and its costs."""

    graph: Graph
    costs: Costs
    schedule: Schedule


def random_state_case(rng, n=(3, 9), *, mapped=False):
    """Draw a training step with state, costs and a valid schedule.

    Storage is memory-mapped if `mapped`, otherwise it has DMA.
    """
    while True:
        graph = random_step(rng, n, flops=9)
        schedule = random_schedule(rng, graph, mapped=mapped)
        costs = random_costs(rng, graph, mode="blocking" if mapped else "dma")
        device = costs.device
        if mapped and device is not None and device.storage is not None:
            storage = replace(device.storage, memory_mapped=True)
            costs = replace(costs, device=replace(device, storage=storage))
        if schedule is not None and simulate(graph, costs, schedule).valid:
            return StateCase(graph, costs, schedule)


def random_state_plan(rng, mode):
    """Draw a training step with state, its costs, and the plan of a random schedule.

    Storage is memory-mapped with probability 1/4.
    """
    graph, costs, schedule = random_state_case(rng, mapped=rng.random() < 0.25)
    return graph, costs, make_plan(graph, costs, schedule, mode=mode)


class PlanCase(NamedTuple):
    """A schedule, and a budget that it meets [B]; None for no budget."""

    graph: Graph
    costs: Costs
    schedule: Schedule
    budget: int | None

    def plan(self, mode):
        """Return the plan of the schedule within the budget."""
        graph, costs, schedule, budget = self
        return make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=budget)

    def check(self, mode):
        """Return the check of the plan; assert that the plan is valid."""
        check = check_plan(self.graph, self.costs, self.plan(mode), aux_bytes=2**53)
        assert check.violations == ()
        return check


def plan_cases(count, *, with_state=False):
    """Yield `count` random schedules, also wasteful ones, with tight and loose budgets.

    With state, storage is memory-mapped in a quarter of the cases.
    """
    for number in range(count):
        rng = make_rng(f"planning/{'state/' if with_state else ''}{number}")
        if with_state:
            graph, costs, schedule = random_state_case(rng, mapped=number % 4 == 0)
        else:
            graph = random_graph(rng, (3, 8))
            costs = random_costs(rng, graph, mode="dma", idle=False)
            schedule = random_schedule(rng, graph)
        peak = simulate(graph, costs, schedule).peak_ram_bytes
        yield PlanCase(graph, costs, schedule, peak + rng.choice((0, 0, 3, 20)))


def lower_bound_s(table, moves):
    """Return a lower bound on the makespan of moves [s]: the larger of compute and bus time."""
    times = {
        Op.COMPUTE: table.compute_time_s,
        Op.PAGE_IN: table.page_in_time_s,
        Op.PAGE_OUT: table.page_out_time_s,
    }
    compute_s = sum(times[op][i] for op, i in moves if op == Op.COMPUTE)
    return max(compute_s, sum(times[op][i] for op, i in moves if op != Op.COMPUTE))


def bus_costs(graph, compute_s, page_in_s, page_out_s):
    """Return costs on a device with DMA: 1 J per second of compute, 1 J per transfer."""
    n = len(graph.tensors)
    return Costs.from_arrays(
        graph,
        compute_time_s=compute_s,
        compute_energy_j=compute_s,
        page_in=[(page_in_s, 1.0)] * n,
        page_out=[(page_out_s, 1.0)] * n,
        device=bench_device(mode="dma"),
    )
